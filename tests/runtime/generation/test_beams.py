"""Beam search on any mesh finds what it finds with the logits of the undivided model.

That it is the search of transformers is tested in tests/models.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar_format.options import BeamSearch
from onnxpar_runtime.errors import InputError, OnnxparRuntimeError
from onnxpar_runtime.generation.beams import Beams, Continuation, Hypothesis
from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.group import Ranks
from tests.decoders import FEATURES, VOCAB, encoder_decoder
from tests.runtime.generation.decoders import decoder
from tests.runtime.generation.plain import encoded, last_logits
from tests.tiers import covering

RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (1, 7, 20)]
HOW, NEW = BeamSearch(3, 0.8, "never"), 8


def plain(
    model: Path, prompts: list[list[int]], eos: set[int], left: Any = None
) -> list[list[Hypothesis]]:
    """The same search, with logits of complete sequences, one at a time and without a cache."""
    divisors = [max(n, 1) ** HOW.length_penalty for n in range(NEW + 1)]
    found = []
    for place, prompt in enumerate(prompts):
        search = Beams(HOW, eos, divisors)
        beams: list[list[int]] = [[]]
        while not search.done:
            grown = []
            for beam, tokens in enumerate(beams):
                crossed = {} if left is None else left[place]
                logits = last_logits(model, prompt + tokens, crossed).astype(np.float64)
                scores = search.scores[beam] + logits - np.logaddexp.reduce(logits)
                grown += [Continuation(x, beam, token) for token, x in enumerate(scores.tolist())]
            grown.sort(key=lambda one: -one.score)
            chosen = search.advance(grown)
            beams = [[*beams[one.beam], one.token] for one in chosen]
        found.append(search.hypotheses())
    return found


def same(found: list[list[Hypothesis]], want: list[list[Hypothesis]]) -> None:
    for one, expected in zip(found, want, strict=True):
        assert [h.tokens for h in one] == [h.tokens for h in expected]
        # A logit differs by up to 1e-5 of the largest, which is below 20 (verify's tolerance), a
        # logarithm of a probability by twice that; 8 of them are added and divided by 8^0.8.
        errors = [abs(a.score - b.score) for a, b in zip(one, expected, strict=True)]
        assert max(errors) <= 8**0.2 * 2e-5 * 20


@pytest.mark.parametrize(
    ("kind", "strategy"),
    covering(
        ["growing", "in_place"], ["replicate", "tp=2", "dp=2,tp=2", "dp=4", "pp=2", "pp=2,dp=2"]
    ),
)
def test_any_mesh_finds_the_same_sequences(kind: str, strategy: str, tmp_path: Path) -> None:
    """Three prompts of different lengths, on meshes that do not divide them."""
    model = decoder(kind, tmp_path)
    free = plain(model, PROMPTS, set())
    eos = {free[0][0].tokens[3], free[2][1].tokens[5]}
    want = plain(model, PROMPTS, eos)
    assert len({len(h.tokens) for one in want for h in one}) > 2
    devices = 1 if strategy == "replicate" else None
    out = shard_model(model, strategy, tmp_path / "out", devices=devices).out
    with Ranks(out, Generator) as ranks:
        first, *others = ranks.on_each(
            lambda m: m.beam_search(PROMPTS, HOW, max_new_tokens=NEW, eos=eos)
        )
        assert all(found == first for found in others)
        same(first, want)
        # The ranks and their memory can be used again.
        (again, *_) = ranks.on_each(
            lambda m: m.beam_search(PROMPTS[1:], HOW, max_new_tokens=NEW, eos=eos)
        )
        same(again, want[1:])


def test_an_encoder_runs_once_for_all_beams(tmp_path: Path) -> None:
    folder = encoder_decoder(tmp_path / "model")
    features = np.random.default_rng(0).normal(0, 2, (3, 10, FEATURES)).astype(np.float32)
    left = encoded(folder, [{"features": row[None]} for row in features])
    want = plain(folder / "decoder.onnx", PROMPTS, set(), left)
    out = shard_model(folder, "dp=2,tp=2", tmp_path / "out").out
    given: Any = {"max_new_tokens": NEW, "encoder": {"features": features}}
    with Ranks(out, Generator) as ranks:
        for found in ranks.on_each(lambda m: m.beam_search(PROMPTS, HOW, **given)):
            same(found, want)


@pytest.mark.parametrize(
    ("how", "prompts", "message"),
    [
        (BeamSearch(0), PROMPTS, "beams: expected at least 1, got 0"),
        (BeamSearch(2, 1.0, "soon"), PROMPTS, "early_stopping: expected one of false, true, never"),
        (BeamSearch(2, float("nan")), PROMPTS, "length_penalty: expected from -10 to 10, got nan"),
        (HOW, [], "prompts: expected at least one, got none"),
        (HOW, [[1], []], "prompt 1: expected at least one token, got none"),
        (HOW, [[1], [97]], "input 'input_ids': expected elements from -96 to 95"),
        (HOW, [[1] * 250], "expected at most 256 in a sequence"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    how: BeamSearch, prompts: list[list[int]], message: str, tmp_path: Path
) -> None:
    out = shard_model(decoder("growing", tmp_path), "tp=2", tmp_path / "out").out
    with Ranks(out, Generator) as ranks:
        with pytest.raises(OnnxparRuntimeError, match=message) as caught:
            ranks.on_each(lambda m: m.beam_search(prompts, how, max_new_tokens=NEW))
        assert isinstance(caught.value, InputError) and caught.value.agreed

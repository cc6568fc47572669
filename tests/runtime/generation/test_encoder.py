"""Tokens of an encoder-decoder equal those of a plain loop over its undivided halves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.errors import InputError, OnnxparRuntimeError
from onnxpar_runtime.generation.encoder import token_feeds
from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.manifest import Manifest
from tests.decoders import FEATURES, HIDDEN, VOCAB, encoder_decoder, growing
from tests.runtime.generation.plain import encoded, greedy
from tests.tiers import covering

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (1, 7, 64)]
NEW = 24
CASES = [
    f"batch={rows},sequence_length={n},past_sequence_length={past},total_sequence_length={n + past}"
    for rows, n, past in ((4, 2, 6), (3, 5, 1))
]


def features(rows: int = 3, frames: int = 10, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 2, (rows, frames, FEATURES)).astype(np.float32)


def plain(folder: Path, prompts: list[list[int]], given: Any, count: int) -> list[list[int]]:
    left = encoded(folder, [{"features": row[None]} for row in given])
    return greedy(folder / "decoder.onnx", prompts, count, left)


@pytest.mark.parametrize(
    ("strategy", "frames"),
    covering(["replicate", "tp=2", "tp=3", "tp=4", "dp=2", "dp=2,tp=2", "dp=4"], [1, 10]),
)
def test_tokens_equal_those_of_the_undivided_model(
    strategy: str, frames: int, tmp_path: Path
) -> None:
    """Prompts of three lengths on meshes that do not divide the batch; then another batch."""
    folder = encoder_decoder(tmp_path / "model")
    out = shard_model(
        folder, strategy, tmp_path / "out", devices=1 if strategy == "replicate" else None
    ).out
    first, second = features(frames=frames), features(1, 2 * frames, seed=5)
    want = plain(folder, PROMPTS, first, NEW)
    other = plain(folder, PROMPTS[1:2], second, NEW)
    # What the encoder read decides.
    assert plain(folder, PROMPTS, -first, NEW) != want and other != want[1:2]
    with Ranks(out, Generator) as ranks:

        def both(m: Generator) -> Any:
            one = m.generate(PROMPTS, max_new_tokens=NEW, encoder={"features": first})
            two = m.generate(PROMPTS[1:2], max_new_tokens=NEW, encoder={"features": second})
            return one, two

        assert ranks.on_each(both) == [(want, other)] * ranks.manifest.devices


def test_the_encoder_runs_once_and_sends_what_the_manifest_says(tmp_path: Path) -> None:
    folder = encoder_decoder(tmp_path / "model")
    out = shard_model(folder, "tp=2", tmp_path / "out").out
    (case,) = runtime.verify(out, folder, options=VerifyOptions(generate=12))
    assert case.ok, case
    # The decoder reduces its embedding and three sums in each of two layers, for the 64 tokens of
    # the longest prompt and 11 more; the encoder one sum, for 16 frames. Rows of 32 floats.
    decoder = Manifest.load(out).program("model").collectives
    assert case.bytes_counted == (len(decoder) * (64 + 11) + 16) * 3 * HIDDEN * 4


def test_both_programs_are_compared_with_their_own_models(tmp_path: Path) -> None:
    folder = encoder_decoder(tmp_path / "model")
    out = shard_model(folder, "dp=2,tp=2", tmp_path / "out").out
    cases = runtime.verify(out, folder, CASES)
    assert len(cases) == 4 and all(case.ok for case in cases), cases
    assert [set(case.symbols) for case in cases[2:]] == [{"batch", "frames"}] * 2
    other = encoder_decoder(tmp_path / "other", seed=3)
    files = (folder / "decoder.onnx", other / "encoder.onnx")
    wrong = runtime.verify(out, files[0], CASES, encoder=files[1])
    assert [case.ok for case in wrong] == [True, True, False, False]
    assert wrong[2].problems[0].startswith("program 'encoder': output 'present_")
    (one,) = runtime.verify(
        out, files[0], encoder=files[1], options=VerifyOptions(generate=4, prompt_tokens=8)
    )
    assert not one.ok
    with pytest.raises(InputError, match="program 'encoder': expected its undivided model as well"):
        runtime.verify(out, files[0], CASES)
    alone = shard_model(folder, "replicate", tmp_path / "one", devices=1).out
    assert all(case.ok for case in runtime.verify(out, alone, CASES))
    (case,) = runtime.verify(out, alone, options=VerifyOptions(generate=4, prompt_tokens=8))
    assert case.ok, case


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"inputs: expected \['features'\], got \[\]: missing"),
        ({"features": features(2)}, r"expected the shape \(3, 4, 10, 4\) of this batch, got \(2"),
        ({"features": features(), "x": features()}, r"unknown \['x'\]"),
        ({"features": features()[..., :5]}, "features"),
    ],
)
def test_inputs_of_the_encoder_that_do_not_fit_are_refused(
    given: Any, message: str, tmp_path: Path
) -> None:
    folder = encoder_decoder(tmp_path / "model")
    out = shard_model(folder, "tp=2", tmp_path / "out").out
    with Ranks(out, Generator) as ranks:
        with pytest.raises(OnnxparRuntimeError, match=message):
            ranks.on_each(lambda m: m.generate(PROMPTS, max_new_tokens=2, encoder=given))
        # The ranks can go on.
        right = {"features": features()}
        ranks.on_each(lambda m: m.generate(PROMPTS, max_new_tokens=2, encoder=right))


def test_a_decoder_alone_takes_no_inputs_of_an_encoder(tmp_path: Path) -> None:
    model = growing(tmp_path / "model.onnx")
    out = shard_model(model, "replicate", tmp_path / "out", devices=1).out
    with Generator(out) as generator, pytest.raises(InputError, match="no inputs of an encoder"):
        generator.generate([[1]], encoder={"features": features(1)})


def test_requests_of_features_are_refused(tmp_path: Path) -> None:
    folder = encoder_decoder(tmp_path / "model")
    out = shard_model(folder, "replicate", tmp_path / "out", devices=1).out
    with Generator(out) as generator:
        with pytest.raises(InputError, match=r"need an encoder of tokens, got .*'features'"):
            generator.requests(slots=2, length=32, start=[1])
        with pytest.raises(InputError, match="start: expected the token with which"):
            generator.requests(slots=2, length=32)


def test_an_encoder_of_features_reads_no_tokens(tmp_path: Path) -> None:
    folder = encoder_decoder(tmp_path / "model")
    out = shard_model(folder, "replicate", tmp_path / "out", devices=1).out
    with pytest.raises(InputError, match=r"expected an encoder of tokens, got one with the inputs"):
        token_feeds(Manifest.load(out).program("encoder"), [[1]])

"""Generated tokens equal those of a plain loop over the undivided model, on any mesh."""

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar.core.symbols import Symbol
from onnxpar_format.options import Sampling
from onnxpar_runtime.errors import InputError, OnnxparRuntimeError
from onnxpar_runtime.generation.generator import Generator, Step
from onnxpar_runtime.group import Ranks
from tests.runtime.generation.decoders import decoder, mixed
from tests.runtime.generation.plain import greedy, last_logits
from tests.tiers import covering

STRATEGIES = {
    "replicate": 1,
    "tp=2": None,
    "tp=4": None,
    "dp=2,tp=2": None,
    "dp=4": None,
    "pp=2": None,
    "pp=2,tp=2": None,
    "pp=2,dp=2": None,
}
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(0, 96, size).tolist() for size in (1, 7, 64)]
NEW = 24
# All begin alike; the shortest is the beginning of the others.
ALIKE = [[*PROMPTS[2], 5, 6], [*PROMPTS[2], *PROMPTS[1] * 3], [*PROMPTS[2], 7], [*PROMPTS[2], 5, 6]]
DRAWN = Sampling(temperature=0.9, seed=5)
NUCLEUS = Sampling(temperature=1.2, top_p=0.7, repetition_penalty=1.3, seed=7)
BEST = Sampling(temperature=0.8, top_k=4, top_p=0.9, seed=9)


def in_chunks(prompts: list[list[int]], chunk: int, m: Generator) -> list[Step]:
    return list(m.steps(prompts, max_new_tokens=4, chunk=chunk))


def drawing(how: Sampling, m: Generator) -> list[list[int]]:
    return m.generate(PROMPTS, max_new_tokens=10, sampling=how)


@pytest.mark.parametrize(("kind", "strategy"), covering(["growing", "in_place"], STRATEGIES))
def test_tokens_equal_those_of_the_undivided_model(
    kind: str, strategy: str, tmp_path: Path
) -> None:
    """A batch of three lengths on meshes that do not divide it; then drawn tokens of two meshes."""
    model = decoder(kind, tmp_path)
    want = greedy(model, PROMPTS, NEW)
    assert len({tuple(tokens) for tokens in want}) == 3
    alone = shard_model(model, "replicate", tmp_path / "one", devices=1).out
    out = shard_model(model, strategy, tmp_path / "out", devices=STRATEGIES[strategy]).out
    with Ranks(out, Generator) as ranks, Ranks(alone, Generator) as one:
        for found in ranks.on_each(lambda m: m.generate(PROMPTS, max_new_tokens=NEW)):
            assert found == want
        for how in (DRAWN, NUCLEUS, BEST):
            (drawn,) = one.on_each(partial(drawing, how))
            for found in ranks.on_each(partial(drawing, how)):
                assert found == drawn
            assert drawn != [tokens[:10] for tokens in want]
        # Each rank holds its share of the cache.
        shares = [m.state_bytes for m in ranks.members]
    assert len(set(shares)) == 1


@pytest.mark.parametrize(
    ("kind", "strategy"),
    covering(["growing", "in_place"], ["tp=2", "dp=2,tp=2", "dp=4", "pp=2"]),
)
def test_long_prompts_and_common_beginnings_give_the_same_tokens(
    kind: str, strategy: str, tmp_path: Path
) -> None:
    """No run has more tokens than a chunk; a common beginning of 64 runs once, in one row."""
    model = decoder(kind, tmp_path)
    out = shard_model(model, strategy, tmp_path / "out").out
    size = {"growing": "sequence_length", "in_place": "seq"}[kind]
    with Ranks(out, Generator) as ranks:
        for prompts, chunk in ((PROMPTS, 20), (ALIKE, 512), (ALIKE, 50)):
            made = ranks.on_each(partial(in_chunks, prompts, chunk))
            want = greedy(model, prompts, 4)
            for steps in made:
                assert [[step.tokens[row] for step in steps] for row in range(len(prompts))] == want
            sizes = [run[size] for run in made[0][0].runs]
            assert max(sizes) == min(chunk, 64)
            if kind == "growing":
                rest = [20, 20, 20, 4] if prompts is PROMPTS else [21]
            else:
                # Each row alone, but for its last token, which runs with those of the others.
                rest = [6, 20, 20, 20, 3, 1] if prompts is PROMPTS else [1, 20, 1, 1]
            common = [] if prompts is PROMPTS else [64] if chunk > 64 else [50, 14]
            assert sizes == [*common, *rest]


@pytest.mark.parametrize("strategy", ["tp=2", "dp=2"])
def test_a_common_beginning_of_states_of_both_kinds_runs_with_each_prompt(
    strategy: str, tmp_path: Path
) -> None:
    """Copies of what one row has read fit rows of one kind of state only."""
    model = mixed(tmp_path)
    out = shard_model(model, strategy, tmp_path / "out").out
    prompts = [[*PROMPTS[2], *tail] for tail in ([5, 6, 7], [7, 5, 8])]
    want = greedy(model, prompts, 8)
    assert want[0] != want[1] and len(set(want[0])) > 4
    with Ranks(out, Generator) as ranks:
        assert {(s.grows, s.appends) for s in ranks.manifest.program("model").carried} == {
            (2, True),
            (2, False),
        }
        for chunk in (512, 50):
            for steps in ranks.on_each(partial(in_chunks, prompts, chunk)):
                assert [[s.tokens[row] for s in steps] for row in (0, 1)] == [w[:4] for w in want]
                assert steps[0].runs[0]["seq"] == 67


@pytest.mark.parametrize("strategy", ["tp=2", "dp=2,tp=2", "pp=2"])
def test_log_probabilities_are_those_of_the_logits_of_the_undivided_model(
    strategy: str, tmp_path: Path
) -> None:
    """Also where tokens are drawn; the likeliest come first, and as many as were asked for."""
    model = decoder("growing", tmp_path)
    out = shard_model(model, strategy, tmp_path / "out").out

    def steps(m: Generator) -> list[Step]:
        how = Sampling(temperature=0.9, seed=5, repetition_penalty=1.5)
        return list(m.steps(PROMPTS, max_new_tokens=6, sampling=how, logits=True, logprobs=4))

    with Ranks(out, Generator) as ranks:
        found = ranks.on_each(steps)
    likely = [[step.likelihoods for step in steps_of] for steps_of in found]
    assert all(one == likely[0] for one in likely)
    sequences = [list(prompt) for prompt in PROMPTS]
    for step in found[0]:
        assert step.likelihoods is not None and step.logits is not None
        for row, one in step.likelihoods.items():
            own = step.logits[row].astype(np.float64)
            plain = last_logits(model, sequences[row]).astype(np.float64)
            for logits, bound in (
                # 96 terms: the sum has at most 96 relative errors of 2^-53, and its logarithm as
                # many absolute ones; the difference adds one of the logits' size.
                (own, (96 + np.abs(own).max()) * 2.0**-52),
                # A logarithm of a probability changes by no more than twice the largest change of
                # a logit, here up to 1e-5 of the largest logit (verify's tolerance).
                (plain, 2e-5 * np.abs(plain).max()),
            ):
                want = logits - np.logaddexp.reduce(logits)
                assert abs(one.logprob - want[step.tokens[row]]) <= bound
                got = np.array([x for _, x in one.best])
                np.testing.assert_allclose(got, np.sort(want)[:-5:-1], rtol=0, atol=bound)
                assert np.abs(want[[t for t, _ in one.best]] - got).max() <= bound
            sequences[row].append(step.tokens[row])


def test_a_mesh_divides_the_cache(tmp_path: Path) -> None:
    model = decoder("in_place", tmp_path)
    bytes_of = {}
    for strategy, devices in (("replicate", 1), ("tp=4", None), ("dp=2,tp=2", None)):
        out = shard_model(model, strategy, tmp_path / strategy, devices=devices).out
        with Ranks(out, Generator) as ranks:
            ranks.on_each(lambda m: m.generate([[1, 2], [3, 4]], max_new_tokens=8))
            bytes_of[strategy] = ranks.members[0].state_bytes
    # Two layers, keys and values, of 2 sequences, 4 heads, 9 positions and 16 numbers.
    assert bytes_of["replicate"] == 2 * 2 * 2 * 4 * 9 * 16 * 4
    assert bytes_of["tp=4"] == bytes_of["dp=2,tp=2"] == bytes_of["replicate"] // 4


def test_sequences_end_at_their_own_tokens(tmp_path: Path) -> None:
    model = decoder("growing", tmp_path)
    want = greedy(model, PROMPTS, NEW)
    ends = {want[0][3], want[1][5]}
    out = shard_model(model, "tp=2", tmp_path / "out").out

    def steps(m: Generator) -> list[Step]:
        return list(
            m.steps(
                PROMPTS,
                max_new_tokens=NEW,
                eos=ends,
                stop=lambda row, new: row == 2 and len(new) == 9,
            )
        )

    with Ranks(out, Generator) as ranks:
        for found in ranks.on_each(steps):
            tokens = [[s.tokens[row] for s in found if row in s.tokens] for row in range(3)]
            for row in range(3):
                limit = next((i + 1 for i, t in enumerate(want[row]) if t in ends), NEW)
                assert tokens[row] == want[row][: min(limit, 9) if row == 2 else limit]
            assert sorted(row for s in found for row in s.done) == [0, 1, 2]


def test_a_second_batch_begins_with_an_empty_cache(tmp_path: Path) -> None:
    model = decoder("in_place", tmp_path)
    out = shard_model(model, "replicate", tmp_path / "out", devices=1).out
    with Generator(out) as generator:
        for prompts in (PROMPTS, [PROMPTS[1]], PROMPTS[:2]):
            assert generator.generate(prompts, max_new_tokens=9) == greedy(model, prompts, 9)


@pytest.mark.parametrize(
    ("prompts", "more", "message"),
    [
        ([], {}, "prompts: expected at least one, got none"),
        ([[1], []], {}, "prompt 1: expected at least one token, got none"),
        ([[1, 96]], {}, "input 'input_ids': expected elements from -96 to 95 for node"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        (
            [[1]],
            {"max_new_tokens": 257},
            "expected at most 256 in a sequence .the limit of node 'Gather_p'",
        ),
        (
            [[1]],
            {"sampling": Sampling(top_p=0.0)},
            "top_p: expected more than 0 and at most",
        ),
        ([[1]], {"logprobs": -1}, "logprobs: expected at least 0, got -1"),
        ([[1]], {"sampling": Sampling(temperature=-1.0)}, "temperature: expected 0, or a number"),
        ([[1]], {"sampling": Sampling(temperature=1e-320)}, "from 0.0001 to 10000, got 1e-320"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    prompts: list[list[int]], more: dict[str, object], message: str, tmp_path: Path
) -> None:
    out = shard_model(decoder("growing", tmp_path), "tp=2", tmp_path / "out").out
    with Ranks(out, Generator) as ranks:
        with pytest.raises(InputError, match=message) as caught:
            ranks.on_each(lambda m: list(m.steps(prompts, **more)))  # type: ignore[arg-type]
        assert caught.value.agreed


def test_a_length_beyond_a_constraint_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = decoder("growing", tmp_path)
    symbols = {"total_sequence_length": Symbol(max=20)}
    out = shard_model(model, "replicate", tmp_path / "out", devices=1, symbols=symbols).out
    with Generator(out) as generator, pytest.raises(InputError, match="at most 20 positions"):
        generator.generate([[1, 2]], max_new_tokens=20)


def test_a_program_without_states_is_refused(tmp_path: Path) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        g (int64[batch,seq] input_ids) => (float[batch,seq,4] logits)
        <float[3,4] w = {1,2,3,4,5,6,7,8,9,1,2,3}> { logits = Gather(w, input_ids) }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    out = shard_model(tmp_path / "model.onnx", "replicate", tmp_path / "out", devices=1).out
    with pytest.raises(OnnxparRuntimeError, match="has no states to carry from token to token"):
        Generator(out)

"""Requests that come and go get the tokens that each would get alone."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar.core.symbols import Symbol
from onnxpar_format.options import Sampling
from onnxpar_runtime.errors import InputError, OnnxparRuntimeError
from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.generation.groups import Event
from onnxpar_runtime.generation.requests import Requests
from onnxpar_runtime.group import Ranks
from tests.runtime.generation.decoders import decoder
from tests.runtime.generation.plain import greedy, last_logits
from tests.tiers import covering

RNG = np.random.default_rng(3)
WAYS = [
    Sampling(),
    Sampling(temperature=0.9, seed=5),
    Sampling(temperature=1.2, top_p=0.7, repetition_penalty=1.3, seed=7),
    Sampling(temperature=0.8, top_k=4, seed=9),
    Sampling(),
]
ASKED = [
    (RNG.integers(0, 96, RNG.integers(1, 40)).tolist(), int(RNG.integers(1, 20)), WAYS[n % 5])
    for n in range(20)
]
STRATEGIES = {
    "replicate": 1,
    "tp=2": None,
    "dp=2,tp=2": None,
    "dp=2": None,
    "pp=2": None,
    "pp=2,dp=2": None,
    "pp=3": None,
}


@dataclass
class Course:
    """What came of requests that were submitted at random steps, on one rank."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[int, str] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    most: int = 0
    waited: bool = False

    def take(self, requests: Requests, events: list[Event]) -> None:
        for event in events:
            assert event.request not in self.finished
            if event.token is not None:
                self.tokens[event.request].append(event.token)
            if event.finished is not None:
                self.finished[event.request] = event.finished
        self.most = max(self.most, requests.running)
        self.waited |= requests.waiting > 0


def course(m: Generator, cancelled: int | None = None, **options: Any) -> Course:
    """All of ASKED, a few at a time; one of them is cancelled in its third token."""
    rng, found, left = np.random.default_rng(11), Course(), list(range(len(ASKED)))
    requests = m.requests(length=64, **options)
    while left or requests.running or requests.waiting:
        for _ in range(int(rng.integers(0, 4))):
            if left and m.rank.index == 0:
                prompt, new, how = ASKED[left[0]]
                found.asked[requests.submit(prompt, max_new_tokens=new, sampling=how)] = left[0]
            left = left[1:]
        found.take(requests, requests.step())
        if m.rank.index == 0 and cancelled is not None:
            for number, place in found.asked.items():
                if place == cancelled and len(found.tokens[number]) == 3:
                    requests.cancel(number)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The tokens of each request in a run of its own, by the kind of cache."""
    found = {}
    for kind in ("growing", "in_place"):
        folder = tmp_path_factory.mktemp(kind)
        model = decoder(kind, folder)
        out = shard_model(model, "replicate", folder / "out", devices=1).out
        with Generator(out) as m:
            found[kind] = [
                m.generate([prompt], max_new_tokens=new, sampling=how)[0]
                for prompt, new, how in ASKED
            ]
        for (prompt, new, how), tokens in zip(ASKED, found[kind], strict=True):
            if how.temperature == 0:
                assert tokens == greedy(model, [prompt], new)[0]
    return found


@pytest.mark.parametrize(("kind", "strategy"), covering(["growing", "in_place"], STRATEGIES))
def test_tokens_are_those_of_each_request_alone(
    kind: str, strategy: str, alone: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """20 requests in few slots, prompts in chunks of 16 tokens; with one of them cancelled."""
    # As many as groups of requests can share.
    slots = 6 if strategy == "pp=3" else 4
    out = shard_model(
        decoder(kind, tmp_path), strategy, tmp_path / "out", devices=STRATEGIES[strategy]
    ).out
    long = next(n for n, (_, new, _) in enumerate(ASKED) if new > 8)
    with Ranks(out, Generator) as ranks:
        courses = ranks.on_each(lambda m: course(m, long, slots=slots, chunk=16))
    asked = courses[0].asked
    for found in courses:
        assert found.most == slots and found.waited
        assert sorted(found.finished) == sorted(asked)
        for number, place in asked.items():
            want = alone[kind][place]
            if place == long:
                assert found.finished[number] == "cancelled"
                assert found.tokens[number] == want[: len(found.tokens[number])]
            else:
                assert found.finished[number] == "length"
                assert found.tokens[number] == want


def test_requests_end_at_their_own_tokens_and_memory_does_not_grow(tmp_path: Path) -> None:
    out = shard_model(decoder("in_place", tmp_path), "tp=2", tmp_path / "out").out
    prompt = ASKED[0][0]

    def turns(m: Generator) -> list[list[Event]]:
        requests = m.requests(slots=2, length=64)
        (want,) = m.generate([prompt], max_new_tokens=12)
        held, found = requests.state_bytes, []
        for _ in range(3):
            if m.rank.index == 0:
                requests.submit(prompt, max_new_tokens=12, eos={want[5]})
            found.append(list(requests.events()))
            assert [e.token for e in found[-1]] == want[: want.index(want[5]) + 1]
        assert requests.state_bytes == held
        return found

    with Ranks(out, Generator) as ranks:
        for found in ranks.on_each(turns):
            assert [events[-1].finished for events in found] == ["stop"] * 3


def test_log_probabilities_are_those_of_each_request_alone(tmp_path: Path) -> None:
    """Beside requests that ask for none, or for another number of tokens."""
    model = decoder("growing", tmp_path)
    out = shard_model(model, "dp=2,tp=2", tmp_path / "out").out
    wanted = [3, None, 0, 5]

    def turns(m: Generator) -> list[Event]:
        requests = m.requests(slots=4, length=64)
        if m.rank.index == 0:
            for (prompt, _, how), count in zip(ASKED, wanted, strict=False):
                requests.submit(prompt, max_new_tokens=4, sampling=how, logprobs=count)
        return list(requests.events())

    with Ranks(out, Generator) as ranks:
        first, *others = ranks.on_each(turns)
    assert all(events == first for events in others)
    for number, count in enumerate(wanted):
        tokens = list(ASKED[number][0])
        for event in (e for e in first if e.request == number):
            assert event.token is not None and (event.likelihood is None) == (count is None)
            if event.likelihood is not None:
                logits = last_logits(model, tokens).astype(np.float64)
                want = logits - np.logaddexp.reduce(logits)
                # Twice the error of a logit, 1e-5 of the largest (verify's tolerance).
                bound = 2e-5 * np.abs(logits).max()
                assert abs(event.likelihood.logprob - want[event.token]) <= bound
                found = [x for _, x in event.likelihood.best]
                assert len(found) == count
                np.testing.assert_allclose(found, np.sort(want)[::-1][:count], rtol=0, atol=bound)
            tokens.append(event.token)


@pytest.mark.parametrize(
    ("kind", "strategy"), covering(["growing", "in_place"], ["replicate", "tp=2", "dp=2", "pp=2"])
)
def test_prompts_that_begin_alike_are_computed_once(
    kind: str, strategy: str, tmp_path: Path
) -> None:
    """Blocks of 64 tokens; also of prompts that are a block, and once some are forgotten."""
    model = decoder(kind, tmp_path)
    devices = 1 if strategy == "replicate" else None
    out = shard_model(model, strategy, tmp_path / "out", devices=devices).out
    rng = np.random.default_rng(4)
    first, other = (rng.integers(0, 96, 140).tolist() for _ in range(2))
    prompts = [first, first, [*first[:64], *other[:30]], first[:64], first[:65], other, first[:130]]
    want = greedy(model, prompts, 5)
    # The first block of a prompt that is no longer than it must be computed.
    reused = [0, 128, 64, 0, 64, 0, 128]

    largest = max(float(np.abs(last_logits(model, prompt)).max()) for prompt in prompts)

    def turns(m: Generator, kept: int, batch: int) -> tuple[list[list[int]], Any, list[int], int]:
        requests = m.requests(slots=4, length=160, chunk=48, prefixes=kept)
        found: list[list[int]] = [[] for _ in prompts]
        likely: list[list[float]] = [[] for _ in prompts]
        counts, held = [], 0
        for begin in range(0, len(prompts), batch):
            before = requests.reused
            if m.rank.index == 0:
                for prompt in prompts[begin : begin + batch]:
                    requests.submit(prompt, max_new_tokens=5, logprobs=0)
            for event in requests.events():
                assert event.token is not None and event.likelihood is not None
                found[event.request].append(event.token)
                likely[event.request].append(event.likelihood.logprob)
            counts.append(requests.reused - before)
            held = max(held, requests.state_bytes)
        return found, np.array(likely), counts, held

    with Ranks(out, Generator) as ranks:
        bytes_of = {}
        plain = ranks.on_each(lambda m: turns(m, 0, 1))[0][1]
        for kept, batch, expected in (
            (300, 1, reused),
            (300, 7, [sum(reused)]),
            # Two blocks: the other prompt puts away the first one's.
            (128, 1, [0, 128, 64, 0, 64, 0, 0]),
            (63, 1, [0] * 7),
        ):

            def run(m: Generator, kept: int = kept, batch: int = batch) -> Any:
                return turns(m, kept, batch)

            made = ranks.on_each(run)
            for found, likely, counts, _ in made:
                assert found == want
                if batch > 1 and strategy == "pp=2":
                    # A prompt is kept when it has left the last stage; others have begun by then.
                    assert 0 < counts[0] < expected[0]
                else:
                    assert counts == expected
                # Twice the error of a logit, 1e-5 of the largest (verify's tolerance).
                np.testing.assert_allclose(likely, plain, rtol=0, atol=2e-5 * largest)
            bytes_of[kept, batch] = made[0][3]
    assert bytes_of[300, 1] > bytes_of[128, 1] > bytes_of[63, 1]


def test_slots_that_leave_stages_idle_are_reported(tmp_path: Path) -> None:
    out = shard_model(decoder("growing", tmp_path), "pp=2", tmp_path / "out").out

    def notices(m: Generator) -> list[list[str]]:
        return [m.requests(slots=slots, length=8).notices for slots in (3, 4)]

    with Ranks(out, Generator) as ranks:
        (odd,), even = ranks.on_each(notices)[0]
    assert odd.endswith("one stage computes at a time: slots: expected a multiple of 2, got 3")
    assert not even


def test_any_rank_may_end_all_requests(tmp_path: Path) -> None:
    out = shard_model(decoder("growing", tmp_path), "tp=2", tmp_path / "out").out

    def ended(m: Generator) -> list[list[Event]]:
        requests = m.requests(slots=1, length=64, chunk=8)
        if m.rank.index == 0:
            for prompt in (ASKED[0][0], list(range(30)), [1]):
                requests.submit(prompt, max_new_tokens=20)
        found = [requests.step() for _ in range(4)]
        assert requests.running == 1 and requests.waiting == 2 and not requests.ended
        if m.rank.index == 1:
            requests.end()
        found.append(requests.step())
        assert requests.running == requests.waiting == 0 and requests.ended
        return found

    with Ranks(out, Generator) as ranks:
        first, second = ranks.on_each(ended)
    assert first == second
    assert [e.finished for e in first[-1]] == ["cancelled"] * 3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": []}, "prompt: expected at least one token, got none"),
        ({"prompt": [-1]}, "prompt: expected tokens from 0 on, got -1"),
        ({"prompt": [3, 96]}, r"expected elements from -96 to 95 for node 'Gather_e' .*got 96 at"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        (
            {"max_new_tokens": 15},
            "expected at most 16 tokens in the cache, got 3 and 15, which need 17",
        ),
        ({"logprobs": -1}, "logprobs: expected at least 0, got -1"),
        ({"sampling": Sampling(top_k=0)}, "top_k: expected at least 1, got 0"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(
    asked: dict[str, Any], message: str, small: Requests
) -> None:
    with pytest.raises(InputError, match=message):
        small.submit(**{"prompt": [1, 2, 3], "max_new_tokens": 14, **asked})
    number = small.submit([1, 2, 3], max_new_tokens=14)
    assert [e.request for e in small.events()] == [number] * 14


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One slot of 16 tokens."""
    folder = tmp_path_factory.mktemp("small")
    out = shard_model(decoder("growing", folder), "replicate", folder / "out", devices=1).out
    with Generator(out) as m:
        yield m.requests(slots=1, length=16)


def test_tokens_may_be_those_of_numpy(small: Requests) -> None:
    asked = [[5, 6], np.array([5, 6])]
    for prompt in asked:
        small.submit(prompt, max_new_tokens=3, eos=np.array([200]))  # type: ignore[arg-type]
    tokens = [event.token for event in small.events()]
    assert tokens[:3] == tokens[3:] and len(tokens) == 6


def test_only_rank_0_is_asked(tmp_path: Path) -> None:
    out = shard_model(decoder("growing", tmp_path), "tp=2", tmp_path / "out").out
    with Ranks(out, Generator) as ranks:
        second = ranks.on_each(lambda m: m.requests(length=16))[1]
        for ask in (lambda: second.submit([1]), lambda: second.cancel(0)):
            with pytest.raises(ValueError, match="expected them from rank 0, got one from 1"):
                ask()


def test_a_request_takes_as_many_tokens_as_the_model_admits(tmp_path: Path) -> None:
    """A table of 256 positions, and one of rotary angles."""
    for kind in ("growing", "in_place"):
        model = decoder(kind, tmp_path)
        out = shard_model(model, "replicate", tmp_path / f"{kind}.out", devices=1).out
        with Generator(out) as m:
            assert m.requests().length == 256


def test_a_request_without_numbers_ends_alone(tmp_path: Path) -> None:
    """One token is no number, and what sees it is none."""
    path = decoder("growing", tmp_path)
    want = greedy(path, [[1, 2], [4]], 3)
    broken = next(t for t in range(5, 96) if t not in want[0] + want[1])
    model = onnx.load(path)
    (table,) = (x for x in model.graph.initializer if x.name == "table")
    values = onnx.numpy_helper.to_array(table).copy()
    values[broken] = np.nan
    table.CopyFrom(onnx.numpy_helper.from_array(values, "table"))
    onnx.save(model, path)
    out = shard_model(path, "tp=2", tmp_path / "out").out

    def turns(m: Generator) -> list[Event]:
        requests = m.requests(slots=2, length=64)
        if m.rank.index == 0:
            for prompt in ([1, 2], [broken, 3], [4]):
                requests.submit(prompt, max_new_tokens=3)
        found = list(requests.events())
        with pytest.raises(InputError, match="logits: expected numbers, got NaN"):
            m.generate([[broken]], max_new_tokens=3)
        return found

    with Ranks(out, Generator) as ranks:
        first, second = ranks.on_each(turns)
    assert first == second
    assert [e.finished for e in first if e.request == 1] == ["error"]
    assert [[e.token for e in first if e.request == n] for n in (0, 2)] == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 3}, "slots: expected a multiple of 2, the number of shards of the batch, got 3"),
        ({"slots": 0}, "slots: expected at least 1 slot with at least 2 tokens, got 0 with 64"),
        ({"length": 257}, "expected at most 256 in a sequence .the limit of node 'Gather_p'"),
        ({"prefixes": -1}, "prefixes: expected at least 0 tokens, got -1"),
        ({"chunk": 0}, "chunk: expected at least 1 token, got 0"),
        ({"slots": 4}, "symbol 'batch' is 4, which violates its constraint"),
    ],
)
def test_slots_that_do_not_fit_the_model_are_refused(
    options: dict[str, int], message: str, tmp_path: Path
) -> None:
    model, symbols = decoder("growing", tmp_path), {"batch": Symbol(max=3)}
    out = shard_model(model, "dp=2", tmp_path / "out", symbols=symbols).out
    with Ranks(out, Generator) as ranks, pytest.raises(OnnxparRuntimeError, match=message):
        ranks.on_each(lambda m: m.requests(**{"slots": 2, "length": 64, **options}))


def test_a_model_without_a_mask_is_refused(tmp_path: Path) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        g (int64[batch,seq] input_ids, float[batch,past,4] past_0)
            => (float[batch,seq,4] logits, float[batch,total,4] present_0)
        <float[3,4] w = {1,2,3,4,5,6,7,8,9,1,2,3}> {
            logits = Gather(w, input_ids)
            present_0 = Concat<axis=1>(past_0, logits)
        }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    out = shard_model(tmp_path / "model.onnx", "replicate", tmp_path / "out", devices=1).out
    with Generator(out) as m, pytest.raises(InputError, match="need an attention mask"):
        m.requests()

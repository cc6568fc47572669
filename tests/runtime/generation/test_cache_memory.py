"""Requests wait until their cache fits into the memory that the caches may take."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.errors import OnnxparRuntimeError
from onnxpar_runtime.generation import states
from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.generation.groups import Event
from onnxpar_runtime.group import Ranks
from tests.decoders import HEAD, KV_HEADS, LAYERS
from tests.runtime.generation.decoders import decoder

TOKEN = LAYERS * 2 * KV_HEADS * HEAD * 4
"""Bytes of the growing cache for a token, on one device."""
LONG, SHORT = list(range(1, 91)), [3, 5]


class Live:
    """The bytes of buffers of states, and their peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def follow(self, memory: Any) -> Any:
        self.now += memory.bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(memory.owner, self._freed, memory.bytes)
        return memory

    def _freed(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("strategy", ["replicate", "tp=2", "dp=2", "pp=2"])
def test_long_requests_run_one_by_one_and_short_ones_together(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, allocate = Live(), states.allocate
    devices = 1 if strategy == "replicate" else None
    out = shard_model(decoder("growing", tmp_path), strategy, tmp_path / "out", devices=devices).out
    # A device has half of the heads, or half of the layers; or another shard of the batch, whose
    # rows it has alone.
    token = TOKEN if strategy in ("replicate", "dp=2") else TOKEN // 2
    # In a pipeline, two groups take turns, and each has half of the memory.
    groups = 2 if strategy == "pp=2" else 1
    # 128 columns of one row that joins, or 64 of several.
    memory = 5 * 128 * token * groups
    asked = [(LONG, 20), (LONG, 12), *[(SHORT, 9 + n) for n in range(8)], (LONG, 7)]

    def turns(m: Generator) -> tuple[dict[int, list[int]], dict[str, int]]:
        requests = m.requests(length=128, cache_memory=memory)
        if m.rank.index == 0:
            for prompt, new in asked:
                requests.submit(prompt, max_new_tokens=new)
        found: dict[int, list[int]] = {}
        most = {"long": 0, "short": 0}
        while True:
            events: list[Event] = requests.step()
            for event in events:
                assert event.token is not None
                found.setdefault(event.request, []).append(event.token)
            running = {event.request for event in events}
            kind = "long" if running & {0, 1, 10} else "short"
            most[kind] = max(most[kind], len(running))
            assert requests.state_bytes <= memory
            if not requests.running and not requests.waiting:
                return found, most

    with Ranks(out, Generator) as ranks:
        want = ranks.on_each(
            lambda m: [m.generate([p], max_new_tokens=new)[0] for p, new in asked]
        )[0]
        ranks.on_each(lambda m: setattr(m, "_batch", None))
        monkeypatch.setattr(states, "allocate", lambda *given: live.follow(allocate(*given)))
        made = ranks.on_each(turns)
        number = ranks.manifest.devices
    for found, most in made:
        assert [found[n] for n in range(len(asked))] == want
        # A shard of the batch has a row for each request.
        assert most["short"] >= 2 and most["long"] <= (2 if strategy == "dp=2" else 1)
    assert 0 < live.peak <= memory * number


def test_slots_of_one_length_are_as_many_as_fit(tmp_path: Path) -> None:
    """Each has room for the longest request; a sharded batch needs one more."""
    for strategy, more in (("tp=2", 0), ("dp=2", 1)):
        model = decoder("in_place", tmp_path)
        out = shard_model(model, strategy, tmp_path / strategy).out

        def found(m: Generator, more: int = more) -> tuple[int, int, int]:
            row = m.requests(slots=m.rank.world.size, length=32).state_bytes // (1 + more)
            if not more:
                row //= m.rank.world.size
            requests = m.requests(length=32, cache_memory=(5 + more) * row + 1)
            return requests.slots, requests.state_bytes, row

        with Ranks(out, Generator) as ranks:
            for slots, held, row in ranks.on_each(found):
                assert slots == (10 if more else 5) and held == (5 + more) * row


@pytest.mark.parametrize("kind", ["growing", "in_place"])
def test_memory_for_less_than_one_request_is_refused(kind: str, tmp_path: Path) -> None:
    out = shard_model(decoder(kind, tmp_path), "tp=2", tmp_path / "out").out
    with Ranks(out, Generator) as ranks:
        message = r"cache memory: expected at least \d+ bytes on a device for a request of 64"
        with pytest.raises(OnnxparRuntimeError, match=message):
            ranks.on_each(lambda m: m.requests(length=64, cache_memory=1000))


def test_a_request_that_can_never_fit_is_refused(tmp_path: Path) -> None:
    out = shard_model(decoder("growing", tmp_path), "tp=2", tmp_path / "out").out

    def refused(m: Generator) -> None:
        requests = m.requests(length=64, cache_memory=5 * 64 * TOKEN // 2)
        if m.rank.index == 0:
            with pytest.raises(OnnxparRuntimeError, match="expected at most 64 tokens in the"):
                requests.submit(np.arange(1, 60).tolist(), max_new_tokens=10)

    with Ranks(out, Generator) as ranks:
        ranks.on_each(refused)

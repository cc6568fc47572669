"""`tools/soak.py`: what grows is reported, in numbers made up for it and in a run with a leak."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools import soak

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
STEPS = 20_000
HAD = soak.Sample(memory=50 << 20, shared=1 << 20, descriptors=20, threads=5, mappings=500)


def series(**growth: float) -> soak.Samples:
    """Samples of two ranks, each hundred steps; these fields of rank 1 grow by so much a step."""

    def at(step: int) -> soak.Sample:
        changed = {key: getattr(HAD, key) + int(more * step) for key, more in growth.items()}
        # A batch may need a MiB more; a rank that writes a checkpoint has more files and threads.
        busy = step % 300 == 0
        noise = {
            "memory": changed.get("memory", HAD.memory) + (step // 100 * 7919 % 1000 << 10),
            "descriptors": changed.get("descriptors", HAD.descriptors) + busy,
            "threads": changed.get("threads", HAD.threads) + busy,
        }
        return replace(HAD, **changed | noise)

    steps = range(0, STEPS + 1, 100)
    return {0: [(s, HAD) for s in steps], 1: [(s, at(s)) for s in steps]}


def test_what_does_not_grow_is_not_reported() -> None:
    assert soak.grown(series(), STEPS) == []


def test_what_grows_before_a_twentieth_of_the_steps_is_not_reported() -> None:
    found = series()
    found[1] = [(s, replace(HAD, mappings=min(s, 999))) for s, _ in found[1]]
    assert soak.grown(found, STEPS) == []


@pytest.mark.parametrize(
    ("field", "more"),
    # Of memory, 80 bytes a step; of all else, one in a hundred steps.
    [("memory", 80), ("shared", 1), *((f, 0.01) for f in ("descriptors", "threads", "mappings"))],
)
def test_what_grows_is_reported(field: str, more: float) -> None:
    (text,) = soak.grown(series(**{field: more}), STEPS)
    assert text.startswith(f"rank 1: {field} grew by ")


def test_a_run_that_was_too_short_is_reported() -> None:
    found = {0: [(s, HAD) for s in range(50)]}
    assert soak.grown(found, STEPS) == ["rank 0: no samples to compare; try more steps"]


LEAKS = (
    soak.DATA
    + """
import os, threading
kept = []
mine = os.environ.get("OMPI_COMM_WORLD_RANK") == "1"
def leaking(epoch, seed, train):
    for batch in batches(epoch, seed, train):
        if mine and train:
            kept.append((open("/dev/null"), bytearray(os.urandom(1 << 16))))
            if len(kept) % 20 == 0:
                threading.Thread(target=threading.Event().wait, daemon=True).start()
        yield batch
"""
)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_leak_of_one_rank_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A short run: it takes samples more often, and compares its second quarter with its last.
    steps = 400
    monkeypatch.setattr(soak, "EVERY_S", 0.1)
    monkeypatch.setattr(soak, "WARM", 0.25)
    (tmp_path / "leaks.py").write_text(LEAKS)
    samples, evaluations = soak.soak(tmp_path, steps, "leaks:leaking")
    assert evaluations == steps // soak.EPOCH
    found = soak.grown(samples, steps)
    fields = {text.partition(" grew")[0] for text in found}
    # Numbers of mappings still change in the first steps, on all ranks.
    leaked = {f"rank 1: {field}" for field in ("memory", "descriptors", "threads")}
    assert {field for field in fields if not field.endswith("mappings")} == leaked, found
    assert sorted(samples) == list(range(soak.RANKS))

"""`diagnose`, on logs of calls made by hand."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from onnxpar.report import diagnosis
from onnxpar_format.calls import COLLECTIVE, LastCall, RankCalls

STEP = ["reduce 1", "reduce 2", "reduce 1", "reduce 2", "gather 1", "gather 2"]
ENDED = "ended by SIGTERM"
WAITED = "waited 6 s for rank 2 (ONNXPAR_TIMEOUT)"


def call(name: str, ranks: tuple[int, ...], place: int, begin: float, end: float) -> LastCall:
    return LastCall(COLLECTIVE, end > 0, name, ranks, 0, 0, place, 1, 64, 1, begin, end)


def log(rank: int, names: Sequence[str]) -> RankCalls:
    """Calls of all four ranks, one after the other."""
    everyone = (0, 1, 2, 3)
    calls = [call(name, everyone, i, float(i), i + 0.5) for i, name in enumerate(names)]
    return RankCalls(rank, 4, "host", ENDED, 100.0 + rank, calls)


def diagnosed(logs: Sequence[RankCalls], monkeypatch: pytest.MonkeyPatch) -> diagnosis.Diagnosis:
    monkeypatch.setattr(diagnosis, "read_calls", lambda folder: list(logs))
    return diagnosis.diagnose(Path("folder"))


@pytest.mark.parametrize("instead", ["reduce 1", "gather 2"])
def test_one_of_four_is_wrong_whatever_came_before(
    instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls may follow "reduce 2": what followed it first is not what is expected."""
    before = STEP * 2 + STEP[:4]
    logs = [log(rank, [*before, "gather 1"]) for rank in range(3)] + [log(3, [*before, instead])]
    assert diagnosed(logs, monkeypatch).ranks == [3]


def test_a_rank_that_stops_within_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 is in the call with it, and has given up; ranks 0 and 1 wait for both."""
    logs = [
        RankCalls(r, 4, "host", ENDED, 20.0, [call("sum", (r, r + 2), 5, 11.0, 0.0)])
        for r in (0, 1)
    ]
    within = [call("product", (2, 3), 7, 10.0, 0.0)]
    logs.append(RankCalls(3, 4, "host", WAITED, 20.0, within))
    found = diagnosed(logs, monkeypatch)
    assert found.ranks == [2]
    logs.insert(2, RankCalls(2, 4, "host", ENDED, 21.0, within))
    found = diagnosed(logs, monkeypatch)
    assert found.ranks == [2]
    (said,) = [line for line in found.findings if "is behind" in line]
    assert "the group 0, 2, in which rank 0 has waited" in said

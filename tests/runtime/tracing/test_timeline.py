"""What a rank's timeline counts without a recording."""

import time

import numpy as np
import pytest

from onnxpar_format.trace import OPTIMIZER, PROGRAM
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.tracing.timeline import Timeline
from tests.runtime.pipeline.test_player import on_all


def test_counts_what_is_not_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, communicated = iter([100, 170, 200, 230]), iter([5, 25, 25, 25])
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    timeline = Timeline(lambda: next(communicated))
    for _ in range(2):
        with timeline.span(OPTIMIZER, "update"):
            pass
    with timeline.span(PROGRAM, "program"):  # only counted in a recording
        pass
    assert timeline.counted[OPTIMIZER] == (170 - 100 - 20) + (230 - 200)
    assert timeline.spans == []


def test_waiting_for_a_rank_is_communication() -> None:
    late = 0.05

    def body(rank: Rank) -> int:
        begun = rank.timeline.communicated()
        rank.all_reduce(np.ones(1), [0, 1])  # both are there
        if rank.index == 1:
            time.sleep(late)
        rank.all_reduce(np.ones(1), [0, 1])
        return rank.timeline.communicated() - begun

    # Rank 0 may come to its call a little later than rank 1 begins to sleep.
    assert on_all(2, body)[0] > late / 2 * 1e9

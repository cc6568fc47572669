"""The offsets of clocks, with clocks that are wrong on purpose."""

import time

import pytest

from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.tracing.clocks import Offset, clock_offsets
from tests.runtime.pipeline.test_player import on_all

AHEAD = (0, 5_000_000_000, -70_000_000_000)
"""Nanoseconds by which the clock of each rank is ahead."""


@pytest.mark.parametrize("machines", [(1, 2, 3), (1, 1, 3)], ids=str)
def test_offsets_are_within_their_uncertainty(machines: tuple[int, ...]) -> None:
    def body(rank: Rank) -> list[Offset]:
        return clock_offsets(
            rank, lambda: time.monotonic_ns() + AHEAD[rank.index], machines[rank.index]
        )

    found, *others = on_all(3, body)
    assert others == [[], []]
    for rank, offset in enumerate(found):
        if machines[rank] == machines[0]:
            # Ranks of one machine have one clock: nothing is measured.
            assert (offset.ahead, offset.uncertainty) == (0, 0)
            continue
        assert 0 < offset.uncertainty < 1_000_000_000
        assert abs(offset.ahead - AHEAD[rank]) <= offset.uncertainty

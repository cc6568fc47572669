"""Moves stage boundaries so that stages with several virtual stages take more equal times.

The slowest virtual stage says little about the slowest stage: with 10 equal layers in 8 virtual
stages of 2 stages, one stage may have 4 layers and the other 6.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_STEPS = (1, 2, 3, 4)
"""By so many cuts a boundary moves at once."""
_LESS = 1 - 1e-9
"""A change must make the sum of squares smaller than rounding may."""


@dataclass(frozen=True)
class Rebalance:
    """Boundaries of virtual stages, which move only where nothing becomes worse.

    Attributes:
        stages: Number of stages: virtual stage v belongs to stage v % stages.
        spent: Seconds of the nodes before each position.
        move: Seconds to send the values that cross a boundary at each position, 0 at both ends.
        first: The first position where each boundary may be.
        last: The last position where each boundary may be.
        limit: The most seconds that a virtual stage may take.
    """

    stages: int
    spent: NDArray[np.float64]
    move: NDArray[np.float64]
    first: NDArray[np.intp]
    last: NDArray[np.intp]
    limit: float

    def run(self, boundaries: Sequence[int]) -> list[int]:
        """Returns boundaries with a smaller sum of squares of the times of stages.

        Nodes go from a virtual stage of the slowest stage to one of another stage, and all
        boundaries between the two move by as many cuts. Together the boundaries send no more than
        before, and no virtual stage takes longer than the limit.

        Args:
            boundaries: The positions of the boundaries, both ends included.
        """
        best = np.array(boundaries, np.intp)
        sent = float(self.move[best].sum()) / _LESS
        cuts = np.flatnonzero(self.move <= self.move[best].max())
        squares = float((self._times(best) ** 2).sum())
        # The sum decreases, so that this ends.
        while True:
            found = [(self._squares(tried, sent), tried) for tried in self._moved(best, cuts)]
            least = min((square for square, _ in found), default=squares)
            if least >= squares * _LESS:
                return [int(b) for b in best]
            best = next(tried for square, tried in found if square == least)
            squares = least

    def _virtual(self, boundaries: NDArray[np.intp]) -> NDArray[np.float64]:
        """Seconds of each virtual stage."""
        moving = self.move[boundaries]
        return np.diff(self.spent[boundaries]) + moving[:-1] + moving[1:]

    def _times(self, boundaries: NDArray[np.intp]) -> NDArray[np.float64]:
        """Seconds of each stage."""
        times: NDArray[np.float64] = self._virtual(boundaries).reshape(-1, self.stages).sum(axis=0)
        return times

    def _squares(self, boundaries: NDArray[np.intp], sent: float) -> float:
        """The sum of squares of the times of stages; infinity if something becomes worse."""
        inside = (self.first <= boundaries).all() and (boundaries <= self.last).all()
        if not inside or (np.diff(boundaries) < 1).any() or self.move[boundaries].sum() > sent:
            return float("inf")
        if self._virtual(boundaries).max() > self.limit:
            return float("inf")
        return float((self._times(boundaries) ** 2).sum())

    def _moved(
        self, boundaries: NDArray[np.intp], cuts: NDArray[np.intp]
    ) -> Iterator[NDArray[np.intp]]:
        """Yields boundaries with which a virtual stage of the slowest stage has fewer nodes."""
        count = len(boundaries) - 1
        places = np.searchsorted(cuts, boundaries)
        slowest = int(self._times(boundaries).argmax())
        for giver in range(slowest, count, self.stages):
            for taker in range(count):
                if taker % self.stages == slowest:
                    continue
                low, high = min(giver, taker) + 1, max(giver, taker) + 1
                for step in _STEPS:
                    shifted = places[low:high] + (step if taker < giver else -step)
                    if shifted[0] < 0 or shifted[-1] >= len(cuts):
                        break
                    tried = boundaries.copy()
                    tried[low:high] = cuts[shifted]
                    yield tried

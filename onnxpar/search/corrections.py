"""What the prices of some plans say about the estimates of others."""

from dataclasses import dataclass, field
from itertools import product
from math import inf

from onnxpar.search.estimates import SLACK, Estimate

APART = 1.1
"""The ratios of seconds to their estimates differ by as much between strategies."""
_AMOUNTS = 3
"""Of recomputation: nothing, a part of each layer, complete layers."""


@dataclass
class Corrections:
    """The plans that were priced, and how their prices differ from their estimates.

    Plans of one *kind* have one strategy, and are split equally into stages and micro-batches.

    Attributes:
        limit: Bytes that a device may hold.
        fitting: For each number of stages the seconds of its fastest plan that fits.
        least: The bytes of the smallest plan that fits.
    """

    limit: int
    fitting: dict[int, float] = field(default_factory=dict)
    least: float = inf
    # The last ratio of bytes to their estimate: of a kind, a split, a number of stages, or all (0);
    # by what is recomputed.
    _bytes: dict[tuple[object, int], float] = field(default_factory=dict)
    # The ratios that follow for estimates of a kind.
    _ratios: dict[tuple[object, int], float] = field(default_factory=dict)
    # The least ratio of seconds to their estimate, for a number of stages, or all (0), and a level
    # of optimizer parallel.
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    # The same for a number of stages, or of devices of the inner axis.
    _alike: dict[tuple[str, int], float] = field(default_factory=dict)
    # What was tried of each kind: the estimates of seconds and of bytes, and whether it fits.
    _tried: dict[object, list[tuple[float, float, bool]]] = field(default_factory=dict)

    def add(self, estimate: Estimate, seconds: float, peak: int) -> None:
        """Adds a plan.

        Args:
            estimate: Its estimate.
            seconds: Seconds of a step.
            peak: Bytes at the peak of a device.
        """
        stages = estimate.split.stages
        tried = self._tried.setdefault(estimate.kind, [])
        tried.append((estimate.seconds, estimate.bytes, peak <= self.limit))
        for key in _keys(estimate):
            self._bytes[key, estimate.again.amount] = peak / estimate.bytes
        self._ratios.clear()
        level, ratio = estimate.parallel.level, seconds / estimate.seconds
        for key in ((stages, level), (0, level)):
            self._seconds[key] = min(self._seconds.get(key, inf), ratio)
        for part in _common(estimate):
            self._alike[part] = min(self._alike.get(part, inf), ratio)
        if peak > self.limit:
            return
        self.fitting[stages] = min(self.fitting.get(stages, inf), seconds)
        self.least = min(self.least, peak)

    def untried(self, estimate: Estimate) -> bool:
        """Whether no plan of its kind was priced."""
        return estimate.kind not in self._tried

    def open(self, estimate: Estimate) -> bool:
        """Whether an estimate may be better than the plans of its kind.

        If it needs more memory than one that does not fit, it would not fit either, and if it takes
        longer than one that fits, it is not better.
        """
        return not any(
            estimate.seconds >= seconds if fits else estimate.bytes >= bytes_
            for seconds, bytes_, fits in self._tried.get(estimate.kind, ())
        )

    def promises(self, estimate: Estimate) -> bool:
        """Whether no plan of its kind was priced, and it may be faster than all plans that fit.

        Its bytes are only corrected downwards, unless a plan was priced that is split equally.
        """
        if not self.untried(estimate):
            return False
        bytes_ = estimate.bytes * min(1.0, *self._bytes.values())
        if any((estimate.kind[1], amount) in self._bytes for amount in range(_AMOUNTS)):
            bytes_ = self.bytes(estimate) / SLACK
        return self.at_least(estimate) < APART * self.best() and bytes_ <= self.limit

    def at_least(self, estimate: Estimate) -> float:
        """Seconds of an estimate, corrected upwards only by plans with its level."""
        return estimate.seconds * self._ratio(estimate, min(1.0, *self._seconds.values()))

    def likely(self, estimate: Estimate) -> float:
        """Seconds of an estimate, corrected only by plans that have much in common with it.

        These have its number of stages or of devices of the inner axis.
        """
        return estimate.seconds * max(self._alike.get(key, 1.0) for key in _common(estimate))

    def best(self, stages: int = 0) -> float:
        """Seconds of the fastest plan that fits, with a number of stages or with any (0)."""
        return self.fitting[stages] if stages else min(self.fitting.values(), default=inf)

    def bytes(self, estimate: Estimate) -> float:
        """Corrected bytes of an estimate."""
        key = estimate.kind, estimate.again.amount
        if key not in self._ratios:
            self._ratios[key] = self._ratio_of_bytes(estimate)
        return estimate.bytes * self._ratios[key]

    def _ratio_of_bytes(self, estimate: Estimate) -> float:
        amounts = sorted(range(_AMOUNTS), key=lambda amount: abs(amount - estimate.again.amount))
        keys = product(_keys(estimate), amounts)
        return next((self._bytes[key] for key in keys if key in self._bytes), 1.0)

    def seconds(self, estimate: Estimate) -> float:
        """Corrected seconds of an estimate, by plans with its level and its number of stages.

        They are too low rather than too high; infinity if no plan was priced.
        """
        return estimate.seconds * self._ratio(estimate, min(self._seconds.values(), default=inf))

    def _ratio(self, estimate: Estimate, default: float) -> float:
        level = estimate.parallel.level
        keys = ((estimate.split.stages, level), (0, level))
        return next((self._seconds[key] for key in keys if key in self._seconds), default)


def _keys(estimate: Estimate) -> tuple[object, ...]:
    """Plans that are more and more different."""
    return estimate.kind, estimate.kind[1], estimate.split.stages, 0


def _common(estimate: Estimate) -> tuple[tuple[str, int], ...]:
    """What plans have in common whose estimates of seconds are too low by about as much."""
    return ("stages", estimate.split.stages), ("inner", estimate.strategy.inner)

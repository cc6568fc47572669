"""The learning rate of each step, computed in double precision.

With base rate x, W warm-up steps and T steps in all, step s (counted from 0, so s = t - 1 for the
t-th step of the run) has the rate x·f(s):

    s < W:     f = s / W                                  (the first warm-up step has rate 0)
    constant:  f = 1
    linear:    f = max(0, (T - s) / max(1, T - W))
    cosine:    f = max(0, (1 + cos(π·(s - W) / max(1, T - W))) / 2)

These are the multipliers that Hugging Face's transformers gives to PyTorch's LambdaLR
(`get_constant_schedule_with_warmup`, `get_linear_schedule_with_warmup`,
`get_cosine_schedule_with_warmup` with half a period).
"""

from dataclasses import dataclass
from math import cos, isfinite, pi

from onnxpar_runtime.errors import LaunchError

KINDS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class LearningRateSchedule:
    """A learning-rate schedule.

    Attributes:
        rate: The base learning rate.
        kind: One of `KINDS`.
        warmup: Warm-up steps.
        total: Number of steps of the run; None if it is unknown.

    Raises:
        LaunchError: A negative or infinite rate, an unknown kind, a warm-up longer than the run, or
            a kind that needs the number of steps without one.
    """

    rate: float
    kind: str = "constant"
    warmup: int = 0
    total: int | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if not isfinite(self.rate) or self.rate < 0:
            raise LaunchError(f"--lr: expected a number >= 0, got {self.rate}")
        if self.kind not in KINDS:
            raise LaunchError(f"--schedule: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.warmup < 0:
            raise LaunchError(f"--warmup: expected a number of steps >= 0, got {self.warmup}")
        if self.total is None and self.kind != "constant":
            raise LaunchError(f"--schedule {self.kind} needs the number of steps (--steps)")
        if self.total is not None and self.warmup >= self.total > 0:
            raise LaunchError(
                f"--warmup: expected fewer steps than the run has ({self.total}), got {self.warmup}"
            )

    def at(self, step: int) -> float:
        """Returns the learning rate of step t = `step`, counted from 1."""
        done = step - 1
        if done < self.warmup:
            return self.rate * (done / max(1, self.warmup))
        if self.kind == "constant" or self.total is None:
            return self.rate
        length = max(1, self.total - self.warmup)
        if self.kind == "linear":
            return self.rate * max(0.0, (self.total - done) / length)
        return self.rate * max(0.0, 0.5 * (1.0 + cos(pi * (done - self.warmup) / length)))

"""The findings of a comparison: differences, bytes sent, and problems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.entries import TensorEntry
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.traffic import compare_bytes

Array = NDArray[Any]

# Relative to the largest magnitude of the tensor. They are six to a hundred units of rounding of
# the type (for float64 several thousand), because sums are formed in another order.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Case:
    """The outcome at one choice of the symbols.

    Attributes:
        symbols: Values of the symbols.
        ok: Whether all differences are within their limits and the bytes are as expected.
        max_abs: Largest absolute difference of any output; in training also of any gradient or
            parameter.
        max_rel: Largest difference relative to its tensor's largest magnitude, of any output; in
            training also of any loss or gradient.
        worst: The tensor that has `max_rel`; empty if nothing differs.
        bytes_expected: Bytes that one rank sends by the manifest's formulas; None if a size depends
            on data.
        bytes_counted: The largest number of bytes that any rank counted.
        problems: Descriptions of all problems.
    """

    symbols: Mapping[str, int]
    ok: bool
    max_abs: float
    max_rel: float
    worst: str
    bytes_expected: int | None
    bytes_counted: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class StepCase:
    """The findings in one step of training.

    Attributes:
        step: Its number, from 1.
        micro_batches: Number of its micro-batches.
        loss: The loss of the rank that differs most.
        loss_expected: Loss of the undivided run.
        loss_rel: Their relative difference.
        gradient_rel: Largest difference of a gradient, relative to its tensor's largest magnitude
            and the rounding of the largest gradient (`limits.NOISE_ULPS`).
        gradient_worst: The parameter with this gradient.
        parameter_abs: Largest difference of a parameter.
        state_share: Largest difference of an element of a parameter, of a moment
            (`onnxpar_runtime.training.limits`) or of a running statistic, divided by its limit.
        state_worst: The state with this difference.
        jumps: Parameters whose gradients jump, so that they were compared less strictly.
    """

    step: int
    micro_batches: int
    loss: float
    loss_expected: float
    loss_rel: float
    gradient_rel: float
    gradient_worst: str
    parameter_abs: float
    state_share: float
    state_worst: str
    jumps: tuple[str, ...]


@dataclass(frozen=True)
class TrainingCase(Case):
    """The outcome of training at one choice of the symbols, with the evaluation and all steps.

    Attributes:
        steps: The steps.
    """

    steps: tuple[StepCase, ...]


class Findings:
    """The findings so far in one case.

    Args:
        options: What to compare and how strictly.
        compute: The 16-bit type that a training computes in, if any.

    Attributes:
        options: What to compare and how strictly.
        problems: Descriptions of the problems.
        max_abs: As `Case`.
    """

    def __init__(self, options: VerifyOptions, compute: str | None = None) -> None:
        """Has found nothing yet."""
        self.options, self._compute = options, compute
        self.problems: list[str] = []
        self.max_abs = 0.0
        self._worst, self._max_rel = "", 0.0
        self._sent: int | None = 0
        self._counted = 0

    def rtol(self, dtype: str) -> float:
        """Returns the relative tolerance of tensors of a type."""
        own = max(TOLERANCE.get(d, 0.0) for d in (dtype, self._compute or dtype))
        return own if self.options.rtol is None else self.options.rtol

    def note(self, name: str, difference: float, relative: float) -> None:
        """Keeps a difference if it is the largest so far."""
        self.max_abs = max(self.max_abs, difference)
        if relative > self._max_rel:
            self._max_rel, self._worst = relative, name

    def outputs(
        self,
        specs: Sequence[TensorEntry],
        expected: Mapping[str, Array],
        got: Mapping[str, Array],
        where: str = "",
    ) -> None:
        """Compares outputs.

        Args:
            specs: The outputs to compare.
            expected: The outputs of the undivided program.
            got: The outputs of the ranks.
            where: The beginning of the descriptions of problems.

        Raises:
            InputError: The undivided program lacks an output.
        """
        for spec in specs:
            name = spec.name
            if name not in expected:
                raise InputError(
                    f"the model has no output {name!r}; it has {', '.join(sorted(expected))}"
                )
            difference, scale, same = difference_of(expected[name], got[name])
            self.note(name, difference, difference / scale if scale else difference)
            limit = self.options.atol + self.rtol(spec.dtype) * scale
            if not same:
                self.problems.append(
                    f"{where}output {name!r}: shapes or non-finite elements differ: expected shape "
                    f"{expected[name].shape}, got {got[name].shape}"
                )
            elif difference > limit:
                self.problems.append(
                    f"{where}output {name!r}: expected a difference of at most {limit:.3g}, got "
                    f"{difference:.3g}"
                )

    def sent(
        self,
        runs: Mapping[str, Sequence[Mapping[str, int]]],
        group: Ranks[Any],
        where: str = "",
    ) -> None:
        """Compares the bytes that the ranks counted since the last reset with the formulas.

        Args:
            runs: For each program the values of the symbols in each of its runs since then.
            group: The ranks.
            where: The beginning of the descriptions of problems.
        """
        widened = self._compute is not None
        sent, counted, wrong = compare_bytes(runs, group, widened=widened)
        self.problems += [f"{where}{problem}" for problem in wrong]
        self._sent = None if sent is None or self._sent is None else self._sent + sent
        self._counted += counted

    def case(self, values: Mapping[str, int]) -> Case:
        """Returns the findings."""
        return Case(
            dict(values),
            not self.problems,
            self.max_abs,
            self._max_rel,
            self._worst,
            self._sent,
            self._counted,
            tuple(self.problems),
        )


def difference_of(expected: Array, got: Array) -> tuple[float, float, bool]:
    """Returns largest difference, largest finite magnitude, and whether all else is equal.

    All else is the shape, and the elements that are infinite or not a number.
    """
    if expected.shape != got.shape:
        return float("inf"), 0.0, False
    if expected.size == 0:
        return 0.0, 0.0, True
    a, b = expected.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(np.where(finite, 0, a), np.where(np.isfinite(b), 0, b), equal_nan=True):
        return float("inf"), 0.0, False
    a, b = np.where(finite, a, 0), np.where(finite, b, 0)
    difference = float(np.abs(a - b).max())
    if expected.dtype.kind in "iub" and difference == 0 and not np.array_equal(expected, got):
        difference = 1.0  # integers beyond 2^53 that are equal in float64
    return difference, float(np.abs(a).max()), True


def greatest(logits: Array) -> Array:
    """Returns the least class [...] with the greatest logit of [..., C]; -1 where one is NaN."""
    logits = logits.astype(np.float64)
    return np.where(np.isnan(logits).any(-1), -1, logits.argmax(-1))

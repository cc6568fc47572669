"""Random inputs, and the range of integers among them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import ProgramEntry, TensorEntry
from onnxpar_format.expressions import ExpressionError, evaluate
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.verify.references import Reference, reference_run

Array = NDArray[Any]
_MAX_INDEX = 1 << 20
_NOTHING_KNOWN: Mapping[str, "Span"] = {}


class Draws(Protocol):
    """Draws batches."""

    def batch(self, values: Mapping[str, int]) -> dict[str, Array]:
        """Returns global inputs, and labels of training, at these values of the symbols."""


class GivenFeeds:
    """The same arrays in every batch.

    Args:
        feeds: The arrays.
    """

    def __init__(self, feeds: Mapping[str, Array]) -> None:
        """Keeps the arrays."""
        self._feeds = dict(feeds)

    def batch(self, values: Mapping[str, int]) -> dict[str, Array]:
        """Returns the arrays."""
        del values
        return dict(self._feeds)


class RandomFeeds:
    """Random inputs, with integers that the undivided program accepts.

    Args:
        reference: The undivided program.
        program: The program with its inputs.
        cases: All values of the symbols at which batches are drawn.
        seed: Seed.

    Raises:
        InputError: As `index_spans`.
    """

    def __init__(
        self,
        reference: Reference,
        program: ProgramEntry,
        cases: Sequence[Mapping[str, int]],
        seed: int,
    ) -> None:
        """Finds the spans of the integers."""
        self._reference, self._program = reference, program
        self._rng = np.random.default_rng(seed)
        self._spans: dict[frozenset[tuple[str, int]], dict[str, Span]] = {}
        spans: dict[str, Span] = {}
        for case in cases:
            spans = index_spans(reference, program, case, spans)
            self._spans[frozenset(case.items())] = spans

    def spans(self, values: Mapping[str, int]) -> dict[str, "Span"]:
        """Returns the spans of the integer inputs at these values of the symbols."""
        return self._spans[frozenset(values.items())]

    def batch(self, values: Mapping[str, int]) -> dict[str, Array]:
        """Returns new inputs."""
        return drawn_feeds(self._reference, self._program, values, self.spans(values), self._rng)


def random_feeds(
    program: ProgramEntry,
    values: Mapping[str, int],
    bounds: Mapping[str, int],
    rng: np.random.Generator,
) -> dict[str, Array]:
    """Returns random inputs: normal floats, integers below their bound, and booleans."""
    feeds = {}
    for spec in program.inputs:
        shape = _shape(spec, values)
        dtype = DTYPES[spec.dtype].dtype
        if spec.dtype == "bool" or dtype.kind in "iu":
            feeds[spec.name] = rng.integers(0, bounds.get(spec.name, 2), shape).astype(dtype)
        else:
            feeds[spec.name] = rng.standard_normal(shape).astype(dtype)
    return feeds


def _shape(spec: TensorEntry, values: Mapping[str, int]) -> tuple[int, ...]:
    try:
        return tuple(evaluate(size, values) for size in spec.shape)
    except ExpressionError as error:
        raise InputError(
            f"input {spec.name!r}: cannot draw a random array of shape {list(spec.shape)}: "
            f"{error} (give inputs with --inputs)"
        ) from None


def _shapes(outputs: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in outputs.items()}


@dataclass(frozen=True)
class Span:
    """The values that an integer input may have.

    Attributes:
        low: The smallest value that the model accepts in all elements at once: 0, or 1 if it
            refuses an array of zeros, as for a mask.
        limit: The smallest larger value that the model refuses; None if there is none up to 2^20.
    """

    low: int
    limit: int | None

    @property
    def high(self) -> int:
        """One more than the largest value to draw; 2 without a limit, as for a mask."""
        return 2 if self.limit is None else self.limit


def drawn_feeds(
    reference: Reference,
    program: ProgramEntry,
    values: Mapping[str, int],
    spans: Mapping[str, Span],
    rng: np.random.Generator,
) -> dict[str, Array]:
    """Returns random inputs whose integers are in the spans, with zeros among them.

    If the model refuses arrays of zeros, it is run to find out whether it accepts the drawn zeros.
    """
    feeds = random_feeds(program, values, {name: span.high for name, span in spans.items()}, rng)
    raised = {n: np.maximum(feeds[n], span.low) for n, span in spans.items() if span.low}
    if raised:
        try:
            reference.run(feeds)
        except Exception:  # as in `index_spans`
            return feeds | raised
    return feeds


def index_spans(
    reference: Reference,
    program: ProgramEntry,
    values: Mapping[str, int],
    known: Mapping[str, Span] = _NOTHING_KNOWN,
) -> dict[str, Span]:
    """Returns the span of each integer input at these values of the symbols.

    The undivided model refuses an index that is out of range. So the model is run to find the
    smallest refused value, by doubling and bisection, while other integer inputs have zeros, or
    ones if the model refuses zeros.

    Args:
        reference: The undivided model.
        program: The program with its inputs.
        values: Values of the symbols, on which the range may depend.
        known: Spans at other values, which are tried first.

    Raises:
        InputError: The model fails with zeros and with ones, or an input decides a shape.
    """
    integers = [s for s in program.inputs if DTYPES[s.dtype].dtype.kind in "iu"]
    if not integers:
        return {}
    floats = random_feeds(program, values, {s.name: 1 for s in integers}, np.random.default_rng(0))
    base, usual = 0, {}
    try:
        usual = _shapes(reference.run(floats))
    except Exception:
        # An error with ones is reported, because masks are never all zeros in practice.
        base = 1
        floats |= {s.name: np.ones_like(floats[s.name]) for s in integers}
        usual = _shapes(reference_run(reference, floats, values))

    def admits(spec: TensorEntry, value: int) -> bool:
        feeds = dict(floats)
        feeds[spec.name] = np.full_like(feeds[spec.name], value)
        try:
            found = _shapes(reference.run(feeds))
        except Exception:
            # onnxruntime has no class of its own for an index out of range.
            return False
        if found != usual:
            raise InputError(
                f"input {spec.name!r} determines the shape of an output, so it is not drawn at "
                "random: give inputs with --inputs"
            )
        return True

    spans = {}
    for spec in integers:
        least = 1 if base and not admits(spec, 0) else 0
        limit = _limit(partial(admits, spec), spec, base, known.get(spec.name))
        spans[spec.name] = Span(least, limit)
    return spans


def _limit(
    admits: Callable[[int], bool], spec: TensorEntry, base: int, known: Span | None
) -> int | None:
    """Returns the smallest refused value above the accepted `base`; None if there is none."""
    top = min(_MAX_INDEX, int(np.iinfo(DTYPES[spec.dtype].dtype).max))
    if known is not None:
        if known.limit is None and admits(top // 2):
            return None
        limit = known.limit or 0
        if limit > base and admits(limit - 1) and not admits(limit):
            return limit
    low, high = base, base + 1
    while high < top and admits(high):
        low, high = high, high * 2
    if high >= top:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if admits(middle) else (low, middle)
    return high

"""Random inputs, and what integers among them may be."""

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
    """What gives a batch."""

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
    """Random inputs, whose integers are such that the undivided program takes them.

    Args:
        reference: The undivided program.
        program: Its inputs.
        cases: All values of the symbols that batches are drawn at.
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
        """Returns what the integer inputs may hold at these values of the symbols."""
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
    """Returns random inputs: normal floats, integers below their bound, either truth value."""
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
            f"{error} (give "
            "inputs with --inputs)"
        ) from None


def _shapes(outputs: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in outputs.items()}


@dataclass(frozen=True)
class Span:
    """What an integer input may hold.

    Attributes:
        low: The smallest value that the model takes everywhere at once: 0, or 1 where it refuses
            nothing but zeros, as of a mask.
        limit: The smallest value above that the model refuses; None where there is none up to 2^20.
    """

    low: int
    limit: int | None

    @property
    def high(self) -> int:
        """One more than the largest value to draw: what takes any is no index, but a mask."""
        return 2 if self.limit is None else self.limit


def drawn_feeds(
    reference: Reference,
    program: ProgramEntry,
    values: Mapping[str, int],
    spans: Mapping[str, Span],
    rng: np.random.Generator,
) -> dict[str, Array]:
    """Returns random inputs whose integers are in the spans, with zeros among them.

    Where all zeros are refused, the model is asked whether it takes the zeros drawn.
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
    """Returns for each integer input what it may hold at these values of the symbols.

    An input that is used as an index is refused by the undivided model where it is out of range. So
    the model is asked: the limit is the smallest refused value, found by doubling and bisection,
    while the others hold zeros, or ones where the model refuses zeros.

    Args:
        reference: The undivided model.
        program: Its inputs.
        values: Values of the symbols: what is in range may depend on them.
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
        # Of the two errors that of ones is the reason: no mask of a batch is nothing but zeros.
        base = 1
        floats |= {s.name: np.ones_like(floats[s.name]) for s in integers}
        usual = _shapes(reference_run(reference, floats, values))

    def admits(spec: TensorEntry, value: int) -> bool:
        feeds = dict(floats)
        feeds[spec.name] = np.full_like(feeds[spec.name], value)
        try:
            found = _shapes(reference.run(feeds))
        except Exception:
            # Whatever onnxruntime raises for an index out of range: it has no class of its own.
            return False
        if found != usual:
            raise InputError(
                f"input {spec.name!r} determines the shape of an output, so it is not drawn at "
                f"random: give inputs with --inputs"
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
    """Returns the smallest value above `base`, which is admitted, that is not, as far as asked."""
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

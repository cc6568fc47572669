"""The slot `folding`: how the results of an operator are computed from constants.

Only exact results are computed: an exponential or a sine is left to the kernels, whose last bits
differ from those of any other library.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]
Operands = Sequence[Array | None]
ComputeFn = Callable[[ir.Node, Operands], tuple[Array, ...] | None]

_INTEGERS = frozenset(
    ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64)
)
_DISCRETE = _INTEGERS | {ir.DataType.BOOL}
_EXACT = _DISCRETE | {ir.DataType.FLOAT, ir.DataType.DOUBLE}
MOVED_TYPES = _EXACT | {ir.DataType.FLOAT16}
"""Types whose elements are moved: numpy has them."""


def _any(operands: Operands) -> bool:
    """Every result is defined."""
    return True


def nonzero_divisor(operands: Operands) -> bool:
    """A quotient of integers is defined if no divisor is 0."""
    divisor = operands[1]
    return divisor is None or divisor.dtype.kind not in "iu" or bool(divisor.all())


def requested_elements(operands: Operands) -> int:
    """The number of elements of the shape in the last operand."""
    target = operands[-1]
    return 0 if target is None else prod(max(int(n), 1) for n in target.ravel())


@dataclass(frozen=True)
class Folding:
    """How the results of an operator are computed from constants when a model is read.

    Attributes:
        exact: The operands with which the results are exact, in words.
        types: Element types of these operands.
        elements: Operands whose elements are read; others matter only by shape and type. None: all.
        defined: Returns whether there are results, given the operands. Default: there always are.
        size: Returns the number of elements of the largest result, given the operands. Default:
            results are not much larger than the operands.
        compute: Computes the results; None if they are not exact. Default: by ONNX's reference
            implementation.
    """

    exact: str
    types: frozenset[ir.DataType]
    elements: tuple[int, ...] | None = None
    defined: Callable[[Operands], bool] = _any
    size: Callable[[Operands], int] | None = None
    compute: ComputeFn | None = None


MOVE = Folding("moves elements of any type", MOVED_TYPES)
EXACT = Folding(
    "integers, booleans, float32 and float64, which IEEE 754 rounds in one way", frozenset(_EXACT)
)
INTEGERS = Folding("only integers and booleans", frozenset(_DISCRETE))

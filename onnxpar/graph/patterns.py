"""What is known of the elements of a value besides constants: `Pattern`."""

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Pattern:
    """Elements that follow a pattern.

    Attributes:
        zero: Whether all elements are zero.
        counted: The dim along which the elements count 0, 1, …, and are otherwise equal; None if
            there is none.
        parts: The values that stand side by side in the last dim; empty if it is not known that
            there are several.
    """

    zero: bool = False
    counted: int | None = None
    parts: tuple[ir.Value, ...] = ()


UNKNOWN = Pattern()

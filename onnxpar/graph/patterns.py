"""What is known of the elements of a value besides constants: `Pattern`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """Elements that follow a pattern.

    Attributes:
        zero: Whether all elements are zero.
        counted: The dim along which the elements count 0, 1, …, and are otherwise equal; None if
            there is none.
    """

    zero: bool = False
    counted: int | None = None


UNKNOWN = Pattern()

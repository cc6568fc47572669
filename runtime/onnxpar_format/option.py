"""The form of a command's option, and texts of options that are numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "B": 1}


@dataclass(frozen=True)
class Option:
    """A field or a parameter as an option of a command.

    Attributes:
        help: The help text.
        metavar: The placeholder for its value in help texts.
        flags: Its names on the command line; by default that of the field.
        minimum: The smallest number that it takes.
        maximum: The largest number that it takes.
        parse: Returns the value of a text; raises ValueError with what was expected.
        values: Words that shells offer as its value; what ends in `=` or `:` is a beginning.
    """

    help: str
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    parse: Callable[[str], Any] | None = None
    values: tuple[str, ...] = ()


def parse_bytes(text: object) -> int:
    """Returns the bytes of a size such as `80GiB`, or of a number.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    if isinstance(text, str):
        for unit, scale in _UNITS.items():
            number = text.strip().removesuffix(unit)
            if number != text.strip():
                try:
                    return int(float(number) * scale)
                except (ValueError, OverflowError):
                    break
    raise ValueError(f"expected a size such as 80GiB, got {text!r}")


def parse_betas(text: str) -> tuple[float, float]:
    """Returns the two numbers of a text such as `0.9,0.999`; raises ValueError for other texts."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"expected two numbers A,B, got {text!r}") from None
    return first, second

"""`Symbol`: a user's constraint on one symbolic dimension."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, lcm
from typing import Self

from onnxpar.core.errors import SymbolError
from onnxpar.core.symbols.congruences import Facts, make
from onnxpar_format.entries import SymbolSizes

TYPICAL_SIZE = 64
"""Models seldom run at sizes below this, so costs are not compared there."""


@dataclass(frozen=True)
class Symbol(SymbolSizes):
    """The sizes `divisor · N + remainder`, `N >= 1`, from `min` to `max`; `min=0` admits `N = 0`.

    The arguments and their checks are those of MindSpore's `Symbol`; in addition, `bool` in place
    of an `int`, a positive `max` below `min`, and constraints that no size satisfies are refused.
    `unique` ties the dims that have this same object.

    Raises:
        TypeError: An argument has another type.
        ValueError: `min` below 0, `divisor` below 1, `remainder` outside `[0, divisor)`, or no
            size left.
    """

    def __post_init__(self) -> None:
        """Checks the arguments."""
        for name in ("max", "min", "divisor", "remainder"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Symbol: {name}: expected an int, got {value!r}")
        for name in ("unique", "per_rank"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"Symbol: {name}: expected a bool, got {value!r}")
        if self.min < 0:
            raise ValueError(f"Symbol: min: expected at least 0, got {self.min}")
        if self.divisor <= 0:
            raise ValueError(f"Symbol: divisor: expected at least 1, got {self.divisor}")
        if not 0 <= self.remainder < self.divisor:
            raise ValueError(
                f"Symbol: remainder: expected at least 0 and less than the divisor {self.divisor}, "
                f"got {self.remainder}"
            )
        if 0 < self.max < self.min:
            raise ValueError(f"Symbol: max: expected at least min, {self.min}, got {self.max}")
        _ = self.facts

    @property
    def facts(self) -> Facts:
        """Divisor, remainder, least and greatest admissible size.

        Raises:
            ValueError: There is no admissible size.
        """
        greatest = self.max if self.max > self.min else None
        facts = make(self.divisor, self.remainder, self.least, greatest)
        if facts is None:
            raise ValueError(f"Symbol: no size satisfies {self}")
        return facts

    def __str__(self) -> str:
        """The constraints in the form that `parse` reads."""
        shown = [
            f"{name}={getattr(self, name)}"
            for name in ("divisor", "remainder", "min", "max")
            if getattr(self, name) != getattr(ANY, name)
        ]
        shown += [name for name in ("unique", "per_rank") if getattr(self, name)]
        return ",".join(shown)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `divisor=8,max=512,unique`; a flag may be followed by `=true` or `=false`.

        Raises:
            SymbolError: An unknown or repeated argument, or a value that is malformed or refused.
        """
        arguments: dict[str, int | bool] = {}
        for part in text.split(",") if text.strip() else []:
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key not in _READERS:
                expected = ", ".join(_READERS)
                raise SymbolError(
                    f"symbol constraint {text!r}: expected one of {expected}, got {key!r}"
                )
            if key in arguments:
                raise SymbolError(f"symbol constraint {text!r}: {key} is given twice")
            arguments[key] = _READERS[key](text, key, value if equals else None)
        try:
            return cls(**arguments)  # type: ignore[arg-type]  # the readers give each its type
        except ValueError as error:
            raise SymbolError(f"symbol constraint {text!r}: {error}") from None

    @classmethod
    def parse_named(cls, text: str) -> tuple[str, Self]:
        """Reads `batch:divisor=8,max=512`; the name may contain colons.

        Raises:
            SymbolError: No name, or constraints that `parse` refuses.
        """
        name, colon, constraints = text.rpartition(":")
        if not colon or not name.strip():
            raise SymbolError(
                f"symbol {text!r}: expected NAME:CONSTRAINTS, as in batch:divisor=8,max=512"
            )
        return name.strip(), cls.parse(constraints)

    def both(self, other: "Symbol") -> "Symbol":
        """Returns a constraint on the sizes that satisfy this one and another.

        With a remainder, sizes below the common divisor are left out.

        Raises:
            ValueError: No size satisfies both, or the bounds leave a single one.
        """
        divisor, shared = lcm(self.divisor, other.divisor), gcd(self.divisor, other.divisor)
        if (self.remainder - other.remainder) % shared:
            raise ValueError(f"Symbol: no size satisfies {self} and {other}")
        remainder = next(
            r
            for r in range(self.remainder, divisor + self.remainder, self.divisor)
            if r % other.divisor == other.remainder
        )
        tops = [symbol.max for symbol in (self, other) if symbol.max > symbol.min]
        least = max(self.min, other.min)
        if tops and min(tops) <= least:
            # A constraint with equal bounds would have no upper one.
            raise ValueError(f"Symbol: no size satisfies {self} and {other}, or only one")
        return Symbol(
            max=min(tops, default=0),
            min=least,
            divisor=divisor,
            remainder=remainder,
            unique=self.unique or other.unique,
            per_rank=self.per_rank or other.per_rank,
        )

    def check(self, name: str, value: int) -> None:
        """Checks that the dimension `name` may have the size `value`.

        Raises:
            SymbolError: It may not; the message states the symbol, the value and the constraint.
        """
        facts = self.facts
        if value < self.min:
            raise SymbolError(f"symbol {name!r} is {value}, but its minimum is {self.min}")
        if self.max > self.min and value > self.max:
            raise SymbolError(f"symbol {name!r} is {value}, but its maximum is {self.max}")
        if (value - self.remainder) % self.divisor:
            raise SymbolError(
                f"symbol {name!r} is {value}, which leaves a remainder of "
                f"{value % self.divisor} when divided by "
                f"{self.divisor}, but {self.remainder} is required"
            )
        if not facts.admits(value):
            raise SymbolError(
                f"symbol {name!r} is {value}, but the smallest value of the form {self.divisor}·N "
                f"+ {self.remainder} with N at least {int(self.min > 0)} is {facts.min}"
            )

    def typical(self) -> int:
        """Returns the least admissible size of at least 64, or the greatest if all are below 64."""
        facts = self.facts
        if facts.constant is not None:
            return facts.constant
        at_least = make(
            facts.divisor, facts.remainder, max(facts.min or 1, TYPICAL_SIZE), facts.max
        )
        size = at_least.min if at_least is not None else facts.max
        assert size is not None, "without a greatest size there is one of at least 64"
        return size


def _read_int(text: str, key: str, value: str | None) -> int:
    try:
        return int(value or "")
    except ValueError:
        raise SymbolError(
            f"symbol constraint {text!r}: {key}: expected an integer, got "
            f"{repr(value) if value else 'none'}"
        ) from None


def _read_flag(text: str, key: str, value: str | None) -> bool:
    if value is None or value.lower() == "true":
        return True
    if value.lower() == "false":
        return False
    raise SymbolError(f"symbol constraint {text!r}: {key}: expected true or false, got {value!r}")


_READERS: dict[str, Callable[[str, str, str | None], int | bool]] = {
    "max": _read_int,
    "min": _read_int,
    "divisor": _read_int,
    "remainder": _read_int,
    "unique": _read_flag,
    "per_rank": _read_flag,
}
ANY = Symbol()
"""The constraint of a symbol of which the user states none: any size from 1."""

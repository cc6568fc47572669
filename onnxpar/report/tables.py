"""Tables of what a page needs often: formulas, shapes, layouts, times, texts, each written once."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from onnxpar.core.symbols import Symbol, SymbolTable, safe_name
from onnxpar_format.expressions import ExpressionError, names_of, postfix

Json = dict[str, Any]
Size = int | list[int]
"""A size in a page: a number, or the place of a formula in a list of its own."""
Time = float | list[int]
"""Seconds in a page: a number, or the place of a list of `Tables.times` in a list of its own."""
_DIGITS = 4


class Tables:
    """Formulas, shapes, layouts and texts, by their places in tables.

    Attributes:
        symbols: The symbols with their constraints.
        formulas: For each formula `{"text", "code"}`: `code` is what
            `onnxpar_format.expressions.postfix` returns, with places of symbols instead of names;
            None if the text has a name that is no symbol, so that it has no value.
        shapes: Lists of sizes.
        layouts: `{"text", "partial", "dims"}`; `dims` has for each dim its components, major
            first: the size (None if there is one) and the atoms.
        times: Lists of seconds at each point of `onnxpar.report.size_grid.SizeGrid`.
        texts: Any other texts that occur often.
    """

    def __init__(self, symbols: Mapping[str, Symbol]) -> None:
        """Makes empty tables.

        Args:
            symbols: The symbols with their constraints, in the order of the page.
        """
        self.symbols = SymbolTable(symbols)
        self._symbols = {safe_name(name): place for place, name in enumerate(symbols)}
        names = sorted(symbols, key=len, reverse=True)
        special = [name for name in names if safe_name(name) != name]
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self.formulas: list[Json] = []
        self.shapes: list[list[Size]] = []
        self.layouts: list[Json] = []
        self.times: list[list[float]] = []
        self.texts: list[str] = []
        self._places: dict[object, int] = {}

    def size(self, size: int | str) -> Size:
        """Returns a size of a report."""
        if isinstance(size, int):
            return size
        return [self._place(("formula", size), self.formulas, lambda: self._formula(size))]

    def shape(self, shape: Sequence[int | str] | None) -> int | None:
        """Returns the place of a shape, or None if it is not known."""
        if shape is None:
            return None
        return self._place(
            ("shape", tuple(shape)), self.shapes, lambda: [self.size(n) for n in shape]
        )

    def layout(self, operand: Json, drawn: Mapping[str, Any]) -> int | None:
        """Returns the place of the layout of an operand; None if it has none.

        Args:
            operand: An operand of `onnxpar.report.inspect_data.inspect_data`.
            drawn: Its `layouts`.
        """
        text, partial = operand["sharding"], operand["partial"]
        if text is None:
            return None

        def made() -> Json:
            dims = [[[n and self.size(n), atoms] for n, atoms in dim] for dim in drawn[text]]
            return {"text": text, "partial": partial, "dims": dims}

        return self._place(("layout", text, str(partial)), self.layouts, made)

    def time(self, seconds: Sequence[float]) -> Time:
        """Returns seconds at each point of the grid of sizes, with four digits."""
        rounded = tuple(float(f"{value:.{_DIGITS}g}") for value in seconds)
        if len(set(rounded)) == 1:
            return rounded[0]
        return [self._place(("time", rounded), self.times, lambda: list(rounded))]

    def at(self, time: Time, point: int) -> float:
        """Returns the seconds of a time at a point of the grid of sizes."""
        return self.times[time[0]][point] if isinstance(time, list) else time

    def text(self, text: str) -> int:
        """Returns the place of a text."""
        return self._place(("text", text), self.texts, lambda: text)

    def contents(self) -> Json:
        """Returns the tables for the page."""
        return {
            "formulas": self.formulas,
            "shapes": self.shapes,
            "layouts": self.layouts,
            "times": self.times,
            "texts": self.texts,
        }

    def _place(self, key: object, table: list[Any], make: Any) -> int:
        place = self._places.get(key)
        if place is None:
            # Making an entry may add others to the table.
            made = make()
            place = self._places[key] = len(table)
            table.append(made)
        return place

    def _formula(self, text: str) -> Json:
        safe = text
        if self._special is not None:
            safe = self._special.sub(lambda match: safe_name(match.group()), text)
        try:
            known = all(name in self._symbols for name in names_of(safe))
            code = [
                [self._symbols[token[0]]] if isinstance(token, list) else token
                for token in (postfix(safe) if known else ())
            ]
        except ExpressionError:
            code = []
        return {"text": text, "code": code or None}

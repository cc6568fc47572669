"""Text for people: lines with titles, tables that fit the terminal, layouts in colours.

On a terminal, a table is as wide as the terminal: long names get an ellipsis in the middle, and
sentences are wrapped. In a file or a pipe, nothing is shortened or wrapped, and there are no
colours. `NO_COLOR` and `FORCE_COLOR` work as in other programs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onnxpar.cli.wrap import indented, shortened, shortened_names, wrapped

Json = dict[str, Any]

TITLE = 14
"""Columns of the title of a line."""
_GAP = 2
_LEAST_NAME = 16
_ROOM_FOR_NAMES = 30
"""Columns that leave a name readable: columns that can be left out leave before it gets less."""
_LEAST_TEXT = 20
_STRIDE = re.compile(r"\d+@\d+")
# Colours that are told apart with each kind of colour blindness come first.
_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")


class Content(Enum):
    """What a column holds, which decides what happens if it is too wide."""

    NAME = auto()
    """Names, which are shortened in the middle."""
    NODE = auto()
    """Names of nodes in order: if they are too wide, each module is named once above its nodes."""
    NUMBER = auto()
    """Numbers, aligned on the right, complete."""
    TEXT = auto()
    """Sentences and lists, which are wrapped; names in them that are too wide are shortened."""


_NAMES = (Content.NAME, Content.NODE)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        kind: What it holds.
        optional: Whether it is left out if the terminal is too narrow.
    """

    title: str
    kind: Content = Content.TEXT
    optional: bool = False


class Screen:
    """Standard output, as people read it.

    Attributes:
        console: Where to print.
        narrow: Whether a table left out a column.
    """

    def __init__(self, mesh: Mapping[str, Any] | None = None) -> None:
        """Makes a screen.

        Args:
            mesh: The entry `mesh` of a report, whose axes get colours.
        """
        self.console = Console(highlight=False)
        self.narrow = False
        names = list((mesh or {}).get("axes", ()))
        self._styles = {n: _COLOURS[i % len(_COLOURS)] for i, n in enumerate(names)}
        words = "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True))
        self._axes = re.compile(rf"(?<![\w/.])(?:{words})(?![\w/])") if names else None
        self._used: dict[str, None] = {}
        self._begun = False

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None in a file."""
        return self.console.width if self.console.is_terminal else None

    def line(self, text: str = "", style: str = "") -> None:
        """Prints text that is not wrapped by us, so that commands can be copied."""
        self._print(Text(text, style=style))

    def note(self, text: str, style: str = "") -> None:
        """Prints a sentence, which is wrapped between words on a terminal."""
        self._begun = True
        lines = [text] if self.width is None else wrapped(text, self.width)
        self.console.print(Text("\n".join(lines), style=style), soft_wrap=True)

    def entry(self, title: str, text: str, *, layout: bool = False) -> None:
        """Prints a line with a title; on a terminal, further lines are indented.

        Args:
            title: What the line is about; "" for one more line about the same.
            text: What is said about it.
            layout: Whether to colour mesh axes.
        """
        lines = [text] if self.width is None else wrapped(text, self.width - TITLE)
        text = f"\n{'':<{TITLE}}".join(lines)
        found = self.layout(text) if layout else Text(text)
        self._print(Text.assemble(Text(f"{title:<{TITLE}}", style="bold"), found))

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
        """Prints a table below an empty line; nothing if it has no rows.

        Returns the titles of the columns that it shows.

        Args:
            columns: Its columns; one that is empty in every row is left out.
            rows: For each row, the text of each column.
        """
        used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
        if not used:
            return []
        shown = [columns[i] for i in used]
        cells = [[row[i] for i in used] for row in rows]
        widths = self._widths(shown, cells)
        for i, column in enumerate(shown):
            needed = max(len(row[i]) for row in cells)
            if column.kind is Content.NODE and widths[i] < needed:
                cells = _below_modules(cells, i)
                widths = self._widths(shown, cells)
        if any(width == 0 for width in widths):
            self.narrow = True
        kept = [i for i, width in enumerate(widths) if width]
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for i in kept:
            column = shown[i]
            right = column.kind is Content.NUMBER
            table.add_column(
                Text(shortened(column.title, widths[i])) if column.kind in _NAMES else column.title,
                width=widths[i],
                overflow="fold",
                no_wrap=column.kind in _NAMES,
                justify="right" if right else "left",
            )
        texts = [self._cells(shown[i], [row[i] for row in cells], widths[i]) for i in kept]
        for row in zip(*texts, strict=True):
            table.add_row(*row)
        if self._begun:
            self.line()
        if self.width is None:
            self.console.width = sum(widths) + _GAP * len(widths)
        self._print(table)
        return [shown[i].title for i in kept]

    def _widths(self, columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[int]:
        found = [max(len(c.title), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
        return found if self.width is None else fit(columns, found, self.width)

    def _cells(self, column: Column, texts: Sequence[str], width: int) -> list[Text]:
        """Returns the texts of a column, none wider than it."""
        if column.kind in _NAMES:
            return [Text(text) for text in shortened_names(texts, width)]
        return [self.layout("\n".join(wrapped(text, width, cell=True))) for text in texts]

    def layout(self, text: str) -> Text:
        """Returns text in which each mesh axis has its colour."""
        found = Text(text)
        for match in self._axes.finditer(text) if self._axes else ():
            found.stylize(self._styles[match[0]], *match.span())
        for match in _STRIDE.finditer(text):
            self._used.setdefault(match[0])
            order = list(self._used).index(match[0])
            found.stylize(_COLOURS[order % len(_COLOURS)], *match.span())
        return found

    def legend(self) -> None:
        """Explains the notation of layouts and the columns that were left out."""
        for text in self._used:
            size, stride = text.split("@")
            apart = f"{stride} rank{'' if stride == '1' else 's'} apart"
            self.entry(text, f"over {size} devices that are {apart}", layout=False)
        if self.narrow:
            self.note("A wider terminal, a file or --json shows further columns.", style="dim")

    def _print(self, what: Any) -> None:
        self._begun = True
        self.console.print(what, soft_wrap=isinstance(what, Text))


def _below_modules(cells: Sequence[Sequence[str]], column: int) -> list[list[str]]:
    """Returns rows in which names are shortened to what follows their module.

    The first row of nodes of a module has a row above it with the name of the module.
    """
    found: list[list[str]] = []
    above = ""
    for row, (module, name) in zip(cells, indented([row[column] for row in cells]), strict=True):
        if module and module != above:
            found.append([module if i == column else "" for i in range(len(row))])
        above = module
        found.append([name if i == column else text for i, text in enumerate(row)])
    return found


def fit(columns: Sequence[Column], natural: Sequence[int], width: int) -> list[int]:
    """Returns the width of each column of a table that is at most `width` wide, if possible.

    First sentences are wrapped, then columns that can be left out are (width 0), then names are
    shortened, the longest first.

    Args:
        columns: The columns.
        natural: The widths that they need.
        width: That of the terminal.
    """
    widths = list(natural)

    def over() -> int:
        return sum(widths) + _GAP * (sum(map(bool, widths)) - 1) - width

    def shrink(kind: Content, least: int) -> None:
        kinds = _NAMES if kind is Content.NAME else (kind,)
        most = [(i, c) for i, c in enumerate(columns) if c.kind in kinds and widths[i] > least]
        while most and over() > 0:
            i = max(most, key=lambda one: widths[one[0]])[0]
            if widths[i] <= least:
                return
            widths[i] -= 1

    shrink(Content.TEXT, _LEAST_TEXT)
    shrink(Content.NAME, _ROOM_FOR_NAMES)
    for i in range(len(columns) - 1, -1, -1):
        if over() > 0 and columns[i].optional:
            widths[i] = 0
            # What was shrunk before may now be wider again.
            kept = [n if w else 0 for n, w in zip(natural, widths, strict=True)]
            widths = kept
            shrink(Content.TEXT, _LEAST_TEXT)
            shrink(Content.NAME, _ROOM_FOR_NAMES)
    shrink(Content.NAME, _LEAST_NAME)
    shrink(Content.TEXT, _LEAST_TEXT // 2)
    return widths


def amount(number: int | str) -> str:
    """Returns a number with thousands separated, or a formula as it is."""
    return f"{number:,}" if isinstance(number, int) else str(number)


def once(texts: Iterable[str]) -> list[str]:
    """Returns each text once, with how often it occurred if that is more than once."""
    found: dict[str, int] = {}
    for text in texts:
        found[text] = found.get(text, 0) + 1
    return [text + (f" (×{number})" if number > 1 else "") for text, number in found.items()]

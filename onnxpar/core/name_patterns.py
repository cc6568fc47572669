"""Names and patterns: lists of names for messages, and which entry applies to which name."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from glob import escape
from typing import TypeVar

from onnxpar.core.errors import StrategyError, SymbolError
from onnxpar.core.symbols import SymbolTable

T = TypeVar("T")
Group = TypeVar("Group")
SHOWN = 8
"""The most items that a message lists."""


def listed(items: Sequence[str], separator: str = ", ", most: int = SHOWN) -> str:
    """Returns the first items in one text, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; nearest: 'a', 'b'`, or a list of the names, for the end of a message."""
    names = list(dict.fromkeys(known))
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "; nearest: " + ", ".join(map(repr, close))
    if not names:
        return "; there are none"
    shown = listed([repr(n) for n in names])
    return f"; there are {shown}" if names[1:] else f"; there is only {shown}"


def match(
    entries: Mapping[str, T], names: Iterable[str], what: str, where: Mapping[str, str]
) -> dict[str, tuple[str, T]]:
    """Returns the entry that applies to each name: its key and value, in the order of `names`.

    A key that is a name applies to it alone and wins over patterns; every other key is a pattern as
    in `fnmatch` (`*` matches `/` too).

    Args:
        entries: The user's entries.
        names: The known names.
        what: What the names are, for messages: "node".
        where: Place of each key, for messages.

    Raises:
        StrategyError: A key that applies to no name, or patterns with different entries that match
            one name.
    """
    known = dict.fromkeys(names)
    found: dict[str, tuple[str, T]] = {}
    for key, entry in entries.items():
        if key in known:
            continue
        hits = [name for name in known if fnmatchcase(name, key)]
        if not hits:
            kind = "the pattern" if any(c in key for c in "*?[") else "the name"
            raise StrategyError(
                f"{where[key]}: expected the name or a pattern of a {what}, got {kind} {key!r}, "
                f"which matches no {what}{nearest(key, known)}"
            )
        for name in hits:
            if name in entries:
                continue
            other = found.get(name)
            if other is not None and other[1] != entry:
                raise StrategyError(
                    f"{where[key]}: {what} {name!r}: expected one entry, got two that differ: "
                    f"{key!r} here and {other[0]!r} at {where[other[0]]}"
                )
            found.setdefault(name, (key, entry))
    return {
        name: (name, entries[name]) if name in entries else found[name]
        for name in known
        if name in entries or name in found
    }


def patterns_of(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Returns patterns, as in `fnmatch`, that match some names and no others.

    Names that differ in one number are one pattern, if it matches no other name.

    Args:
        names: The names.
        known: All names, including these.
    """
    split = {name: [escape(part) for part in re.split(r"(\d+)", name)] for name in names}
    most = max(map(len, split.values()), default=0)
    found: dict[str, list[str]] = {name: [] for name in split}
    for place in range(1, most, 2):
        groups: dict[str, list[str]] = {}
        for name, parts in split.items():
            starred = "*" if place < len(parts) else ""
            key = "".join((*parts[:place], starred, *parts[place + 1 :]))
            groups.setdefault(key, []).append(name)
        if len(groups) < len(found):
            found = groups
    by_end = _ByEnd(known)
    return [text for key, group in found.items() for text in _pattern(key, group, by_end)]


def prefixes_of(
    groups: Mapping[Group, Collection[str]], known: Iterable[str]
) -> dict[Group, list[str]]:
    """Returns names, and patterns `prefix*`, that match the names of each group and no others.

    A prefix is the first parts of a path; a part ends with `/` or `.`.

    Args:
        groups: The names of each group.
        known: All names, including these.
    """
    most = Counter(prefix for name in known for prefix in _prefixes(name))
    return {group: _short(names, most) for group, names in groups.items()}


def _short(names: Collection[str], most: Mapping[str, int]) -> list[str]:
    """The patterns of one group; `most` says how many of all names begin with each prefix."""
    prefixes = {name: _prefixes(name) for name in names}
    mine = Counter(prefix for each in prefixes.values() for prefix in each)
    found: dict[str, None] = {}
    for name, each in prefixes.items():
        short = next((p for p in each if most[p] == mine[p] > 1), None)
        found[name if short is None else f"{escape(short)}*"] = None
    return list(found)


def _prefixes(name: str) -> list[str]:
    """The first parts of a path, the shortest first; without the path `/`."""
    return [name[: part.end()] for part in re.finditer(r"[/.]", name) if part.end() > 1]


def _pattern(key: str, names: Sequence[str], known: "_ByEnd") -> Sequence[str]:
    """The pattern in a list, if it matches these names alone; else the names."""
    if len(names) < 2:
        return names or [key]
    head, _, tail = key.partition("*")
    near = (n for n in known.ending(tail) if n.startswith(head.partition("[")[0]))
    hits = {name for name in near if fnmatchcase(name, key)}
    return [key] if hits == set(names) else names


class _ByEnd:
    """Names, of which those with a certain end are found at once."""

    def __init__(self, names: Iterable[str]) -> None:
        self._reversed = sorted(name[::-1] for name in names)

    def ending(self, end: str) -> Iterator[str]:
        """Yields the names that end with a text."""
        begin = end[::-1]
        for place in range(bisect_left(self._reversed, begin), len(self._reversed)):
            if not self._reversed[place].startswith(begin):
                return
            yield self._reversed[place][::-1]


def check_symbol_sizes(sizes: Mapping[str, int], table: SymbolTable, where: str) -> None:
    """Checks the sizes for which a plan is made: a run must be able to have them.

    Args:
        sizes: The user's sizes, by symbol.
        table: The symbols of the model's inputs.
        where: Where the user gave the sizes, for messages.

    Raises:
        StrategyError: No input has such a symbol, or its constraint excludes the size.
    """
    for name in sizes:
        if name not in table:
            raise StrategyError(
                f"{where}: expected a symbol of the model's inputs, got {name!r}"
                f"{nearest(name, table)}"
            )
    try:
        table.check(sizes)
    except SymbolError as error:
        raise StrategyError(f"{where}: {error}") from None

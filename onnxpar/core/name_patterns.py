"""Names and patterns: nearest names for messages, and which entry holds for which name or size."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

from onnxpar.core.errors import StrategyError, SymbolError
from onnxpar.core.symbols import SymbolTable

T = TypeVar("T")
SHOWN = 8


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; nearest: 'a', 'b'`, or what names there are, for the end of a message."""
    names = list(dict.fromkeys(known))
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "; nearest: " + ", ".join(map(repr, close))
    if not names:
        return "; there are none"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; there are " + ", ".join(map(repr, names[:SHOWN])) + more


def match(
    entries: Mapping[str, T], names: Iterable[str], what: str, where: Mapping[str, str]
) -> dict[str, tuple[str, T]]:
    """Returns the entry that holds for each name: its key and value, in the order of `names`.

    A key that is a name holds for it alone and wins over patterns; every other key is a pattern in
    the sense of `fnmatch` (`*` crosses `/`).

    Args:
        entries: The user's entries.
        names: The names there are.
        what: What the names are, for messages: "node".
        where: Place of each key, for messages.

    Raises:
        StrategyError: A key that holds for no name, or two different entries for one name of which
            neither is exact.
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
                f"which no {what} has{nearest(key, known)}"
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


def check_symbol_sizes(sizes: Mapping[str, int], table: SymbolTable, where: str) -> None:
    """Checks sizes for planning: a plan for others would be one that no run can be.

    Args:
        sizes: The user's sizes, by symbol.
        table: The symbols of the model's inputs.
        where: Where the sizes stand, for messages.

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

"""Lines of text that are broken between words, and not within brackets if that can be avoided."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from onnxpar.report.fold_layers import common_beginning

_LEAST_INSIDE = 3
_NUMBERED = re.compile(r"[\d*]")
_OPEN, _CLOSE = "([{", ")]}"
# Behind a space, and behind an operator of a formula.
_BREAK = re.compile(r" |(?<=\w)(?:\*|//)(?=[\w(])|(?<=\))(?:\*|//)(?=[\w(])")


def wrapped(text: str, width: int, *, cell: bool = False) -> list[str]:
    """Returns a text in lines.

    A line ends behind a space. A list in brackets is broken only if it is wider than a line, and a
    formula at an operator only if it has no space where it could be broken.

    Args:
        text: The text, without line breaks.
        width: The most characters of a line.
        cell: Whether this is a cell of a table. A line then ends behind a comma or before an arrow
            if it stays at least half as long, and a name that is wider than a line gets an ellipsis
            in the middle.
    """
    if cell:
        text = " ".join(_short(word, width) for word in text.split(" "))
    groups = list(_groups(text, width))
    places = [(m[0] == " ", m.end()) for m in _BREAK.finditer(text)]
    outside = [(s, end) for s, end in places if not any(a < end < b for a, b in groups)]
    lines, begin = [], 0
    while len(text) - begin > width:
        # The space at the end of a line is not printed.
        found = [p for p in outside if begin < p[1] <= begin + width + p[0]]
        found = found or [p for p in places if begin < p[1] <= begin + width + p[0]]
        end = max(found)[1] if found else begin + width
        half = (begin + end) // 2
        better = max(text.rfind(", ", half, end) + 2, text.rfind(" -> ", half, end) + 1)
        if cell and (True, better) in found:
            end = better
        lines.append(text[begin:end].rstrip())
        begin = end
    return [*lines, text[begin:]]


def shortened(name: str, width: int) -> str:
    """Returns a name with an ellipsis in the middle if it is longer than `width`."""
    if len(name) <= width:
        return name
    # The end tells more: layers begin alike.
    begin = (width - 1) * 2 // 5
    return f"{name[:begin]}…{name[len(name) - (width - 1 - begin) :]}"


def shortened_names(names: Sequence[str], width: int) -> list[str]:
    """Returns names as `shortened` does, but different names differently if that is possible.

    Names that would be equal begin where they differ.
    """
    found: dict[str, str] = {name: shortened(name, width) for name in names}
    equal: dict[str, list[str]] = {}
    for name, short in found.items():
        equal.setdefault(short, []).append(name)
    for alike in equal.values():
        if len(alike) > 1:
            same = len(common_beginning(alike))
            begin = max(alike[0].rfind("/", 0, same) + 1, same - width // 2)
            for name in alike:
                rest = name[begin:]
                cut = len(rest) > width - 1
                found[name] = f"…{rest[: width - 2]}…" if cut else f"…{rest}"
    return [found[name] for name in names]


def indented(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns for each name the module that it is in, or "", and how it is shown below that module.

    The module is the beginning of the name up to the first part with a number or a `*`, or the
    first part. A module that would stand above fewer than three names is left out.
    """
    found: list[tuple[str, str]] = []
    for module, run in groupby(names, _module):
        inside = list(run)
        if not module or len(inside) < _LEAST_INSIDE:
            found += [("", name) for name in inside]
        else:
            found += [(module, f"  {name[len(module) + 1 :]}") for name in inside]
    return found


def _module(name: str) -> str:
    *parts, _ = name.split("/")
    numbered = next((i for i, part in enumerate(parts) if _NUMBERED.search(part)), 1)
    return "/".join(parts[: numbered + 1])


def _short(word: str, width: int) -> str:
    """Returns a word, shortened if it is a name that is too wide."""
    return word if _BREAK.search(word) else shortened(word, width)


def _groups(text: str, width: int) -> Iterator[tuple[int, int]]:
    """Returns where each pair of brackets begins and ends that fits a line."""
    opened: list[int] = []
    for place, letter in enumerate(text):
        if letter in _OPEN:
            opened.append(place)
        elif letter in _CLOSE and opened:
            begin = opened.pop()
            if place + 1 - begin <= width:
                yield begin, place + 1

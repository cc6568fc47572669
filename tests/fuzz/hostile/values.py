"""Values that files should not have, and changes to bytes, to text and to trees of plain data.

Every change is a function of a `random.Random`, so that a seed repeats it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

CODE = "__import__('os').system('true')"
TEXTS = (
    "", " ", "\0", "a\0b", "\n", "\r\x1b[2J", "é", "\u202e", "../../secret", "/etc/passwd",
    "/dev/zero",
    "x" * 5_000, "x" * 100_000, "batch%0", "-" * 3_000 + "a", "9" * 5_000, "10**400", "9**9**9",
    "((((9**64)**64)**64)**64)**64", "floor((a+b+c+d+e)**40/7)", "(" * 500, "a" + "+a" * 400, CODE,
    "{}", "{0.__class__}", "%s%d%n", "${HOME}", "*", "[", "nan", "-inf", "1e999", "0x10", "1_000",
    "0x" + "f" * 5_000, "0" + "7" * 5_000, "0b" + "1" * 20_000, "1" + ":59" * 5_000,
    "tp", "dp=2", "dp=2,dp=2", "tp=0", "a,b", "batch", "-1", "0", "1", "true", "null", "float32",
    "complex64",
)  # fmt: skip
SURROGATE = "\ud800"
INTS = (
    0, 1, -1, 2, 3, 7, 8, 255, 256, -(2**31), 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1,
    -(2**63), 2**63, 2**64, 10**12, 10**19, 10**400,
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.5, -1e308, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
DEEP, LONG = 3_000, 20_000
"""How deep and how long the trees and lists are that a change makes."""

_RAW = "\x01RAW:"
RAW_JSON = ("9" * 5_000, "1e99999", "-", "NaN", "-Infinity", "1.", "'a'", '"\\u12"', "[" * 3_000)
"""Text in place of a value, which JSON's writer would not write."""


def scalar(draw: Random) -> Any:
    """A number, a text or nothing."""
    kind = draw.randrange(8)
    if kind < 3:
        return draw.choice(TEXTS)
    if kind < 6:
        return draw.choice(INTS)
    return draw.choice(FLOATS) if kind == 6 else draw.choice((None, True, False, SURROGATE))


def tree(draw: Random) -> Any:
    """A scalar, or a small or a huge collection."""
    kind = draw.randrange(12)
    if kind == 0:
        return [scalar(draw) for _ in range(draw.randrange(4))]
    if kind == 1:
        return {str(draw.choice(TEXTS[:12])): scalar(draw) for _ in range(draw.randrange(4))}
    if kind == 2:
        # A long list takes as long as hundreds of other inputs, and is much like the last one.
        count = LONG if draw.random() < 0.1 else 100
        return [draw.choice((0, 1, "x", [], {}))] * count
    if kind == 3:
        return nested(draw.choice((20, DEEP)), draw)
    return scalar(draw)


def nested(depth: int, draw: Random) -> Any:
    """Lists or mappings inside one another."""
    found: Any = scalar(draw)
    mapping = draw.random() < 0.5
    for _ in range(depth):
        found = {"a": found} if mapping else [found]
    return found


Place = tuple[Any, Any]


def places(item: Any) -> Iterator[Place]:
    """Every key and index in a tree, with the collection that it belongs to.

    Raises:
        ValueError: It is no tree: an alias in YAML may be a part of itself.
    """
    waiting, seen = [item], {id(item)}
    while waiting:
        parent = waiting.pop()
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        for key in keys:
            yield parent, key
            if isinstance(parent[key], dict | list):
                if id(parent[key]) in seen:
                    raise ValueError("a collection that is at two places")
                seen.add(id(parent[key]))
                waiting.append(parent[key])


def change_tree(root: Any, draw: Random) -> None:
    """Changes a place of a tree: drops it, or puts something else there."""
    every = list(places(root)) if isinstance(root, dict | list) else []
    if not every:
        return
    # Places near the root are few, and matter more than the many leaves.
    parent, key = draw.choice(every[: draw.choice((10, 40, len(every)))])
    kind = draw.randrange(8)
    if kind == 0:
        del parent[key]
    elif kind == 1:
        parent[key] = edited(parent[key], draw)
    elif kind == 2:
        other, name = draw.choice(every)
        if name in other if isinstance(other, dict) else name < len(other):
            parent[key] = json.loads(json.dumps(other[name])) if plain(other[name]) else None
    elif kind == 3 and isinstance(parent, dict):
        parent[str(draw.choice(TEXTS))] = parent.pop(key)
    elif kind == 3 and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif kind == 4:
        parent[key] = [parent[key]] if draw.random() < 0.5 else {"a": parent[key]}
    elif kind == 5:
        parent[key] = _RAW + draw.choice(RAW_JSON)
    else:
        parent[key] = tree(draw)


def plain(item: Any) -> bool:
    """Whether a tree is small enough to be copied again and again."""
    return not isinstance(item, dict | list) or sum(1 for _ in places(item)) < 500


def edited(item: Any, draw: Random) -> Any:
    """A value that is close to another one."""
    if isinstance(item, bool) or item is None:
        return draw.choice((not item, 0, 1, "true"))
    if isinstance(item, int | float):
        # An integer of a file may be too large for a float.
        real = float(item) if abs(item) < 1e300 else 1.5
        return draw.choice((item + 1, item - 1, -item, item * 2, str(item), real, item * 10**6))
    if isinstance(item, str):
        at = draw.randrange(len(item) + 1)
        piece = draw.choice((*TEXTS[:12], ",", ":", "=", "/", "(", ")", "[", "-", "*", SURROGATE))
        return item[:at] + piece + item[at + draw.randrange(2) :]
    return list(item) * 2 if isinstance(item, list) else {**item, "more": 1}


def json_bytes(root: Any) -> bytes:
    """The tree as JSON, with surrogates and raw text where `change_tree` put them."""
    text = _dumps(root)
    for raw in RAW_JSON:
        text = text.replace(json.dumps(_RAW + raw), raw)
    return text.encode("utf-8", "surrogatepass")


def _dumps(root: Any) -> str:
    """JSON of a tree of any depth, and with numbers of any length."""
    with suppress(RecursionError, ValueError):
        return json.dumps(root, separators=(",", ":"))
    pieces: list[str] = []
    waiting: list[Any] = [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Text):
            pieces.append(item)
        elif isinstance(item, dict):
            waiting.append(_Text("}"))
            for index, (key, value) in enumerate(reversed(item.items())):
                comma = "," if index < len(item) - 1 else ""
                waiting += [value, _Text(f"{comma}{json.dumps(key)}:")]
            waiting.append(_Text("{"))
        elif isinstance(item, list):
            waiting.append(_Text("]"))
            for index, value in enumerate(reversed(item)):
                waiting += [value, *([_Text(",")] if index < len(item) - 1 else ())]
            waiting.append(_Text("["))
        else:
            pieces.append(json.dumps(item))
    return "".join(pieces)


class _Text(str):
    """Text that is part of JSON, not a value."""


def change_bytes(data: bytes, draw: Random) -> bytes:
    """Other bytes: some flipped, cut out, put in, repeated, or all cut off from somewhere."""
    if not data:
        return bytes(draw.randrange(256) for _ in range(draw.randrange(40)))
    at, kind = draw.randrange(len(data)), draw.randrange(8)
    length = draw.choice((1, 2, 4, 8, 64))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + length :]
    if kind == 2:
        return data[:at] + draw.randbytes(length) + data[at:]
    if kind == 3:
        return data[:at] + data[at : at + length] * draw.choice((2, 50)) + data[at + length :]
    if kind == 4:
        other = draw.randrange(len(data))
        return data[:at] + data[other : other + length] + data[at + length :]
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(changed))
        if kind == 5:
            changed[place] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
        else:
            changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def change_text(text: bytes, draw: Random) -> bytes:
    """Other text: another encoding, a mark at its beginning, words put in, lines moved."""
    kind = draw.randrange(6)
    if kind == 0:
        return (
            draw.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\n" * 9, b"%YAML 9.9\n---\n"))
            + text
        )
    if kind == 1:
        return text.decode("utf-8", "replace").encode(draw.choice(("utf-16", "utf-32", "utf-7")))
    lines = text.split(b"\n")
    if kind == 2:
        draw.shuffle(lines)
        return b"\n".join(lines)
    if kind == 3:
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))
        return b"\n".join(lines)
    if kind == 4:
        at = draw.randrange(len(text) + 1)
        word = draw.choice(TEXTS).encode("utf-8", "surrogatepass")
        return text[:at] + word + text[at:]
    return change_bytes(text, draw)


Change = Callable[[Any, Random], Any]


def change_json(text: bytes, draw: Random) -> bytes:
    """Changes values of a JSON text, sometimes its characters."""
    if draw.random() < 0.2:
        return change_text(text, draw)
    try:
        root = json.loads(text)
        change_tree(root, draw)
    except (ValueError, RecursionError):
        return change_text(text, draw)
    return json_bytes(root)

"""Numbers, sizes and ranks as text for people."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_DIGITS = 18
_LONGEST = 4000
_LONG_WORD = re.compile(r"\S{301,}")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters, which a terminal may obey, except tabs and ends of lines."""
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
_PLURALS = {"eval": "evaluate", **{n: f"{n}s" for n in ("rank", "state", "symbol")}, "tie": "ties"}
"""Arguments of Python that are not named as the options of commands."""


def whole(text: str) -> int | None:
    """Returns a number of at most 18 decimal digits, so that it fits into 64 bits; else None.

    Python refuses to read a number of thousands of digits.
    """
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None


def message_text(message: str) -> str:
    """Returns a message for a terminal: names may have any length, and any characters.

    Control characters are escaped. Of a word of more than 300 characters, the first and the last
    100 remain, so that what follows is still seen; of a message, the first 4,000.
    """
    message = CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), message)
    message = _LONG_WORD.sub(_shortened, message)
    left = len(message) - _LONGEST
    return message if left <= 0 else f"{message[:_LONGEST]}… ({left} more characters)"


def _shortened(word: re.Match[str]) -> str:
    text = word[0]
    return f"{text[:100]}…({len(text) - 200} characters)…{text[-100:]}"


def three_digits(number: float) -> str:
    """Returns a number with three digits, or all before the point with commas."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"


def bytes_text(size: float) -> str:
    """Returns a number of bytes in the unit that suits it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{three_digits(size / scale)} {unit}"
    return f"{size:.0f} B"


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns `0 to 7` for more than two consecutive ranks, and other ranks as a list."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def numbered_ranks(ranks: Sequence[int]) -> str:
    """Returns text such as `rank 1`, `ranks 0, 2` or `ranks 0 to 7`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def ranks_in_words(count: int) -> str:
    """Returns `1 rank` or `2 ranks`."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


@contextmanager
def naming_arguments(kind: type[Exception]) -> Iterator[None]:
    """Lets errors of a kind name arguments of Python: `batch_size`, not `--batch-size`."""
    try:
        yield
    except kind as error:
        error.args = (argument_names(str(error)), *error.args[1:])
        raise


def argument_names(text: str) -> str:
    """Returns a message of a command for a program: `batch_size` in place of `--batch-size`.

    Commands in backquotes remain. Only the first line is a message of ours; a traceback of the
    user's code may follow.
    """
    first, *more = text.split("\n", 1)
    parts = first.split("`")

    def argument(found: re.Match[str]) -> str:
        return _PLURALS.get(found[1], found[1].replace("-", "_"))

    parts[::2] = [_OPTION.sub(argument, part) for part in parts[::2]]
    return "\n".join(["`".join(parts), *more])

"""Frozen dataclasses to JSON and back, by the types of their fields.

A record is a frozen dataclass, or a named tuple, of numbers, texts, tuples, mappings and other
records. Its fields in their order are the JSON object. Marks in `Annotated` say what types cannot:
`Check`, `Key`, `KEYED`, `LISTED` and `OPTIONAL`. The record's method `problems` checks conditions
between fields. A field that may be None may be missing. Unknown keys are ignored.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, is_dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from onnxpar_format.regular_file import read_regular
from onnxpar_format.texts import CONTROL

R = TypeVar("R")

Problem = tuple[str, str, object]
"""An error in a record: the place in it (`.dims`), what is expected there, what was found."""


class FormatError(Exception):
    """A file that violates its format; the message names file, place, expected and got."""


@dataclass(frozen=True)
class Check:
    """A condition on a field: a description, and a function that checks a value."""

    expected: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Key:
    """The keys, from the outermost, under which a field stands; by default its name."""

    path: tuple[str, ...]


@dataclass(frozen=True)
class Mark:
    """A mark on a field that needs no arguments."""

    meaning: str


KEYED = Mark("the field is the record's key in a mapping")
LISTED = Mark("the mapping of records by name is a list in the file")
OPTIONAL = Mark("the key is left out if the field has its default, and may be missing")


class Absent(tuple[Any, ...]):
    """The default of an optional tuple. Only the default itself is left out, not an equal tuple."""


NONE_GIVEN = Absent()


class _Checked(Protocol):
    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong between fields."""


@dataclass(frozen=True)
class _Field:
    name: str
    path: tuple[str, ...]
    read: "_Read"
    default: Any
    marks: tuple[Any, ...]


_Read = Callable[[Any, str], Any]
_PLAIN: Mapping[Any, tuple[type, ...]] = {
    int: (int,),
    str: (str,),
    bool: (bool,),
    float: (int, float),
}


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""A surrogate in JSON; one that stands alone cannot be printed or written."""
_MAYBE_CONTROL = re.compile(r"\\(?:[bfr]|u00[0189])|\\u007|\\u202[89]|[\x7f-\x9f\u2028\u2029]")
"""What may be a control character in JSON, or follow a backslash."""


def load_json(path: Path, missing: str, *, shown: bool = False) -> Any:
    """Returns the JSON of a file.

    Args:
        path: The file.
        missing: The message if there is no such file in the folder.
        shown: Whether commands show its contents, so that control characters, and numbers that are
            not finite, are refused.

    Raises:
        FormatError: It cannot be read, or is not JSON.
    """
    try:
        text = read_regular(path).decode()
        checks: Any = {"parse_constant": _finite, "parse_float": _finite} if shown else {}
        found = json.loads(text, **checks)
        if shown and _MAYBE_CONTROL.search(text):
            _check_characters(path, found)
        if _HALF.search(text):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except FileNotFoundError:
        raise FormatError(f"{path.parent}: {missing}") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: cannot be read: {error}") from None
    except UnicodeEncodeError:
        raise FormatError(f"{path}: expected text, got a lone surrogate") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not valid JSON: {error}") from None


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"expected finite numbers, got {text:.80}")
    return number


def _check_characters(path: Path, found: Any) -> None:
    """Raises FormatError if a text or a key has a control character."""
    left = [found]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            left += [*item, *item.values()]
        elif isinstance(item, list):
            left += item
        elif isinstance(item, str) and CONTROL.search(item):
            raise failure(str(path), "text without control characters", item)


def from_json(kind: type[R], raw: Any, place: str) -> R:
    """Returns the record of some JSON data.

    Args:
        kind: The record's class.
        raw: The data.
        place: Name of the data; messages begin with it.

    Raises:
        FormatError: The data violates the types or checks of the record's fields.
    """
    read: _Read = _reader(cast(Any, kind))
    return cast(R, read(raw, place))


def to_json(value: Any) -> Any:
    """Returns a record, or a collection of records, as JSON data."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    fields = _record_fields(cast(Any, kind))
    if fields is not None:
        found: dict[str, Any] = {}
        for field in fields:
            item = getattr(value, field.name)
            if KEYED in field.marks or (OPTIONAL in field.marks and item is field.default):
                continue
            into = found
            for key in field.path[:-1]:
                into = into.setdefault(key, {})
            listed = LISTED in field.marks
            into[field.path[-1]] = to_json(tuple(item.values()) if listed else item)
        return found
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def failure(place: str, expected: str, got: object) -> FormatError:
    """Returns the error for an unexpected value at a place."""
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return FormatError(f"{place}: expected {expected}, got {shown}")


_LEAVES = frozenset({str, int, float, bool, NoneType})
"""Types of JSON's own values, which are most of a manifest."""


def _is_record(hint: Any) -> bool:
    return is_dataclass(hint) or hasattr(hint, "_fields")


@lru_cache
def _record_fields(kind: Any) -> tuple[_Field, ...] | None:
    """Returns the fields of a record's class; None for another class."""
    return _fields(kind) if _is_record(kind) else None


@lru_cache
def _fields(kind: Any) -> tuple[_Field, ...]:
    declared: Mapping[str, Field[Any]] = getattr(kind, "__dataclass_fields__", {})
    found = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        key = next((m for m in marks if isinstance(m, Key)), Key((name,)))
        default = declared[name].default if name in declared else MISSING
        if OPTIONAL not in marks:
            # A field that may be None may be missing, whatever default the record has.
            plain = get_args(hint)[0] if marks else hint
            default = None if NoneType in get_args(plain) else MISSING
        found.append(_Field(name, key.path, _reader(hint), default, marks))
    return tuple(found)


@lru_cache
def _reader(hint: Any) -> _Read:
    """Returns a function that reads values of a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _marked(arguments[0], arguments[1:])
    if hint is Any:
        return lambda raw, place: raw
    if _is_record(hint):
        return lambda raw, place: _record(hint, raw, place)
    if origin is tuple:
        return _tuple(arguments)
    if origin is Mapping:
        return _mapping(arguments[1])
    if NoneType in arguments:
        # `Union[x]` is x.
        inner = _reader(Union[tuple(a for a in arguments if a is not NoneType)])  # noqa: UP007
        return lambda raw, place: None if raw is None else inner(raw, place)
    return _plain(arguments if origin in (Union, UnionType) else (hint,))


def _plain(kinds: tuple[Any, ...]) -> _Read:
    """Returns a function that reads numbers or texts; a boolean is not a number."""
    allowed = tuple(t for kind in kinds for t in _PLAIN[kind])
    names = " or ".join(kind.__name__ for kind in kinds)

    def read(raw: Any, place: str) -> Any:
        if not isinstance(raw, allowed) or (isinstance(raw, bool) and bool not in allowed):
            raise failure(place, names, raw)
        try:
            return float(cast(float, raw)) if float in allowed else raw
        except OverflowError:
            raise failure(place, "a number of 64 bits", raw) from None

    return read


def _tuple(arguments: tuple[Any, ...]) -> _Read:
    items = [_reader(a) for a in arguments if a is not ...]
    count = None if arguments[-1:] == (...,) else len(items)

    def read(raw: Any, place: str) -> Any:
        if not isinstance(raw, list):
            raise failure(place, "list", raw)
        if count is None:
            return tuple(items[0](item, _item(place, i, item)) for i, item in enumerate(raw))
        if len(raw) != count:
            raise failure(place, f"{count} items", raw)
        return tuple(
            each(item, f"{place}[{i}]")
            for i, (each, item) in enumerate(zip(items, raw, strict=True))
        )

    return read


def _item(place: str, index: int, raw: Any) -> str:
    """Returns the place of a list's item: its name if it has one, else its index."""
    name = raw.get("name") if isinstance(raw, dict) else None
    return f"{place} {name!r}" if isinstance(name, str) else f"{place}[{index}]"


def _mapping(hint: Any) -> _Read:
    if _is_record(hint):
        return lambda raw, place: {
            key: _record(hint, item, f"{place}.{key}", key)
            for key, item in _object(raw, place).items()
        }
    read = _reader(hint)
    return lambda raw, place: {
        key: read(item, f"{place}.{key}") for key, item in _object(raw, place).items()
    }


def _marked(hint: Any, marks: tuple[Any, ...]) -> _Read:
    checks = [m for m in marks if isinstance(m, Check)]
    inner = _tuple((get_args(hint)[1], ...)) if LISTED in marks else _reader(hint)

    def read(raw: Any, place: str) -> Any:
        value = inner(raw, place)
        if LISTED in marks:
            found = {item.name: item for item in value}
            if len(found) != len(value):
                names = [item.name for item in value]
                twice = next(name for name in names if names.count(name) > 1)
                raise failure(place, "each name once", twice)
            return found
        for check in checks:
            if not check.holds(value):
                raise failure(place, check.expected, raw)
        return value

    return read


def _object(raw: Any, place: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise failure(place, "an object", raw)
    return raw


def _record(kind: Any, raw: Any, place: str, name: str | None = None) -> Any:
    _object(raw, place)
    values: dict[str, Any] = {}
    for field in _fields(kind):
        if KEYED in field.marks:
            values[field.name] = name
            continue
        inside, at = raw, place
        for key in field.path:
            if key not in _object(inside, at):
                if field.default is MISSING:
                    raise FormatError(f"{at}: {key!r} is missing")
                values[field.name] = field.default
                break
            inside, at = inside[key], f"{at}.{key}"
        else:
            values[field.name] = field.read(inside, at)
    made: Any = kind(**values)
    if hasattr(made, "problems"):
        checked: _Checked = made
        for where, expected, got in checked.problems():
            raise failure(f"{place}{where}", expected, got)
    return made

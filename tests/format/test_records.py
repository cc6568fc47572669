"""Records become JSON and back; data that is something else is one error that names its place."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest

from onnxpar_format.records import (
    KEYED,
    LISTED,
    NONE_GIVEN,
    OPTIONAL,
    Check,
    FormatError,
    Key,
    Problem,
    from_json,
    load_json,
    to_json,
)


class Pair(NamedTuple):
    size: int | str
    atoms: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    name: str
    source: Annotated[str | None, Key(("from",))]
    weight: float = 1.0


@dataclass(frozen=True)
class Entry:
    name: Annotated[str, KEYED]
    low: int
    high: int

    def problems(self) -> Iterator[Problem]:
        if self.low > self.high:
            yield ".high", f"at least {self.low}", self.high


@dataclass(frozen=True)
class Record:
    kind: Annotated[str, Key(("kind", "name")), Check("a or b", {"a", "b"}.__contains__)]
    flag: bool
    pairs: tuple[Pair, ...]
    parts: Annotated[Mapping[str, Part], LISTED]
    entries: Mapping[str, Entry]
    rest: Mapping[str, Any]
    more: Annotated[tuple[int, ...], OPTIONAL] = NONE_GIVEN


RAW: dict[str, Any] = {
    "kind": {"name": "a"},
    "flag": True,
    "pairs": [{"size": "n", "atoms": [0, 1]}, {"size": 3, "atoms": []}],
    "parts": [
        {"name": "p", "from": None, "weight": 0.5},
        {"name": "q", "from": "p", "weight": 2.0},
    ],
    "entries": {"e": {"low": 1, "high": 2}},
    "rest": {"any": [1, None, {"x": "y"}]},
}


def test_there_and_back() -> None:
    record = from_json(Record, RAW, "record")
    assert record.pairs == (("n", (0, 1)), (3, ()))
    assert record.parts["q"] == Part("q", "p", 2.0)
    assert record.entries["e"] == Entry("e", 1, 2)
    assert record.more == ()
    assert to_json(record) == RAW
    assert list(to_json(record)) == list(RAW)


def test_an_optional_field_is_written_where_it_was_given() -> None:
    assert to_json(from_json(Record, {**RAW, "more": []}, "record"))["more"] == []


def test_what_may_be_none_may_be_missing_and_unknown_keys_are_ignored() -> None:
    found = from_json(Part, {"name": "p", "weight": 1, "new": {}}, "part")
    assert found == Part("p", None)
    assert to_json(found) == {"name": "p", "from": None, "weight": 1.0}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("kind",), [], "record.kind: expected an object, got []"),
        (("kind", "name"), "c", "record.kind.name: expected a or b, got 'c'"),
        (("kind", "name"), ..., "record.kind: 'name' is missing"),
        (("flag",), 1, "record.flag: expected bool, got 1"),
        (("pairs",), {}, "record.pairs: expected list, got {}"),
        (("pairs", 0, "size"), True, "record.pairs[0].size: expected int or str, got True"),
        (("pairs", 1, "atoms"), [1.5], "record.pairs[1].atoms[0]: expected int, got 1.5"),
        (("parts", 0, "weight"), "1", "record.parts 'p'.weight: expected float, got '1'"),
        (("parts", 0, "weight"), 10**400, "record.parts 'p'.weight: expected a number of 64 bits"),
        (("parts", 1, "name"), "p", "record.parts: expected each name once, got 'p'"),
        (("parts", 1, "from"), 1, "record.parts 'q'.from: expected str, got 1"),
        (("entries", "e"), 3, "record.entries.e: expected an object, got 3"),
        (("entries", "e", "high"), 0, "record.entries.e.high: expected at least 1, got 0"),
        (("rest",), ..., "record: 'rest' is missing"),
    ],
)
def test_malformed(place: tuple[Any, ...], value: Any, message: str) -> None:
    raw = json.loads(json.dumps(RAW))
    node = raw
    for key in place[:-1]:
        node = node[key]
    if value is ...:
        del node[place[-1]]
    else:
        node[place[-1]] = value
    with pytest.raises(FormatError) as caught:
        from_json(Record, raw, "record")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1" * 5000, "\xff"])
def test_files_that_are_no_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=r"x\.json: "):
        load_json(path, "nothing there")
    path.unlink()
    with pytest.raises(FormatError, match="nothing there"):
        load_json(path, "nothing there")

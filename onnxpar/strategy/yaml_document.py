"""A strategy file as plain data, with the line of every key and item.

The format is YAML 1.1 with PyYAML's safe resolver, so JSON is read too. Only mappings with text
keys, sequences and scalars are read. A key that occurs twice in a mapping is an error, as YAML
demands and PyYAML does not check.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import category

import yaml

from onnxpar.core.errors import StrategyError, short
from onnxpar_format.regular_file import read_regular

Location = tuple[str | int, ...]
MAX_BYTES = 64 << 20
"""Bytes of one file."""
MAX_DEPTH = 64
"""Collections inside one another: each piece of the text costs PyYAML time for each of them."""
MAX_NODES = 1_000_000
"""The most keys, items and scalars of one file, also of those that aliases repeat.

100,000 take 5 s and 80 MB on a busy machine; a file of `MAX_BYTES` could have 33 million.
"""

MAX_DIGITS = 400
"""Characters of a number: those of base 60 cost time that grows with their square."""


_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
"""Tags of collections: those that PyYAML gives to the ones without a tag."""


@dataclass(frozen=True)
class Document:
    """Plain data and where it came from.

    Attributes:
        data: Mappings, lists and scalars.
        source: File name, or another name of the source, for messages.
        lines: Line, from 1, of each key and item by its location; empty without a file.
    """

    data: Any
    source: str
    lines: Mapping[Location, int] = field(default_factory=dict)

    def where(self, location: Location = ()) -> str:
        """Returns `file:line` of a location, or of the closest location around it."""
        for length in range(len(location), 0, -1):
            line = self.lines.get(location[:length])
            if line is not None:
                return f"{self.source}:{line}"
        if self.lines or not location:
            return self.source
        return f"{self.source}: " + ".".join(map(str, location[:2]))


def read_text(path: Path) -> str:
    """Returns the text of a strategy file.

    Raises:
        StrategyError: It cannot be read, or is not UTF-8.
    """
    try:
        return read_regular(path, MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise StrategyError(f"{path}: expected UTF-8 text, got byte {error.start}") from None
    except OSError as error:
        raise StrategyError(f"{path}: cannot be read: {error.strerror}") from None


def parse_document(text: str, source: str) -> Document:
    """Parses the text of a strategy file; `source` names it in messages.

    Raises:
        StrategyError: It is not YAML (the message has line and column), has a key twice, or is
            empty.
    """
    try:
        return _Reader(source).read(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = error.problem or error.context or "malformed"
        raise StrategyError(f"{source}{place}: not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        raise StrategyError(
            f"{source}: not valid YAML: character {error.position}: {error.reason}"
        ) from None
    except RecursionError:
        raise StrategyError(f"{source}: nested too deeply") from None


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str, check: Callable[[int, yaml.Node], None]) -> None:
        super().__init__(text)
        self.depth = self.count = 0
        self.check = check

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Stops at a depth or a size that no strategy has, before the rest of the text is read."""
        if self.depth > MAX_DEPTH:
            raise RecursionError
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        self.count += 1
        if node is not None:
            self.check(self.count, node)
        return node


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[Location, int] = {}
        self.open: set[int] = set()
        self.count = 0

    def read(self, text: str) -> Document:
        self.loader = _Loader(text, self.check)
        try:
            root = self.loader.get_single_node()
            data = None if root is None else self.value(root, ())
        finally:
            self.loader.dispose()
        if data is None:
            raise StrategyError(f"{self.source}: expected keys, got an empty file")
        return Document(data, self.source, self.lines)

    def fail(self, node: yaml.Node, message: str) -> StrategyError:
        mark = node.start_mark
        return StrategyError(f"{self.source}:{mark.line + 1}:{mark.column + 1}: {message}")

    def check(self, count: int, node: yaml.Node) -> None:
        if count > MAX_NODES:
            raise self.fail(node, f"expected at most {MAX_NODES} keys and items")

    def value(self, node: yaml.Node, location: Location) -> Any:
        self.count += 1
        self.check(self.count, node)
        if isinstance(node, yaml.ScalarNode):
            kind = node.tag.rpartition(":")[2]
            if kind in ("int", "float") and len(node.value) > MAX_DIGITS:
                raise self.fail(node, f"expected a number of at most {MAX_DIGITS} characters")
            try:
                value = self.loader.construct_object(node)
            except yaml.YAMLError:
                raise
            except Exception:
                # PyYAML computes a value by its tag, whether the text has that form or not.
                raise self.fail(
                    node, f"not valid YAML: expected a value of the type {kind}"
                ) from None
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise self.fail(node, f"expected an integer of 64 bits, got {short(node.value)}")
            if isinstance(value, str) and any(category(c) in ("Cc", "Cs") for c in value):
                raise self.fail(node, f"expected text without control characters, got {value!r}")
            return value
        if node.tag not in _TAGS:
            raise self.fail(node, f"expected no tag, got {short(node.tag)}")
        if id(node) in self.open:
            raise self.fail(node, "an alias refers to a node that contains it")
        self.open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            result: Any = self.mapping(node, location)
        else:
            result = []
            for index, item in enumerate(node.value):
                self.lines[(*location, index)] = item.start_mark.line + 1
                result.append(self.value(item, (*location, index)))
        self.open.discard(id(node))
        return result

    def mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.value(key_node, location)
            if not isinstance(key, str):
                raise self.fail(
                    key_node,
                    f"expected text as a key, got {key!r} (quote keys that YAML does not read as "
                    "text)",
                )
            line = key_node.start_mark.line + 1
            if key in result:
                first = self.lines[(*location, key)]
                raise self.fail(key_node, f"key {key!r} is already defined on line {first}")
            self.lines[(*location, key)] = line
            result[key] = self.value(value_node, (*location, key))
        return result

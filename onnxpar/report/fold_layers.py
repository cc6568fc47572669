"""Shows repeated layers once: finds rows of a report that are alike, and names them by a pattern.

Two nodes are shown alike if operators, shapes and layouts are equal; only names differ, and in the
names only numbers. Works on a report as plain data, so also on that of a directory.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from onnxpar.core.errors import DirectoryError
from onnxpar.core.name_patterns import nearest
from onnxpar.facts.layers import find_repetitions

Json = dict[str, Any]
T = TypeVar("T")
_NUMBER = re.compile(r"(\d+)")
SMALLEST = 6
"""The least number of nodes of a layer that is shown once."""


@dataclass(frozen=True)
class FoldedNodes:
    """Consecutive nodes of a report: `count` layers of `size` nodes; 1 for nodes shown once each.

    Attributes:
        start: Number of the first node in the report.
        size: Number of nodes of a layer.
        count: Number of layers.
    """

    start: int
    size: int
    count: int

    def places(self, place: int) -> range:
        """Returns the numbers of the nodes at one place of each layer."""
        return range(self.start + place, self.start + self.size * self.count, self.size)


def without_sizes(nodes: Iterable[Json]) -> tuple[list[Json], list[Json]]:
    """Returns the nodes of a report, and apart from them those that only compute sizes.

    Exporters compute the sizes that all layers need in the first one, so that it is like the others
    only without them.

    Args:
        nodes: The entries `nodes` of `inspect_data` or `model_data` in
            `onnxpar.report.inspect_data`.
    """
    divided: tuple[list[Json], list[Json]] = ([], [])
    for node in nodes:
        divided[node["computes_sizes"]].append(node)
    return divided


def fold_nodes(nodes: Sequence[Json]) -> list[FoldedNodes]:
    """Returns the nodes of a report as blocks, in order, which together contain every node once.

    Args:
        nodes: The entries `nodes` of a report, without those that only compute sizes.
    """
    blocks: list[FoldedNodes] = []
    done = 0
    for layer in find_repetitions([_kind(n) for n in nodes], _spans(nodes), SMALLEST):
        last = blocks[-1] if blocks else None
        size = layer.stop - layer.start
        if last and done == layer.start and last.size == size and _alike(nodes, last, layer.start):
            blocks[-1] = FoldedNodes(last.start, size, last.count + 1)
        else:
            if done < layer.start:
                blocks.append(FoldedNodes(done, layer.start - done, 1))
            blocks.append(FoldedNodes(layer.start, size, 1))
        done = layer.stop
    if done < len(nodes):
        blocks.append(FoldedNodes(done, len(nodes) - done, 1))
    return blocks


def fold_alike(nodes: Sequence[Json]) -> list[list[Json]]:
    """Returns the nodes of a report in groups that are shown in one row, in order.

    These are the nodes at one place of each layer. Nodes of other layers, such as a first one that
    has more nodes, are in the same row if they are alike and their names differ only in the number
    of the module that contains them.

    Args:
        nodes: The entries `nodes` of a report, without those that only compute sizes.
    """
    groups = [[*block.places(place)] for block in fold_nodes(nodes) for place in range(block.size)]
    keys = [_place(nodes[group[0]]) for group in groups]
    folded = {key for key, group in zip(keys, groups, strict=True) if len(group) > 1}
    rows: dict[Hashable, list[int]] = {}
    for key, group in zip(keys, groups, strict=True):
        rows.setdefault(key if key in folded else group[0], []).extend(group)
    return [[nodes[i] for i in row] for row in sorted(map(sorted, rows.values()))]


def _place(node: Json) -> Hashable:
    """Returns what nodes at one place of all layers share; the name if it has no module."""
    modules, slash, name = node["name"].rpartition("/")
    return (_NUMBER.sub("#", modules, count=1), name, _kind(node)) if slash else node["name"]


def layers_data(nodes: Sequence[Json]) -> list[Json]:
    """Returns the blocks of `fold_nodes` for JSON. Nodes that only compute sizes are in none.

    Keys: `first` and `last`, patterns of the names of the first and last node of each layer;
    `nodes`, their number in a layer; and `count`, the number of layers.
    """
    others, _ = without_sizes(nodes)
    return [
        {
            "first": common_name([others[i]["name"] for i in block.places(0)]),
            "last": common_name([others[i]["name"] for i in block.places(block.size - 1)]),
            "nodes": block.size,
            "count": block.count,
        }
        for block in fold_nodes(others)
    ]


def matching_nodes(nodes: Sequence[Json], patterns: Sequence[str]) -> list[Json]:
    """Returns the nodes whose name one of the patterns matches (as in `fnmatch`).

    Raises:
        DirectoryError: A pattern matches none.
    """
    names = [node["name"] for node in nodes]
    for pattern in patterns:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            raise DirectoryError(f"--node {pattern}: matches no node{nearest(pattern, names)}")
    return [n for n in nodes if any(fnmatchcase(n["name"], p) for p in patterns)]


def fold_rows(
    rows: Iterable[T], names: Callable[[T], Sequence[str]], facts: Callable[[T], Hashable]
) -> list[list[T]]:
    """Returns rows in groups of rows that differ only in the numbers of their names.

    Groups are in the order of their first row.

    Args:
        rows: The rows.
        names: The names in a row.
        facts: All else of a row.
    """
    groups: dict[Hashable, list[T]] = {}
    for row in rows:
        key = tuple([_NUMBER.sub("#", name) for name in names(row)]), facts(row)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def common_name(names: Sequence[str]) -> str:
    """Returns a pattern for names that differ only in numbers: `/layer*/MatMul`.

    Names that differ in more have a pattern of what they, or their parts, begin and end with.
    """
    parts = [_NUMBER.split(name) for name in dict.fromkeys(names)]
    first = parts[0]
    if len(parts) == 1:
        return names[0]
    modules = [name.split("/") for name in names]
    if len(modules[0]) > 1 and len({*map(len, modules)}) == 1:
        return "/".join(common_name(column) for column in zip(*modules, strict=True))
    if all(p[::2] == first[::2] for p in parts):
        return "".join(
            text if all(p[i] == text for p in parts) else "*" for i, text in enumerate(first)
        )
    begin = common_beginning(names)
    end = common_beginning([name[len(begin) :][::-1] for name in names])[::-1]
    return f"{begin}*{end}"


def common_beginning(names: Sequence[str]) -> str:
    """Returns what all names begin with."""
    low, high = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:same]


def _alike(nodes: Sequence[Json], block: FoldedNodes, start: int) -> bool:
    """Whether the layer that begins at `start` is like the layers of a block."""
    return all(_kind(nodes[block.start + i]) == _kind(nodes[start + i]) for i in range(block.size))


def _kind(node: Json) -> Hashable:
    """Returns what of a node is shown, without names."""

    def operand(item: Json) -> Hashable:
        after = item.get("resharded")
        return (
            bool(item["name"]), str(item["shape"]), str(item["local_shape"]), item["sharding"],
            str(item["partial"]), None if after is None else operand(after),
        )  # fmt: skip

    if "factors" in node:  # a node of a model that has not been sharded
        reason = _NUMBER.sub("#", node["reason"].replace(node["name"], ""))
        count = len(node["inputs"]), len(node["operands"])
        return node["op_type"], node["rule"], str(node["factors"]), count, reason
    shown = tuple([operand(item) for kind in ("inputs", "outputs") for item in node[kind]])
    return node["op_type"], node["stage"], node["pinned"], len(node["inputs"]), shown


def _spans(nodes: Sequence[Json]) -> Iterator[tuple[int, int]]:
    """Returns the numbers of the node that makes a value and of each node that reads it."""

    def names(items: Sequence[Json | str]) -> list[str]:
        return [item if isinstance(item, str) else item["name"] for item in items]

    made = {name: i for i, node in enumerate(nodes) for name in names(node["outputs"])}
    for reader, node in enumerate(nodes):
        for name in names(node["inputs"]):
            if made.get(name, reader) < reader:
                yield made[name], reader

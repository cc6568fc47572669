"""Finds the layers of a network: sequences of nodes that repeat one after another.

Exported networks often compute the sizes, masks and positions that all layers share within the
first layer. So layers are searched for among the other nodes, which are the same in each layer; see
`carriers`.

Two nodes are alike if their operators and the element types and shapes of their operands and
results are equal. Repetitions are found by comparing the row of nodes with itself, shifted by each
possible length of a layer.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.graph.body_captures import read_by
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.operand_roles import reads_elements
from onnxpar.ops.registry import Registry

SMALLEST = 8
"""The least number of nodes of a layer, so that short repetitions do not count."""

Numbers = NDArray[np.int64]
Row = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Layer:
    """Nodes `[start, stop)` of a row."""

    start: int
    stop: int


def carriers(nodes: Iterable[ir.Node], registry: Registry) -> list[ir.Node]:
    """Returns the nodes whose results depend on elements of a graph input and on a weight.

    A position bias, which depends on a weight and only on the length of the input, is not one. A
    weight is an initializer of a floating type that is not a scalar.

    Args:
        nodes: Nodes in topological order, with all that they read from one another.
        registry: The table of operators.
    """
    varying: set[ir.Value] = set()
    weighed: set[ir.Value] = set()
    found = []
    for node in nodes:
        read = read_by(node)
        varies = reads_elements(node, registry) and any(
            v.is_graph_input() or v in varying for v in read
        )
        weighs = any(_is_weight(v) or v in weighed for v in read)
        if varies:
            varying.update(node.outputs)
        if weighs:
            weighed.update(node.outputs)
        if varies and weighs:
            found.append(node)
    return found


def _is_weight(value: ir.Value) -> bool:
    real = value.dtype is not None and value.dtype.is_floating_point()
    return value.is_initializer() and real and bool(len(value.shape or ()))


def find_layers(nodes: Sequence[ir.Node], env: ShapeEnv) -> list[Layer]:
    """Returns the layers of a forward pass, in order; none if nothing repeats.

    The repetition that covers the most nodes is taken first, then the nodes before and after it are
    searched in the same way. Layers begin where the fewest values are read across the border.

    Args:
        nodes: Nodes in topological order, best those of `carriers`.
        env: Their shapes.
    """
    return find_repetitions([_kind(node, env) for node in nodes], spans(nodes))


def find_repetitions(
    kinds: Sequence[Hashable],
    spans: Iterable[tuple[int, int]],
    smallest: int = SMALLEST,
) -> list[Layer]:
    """Returns the layers of any row of items, in order; none if nothing repeats.

    Args:
        kinds: For each item, what is equal in items that are alike.
        spans: For each value and each item that reads it, the numbers of the item that makes it
            and of the one that reads it.
        smallest: The least number of items of a layer.
    """
    known: dict[Hashable, int] = {}
    numbers = [known.setdefault(kind, len(known)) for kind in kinds]
    # All lengths of a layer are tried, in time quadratic in the number of items: small types are
    # compared several times as fast.
    row = np.array(numbers, np.min_scalar_type(len(known)))
    edges = np.array([*spans], np.int64).reshape(-1, 2)
    return [Layer(a, b) for a, b in _find(row, edges, 0, smallest)]


def repetitions(layers: Iterable[Layer]) -> list[range]:
    """Returns layers that follow one another as ranges of the numbers of their first items.

    A range has the length of a layer as its step, and its stop is that of the last layer.
    """
    found: list[range] = []
    for layer in layers:
        size = layer.stop - layer.start
        last = found[-1] if found else None
        if last is not None and (last.step, last.stop) == (size, layer.start):
            found[-1] = range(last.start, layer.stop, size)
        else:
            found.append(range(layer.start, layer.stop, size))
    return found


def _kind(node: ir.Node, env: ShapeEnv) -> Hashable:
    def facts(value: ir.Value | None) -> object:
        return None if value is None else (value.dtype, env.shapes.get(value.name or ""))

    operands = tuple(map(facts, node.inputs))
    return node.domain, node.op_type, operands, tuple(map(facts, node.outputs))


def spans(nodes: Sequence[ir.Node]) -> Iterator[tuple[int, int]]:
    """Yields the places of the maker and of each reader of the values that nodes exchange."""
    number = {id(node): i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        for value in node.outputs:
            for user in value.consumers():
                if number.get(id(user), i) > i:
                    yield i, number[id(user)]


def _find(row: Row, spans: Numbers, offset: int, smallest: int) -> list[tuple[int, int]]:
    best = _longest(row, smallest)
    if best is None:
        return []
    start, period, length = best
    crossing = _crossing(spans, offset + len(row), period)[offset:]
    # The layers may begin anywhere in the first period, even if that costs one layer. What is read
    # across a border is counted in the middle: the first layer also reads what all layers share.
    places, middle = range(start, start + period), length // period // 2 * period
    count = [(start + length - at) // period for at in places]
    first = min(places, key=lambda at: (crossing[at + middle], -count[at - start], at))
    end = first + count[first - start] * period
    inner = [(offset + at, offset + at + period) for at in range(first, end, period)]
    return [
        *_find(row[:first], spans, offset, smallest),
        *inner,
        *_find(row[end:], spans, offset + end, smallest),
    ]


def _crossing(spans: Numbers, items: int, period: int) -> Numbers:
    """Returns for each item how many values of earlier items it or later items read.

    Readers that are further away than the length of a layer do not count: what all layers share,
    and what a backward pass reads of the forward pass, says nothing about where a layer begins.
    """
    near = spans[(spans[:, 1] - spans[:, 0] <= period) & (spans[:, 0] < items)]
    last = np.arange(items)
    np.maximum.at(last, near[:, 0], np.minimum(near[:, 1], items))
    change = np.zeros(items + 2, np.int64)
    change[1 : items + 1] += 1
    np.add.at(change, last + 1, -1)
    return np.cumsum(change)[:items]


def _longest(row: Row, smallest: int) -> tuple[int, int, int] | None:
    """Start, period and length of the repetition that covers the most nodes."""
    # The shortest period wins: two layers are not one layer.
    best: tuple[int, int, int] | None = None
    covered = 0
    for period in range(smallest, len(row) // 2 + 1):
        alike = row[:-period] == row[period:]
        # At least two layers, and more than the best repetition covers.
        if np.count_nonzero(alike) < max(period, covered + 1 - period):
            continue
        alike = np.concatenate(([False], alike, [False]))
        edges = np.flatnonzero(alike[1:] != alike[:-1])
        begins, lengths = edges[::2], edges[1::2] - edges[::2]
        at = int(lengths.argmax())
        length = int(lengths[at]) + period
        repeated = length // period * period
        if length >= 2 * period and repeated > covered:
            best, covered = (int(begins[at]), period, length), repeated
    return best

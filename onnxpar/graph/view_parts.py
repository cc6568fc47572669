"""The parts of a dim that views separate: the columns of a projection may be (heads, size).

Walks the graph backwards. If a Reshape splits a dim into (heads, size), or a Split into (3, width),
then every value before it, up to the weight, has these parts too. So a sharding of the weight can
be chosen that the later views keep. In the other direction, rows after a view that merged them are
(batch, positions); see `merged`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir

from onnxpar.core.rule import REPLICATED, Operand, OpRule
from onnxpar.core.symbols import Dim, SymbolTable, exact_div
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import factor_sizes

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A part of a dim: its size, and whether the operators that use it allow sharding it."""

    size: Dim
    splittable: bool = True


Parts = tuple[Part, ...]


def structure(
    nodes: Sequence[ir.Node],
    rules: Mapping[str, OpRule],
    views: Mapping[str, NodeView],
    table: SymbolTable,
) -> dict[str, tuple[Parts, ...]]:
    """Returns for each value, by name, the parts of each of its dims, major first."""
    found: dict[str, tuple[Parts, ...]] = {}
    for node in reversed(nodes):
        rule, view = rules[node.name or ""], views[node.name or ""]
        if all(o.mode for o in rule.inputs) or all(o.mode for o in rule.outputs):
            continue
        outs = zip(rule.outputs, node.outputs, strict=True)
        factors = _of_factors(rule, view, outs, found, table)
        for index, operand in enumerate(rule.inputs):
            value = node.inputs[index] if index < len(node.inputs) else None
            if operand.mode or value is None or value.name is None:
                continue
            dims = tuple(
                (Part(size),)
                if rule.scaled.intersection(names)
                else tuple(p for name in names for p in factors[name]) or (Part(size),)
                for names, size in zip(operand.dims, view.shape(index), strict=True)
            )
            known = found.get(value.name)
            found[value.name] = dims if known is None else tuple(map(_finer, known, dims))
    return found


def merged(
    nodes: Sequence[ir.Node],
    rules: Mapping[str, OpRule],
    views: Mapping[str, NodeView],
    table: SymbolTable,
    found: Mapping[str, tuple[Parts, ...]],
) -> dict[str, tuple[Parts, ...]]:
    """Returns `structure`, and for undivided symbolic dims the parts from which they were merged.

    A view keeps a sharding of the leading part at all sizes. It keeps a sharding of the merged dim
    only if the number of shards is proved to divide that part.
    """
    finer = dict(found)
    for node in nodes:
        rule, view = rules[node.name or ""], views[node.name or ""]
        read = zip(rule.inputs, node.inputs, strict=False)
        factors = _of_factors(rule, view, read, finer, table)
        for operand, value in zip(rule.outputs, node.outputs, strict=True):
            dims, shape = finer.get(value.name or ""), view.env.shapes.get(value.name or "")
            if operand.mode or dims is None or shape is None or rule.scaled:
                continue
            finer[value.name or ""] = tuple(
                parts
                if isinstance(size, int)
                else _finer(parts, tuple(p for name in names for p in factors[name]))
                for names, parts, size in zip(operand.dims, dims, shape, strict=True)
            )
    return finer


def _finer(first: Parts, second: Parts) -> Parts:
    return second if len(second) > len(first) else first


def _of_factors(
    rule: OpRule,
    view: NodeView,
    operands: Iterable[tuple[Operand, ir.Value | None]],
    found: Mapping[str, tuple[Parts, ...]],
    table: SymbolTable,
) -> dict[str, Parts]:
    """The parts of each factor, from those of the given operands (the inputs, or the outputs)."""
    sizes = factor_sizes(rule, view)
    factors: dict[str, Parts] = {}
    for operand, value in operands:
        dims = found.get(value.name or "") if value is not None else None
        if dims is None or operand.mode:
            continue
        for names, parts in zip(operand.dims, dims, strict=True):
            for name, mine in _split_parts(names, parts, sizes, table).items():
                factors[name] = _finer(factors.get(name, ()), mine)
    for name in rule.factors:
        if rule.kinds[name] == REPLICATED:
            factors[name] = (Part(sizes[name], False),)
        else:
            factors.setdefault(name, (Part(sizes[name]),))
    return factors


def _split_parts(
    names: tuple[str, ...], parts: Parts, sizes: Mapping[str, Dim], table: SymbolTable
) -> dict[str, Parts]:
    """Divides the parts of a merged dim among its factors, as far as they line up."""
    if len(names) == 1:
        return {names[0]: parts}
    factors: dict[str, Parts] = {}
    left = list(parts)
    for name in names:
        mine = take_parts(left, sizes[name], lambda part: part.size, table)
        if mine is None:
            return factors
        factors[name] = tuple(mine) or (Part(sizes[name]),)
    return factors


def take_parts(
    left: list[T], size: Dim, size_of: Callable[[T], Dim], table: SymbolTable
) -> list[T] | None:
    """Takes the first parts whose product is a size from a list; None if there are no such parts.

    Args:
        left: The parts, major first. Those taken are removed.
        size: The size.
        size_of: Returns the size of a part.
        table: The symbols and their constraints.
    """
    taken = []
    while left and not table.equal(size, 1):
        rest = exact_div(size, size_of(left[0]), table)
        if rest is None:
            break
        taken.append(left.pop(0))
        size = rest
    return taken if table.equal(size, 1) else None

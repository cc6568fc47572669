"""Ranges that operators require of the elements of graph inputs, for the runtime to check.

If one device holds all classes, onnxruntime refuses a label or token that is out of range. A device
that holds a shard of them cannot tell such an index from an index of another device's shard, and
the result would silently be zero. So the indices that an operator reads are checked before a run,
if they are an input of the model, possibly reshaped or cast.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from onnxpar.core.rule import OpRule
from onnxpar.core.symbols import Dim, symbols_of
from onnxpar.facts.program import Program
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.node_rules import Rules


@dataclass(frozen=True)
class IndexRange:
    """The range that an operator requires of the elements of a graph input.

    Attributes:
        node: Name of the node, the first in the model's order that requires it.
        op_type: Its operator.
        input: Name of the graph input.
        low: Least element.
        high: Greatest element.
        ignored: An element outside the range that is allowed too; None for none.
    """

    node: str
    op_type: str
    input: str
    low: Dim
    high: Dim
    ignored: int | None


def demanded_ranges(program: Program) -> tuple[IndexRange, ...]:
    """Returns the ranges that nodes require of graph inputs, each once."""
    graph, rules = program.graph, program.rules
    inputs = {value.name for value in graph.inputs}
    found: dict[tuple[object, ...], IndexRange] = {}
    for node in graph:
        name = node.name or ""
        definition, view = rules.ops.get(name), rules.views[name]
        if definition is None or definition.indices is None:
            continue
        for index, low, high, ignored in definition.indices(view):
            source = _origin(node.inputs[index], rules)
            if source not in inputs or not _known((low, high), view):
                continue
            demand = IndexRange(name, node.op_type, source or "", low, high, ignored)
            found.setdefault((source, low, high, ignored), demand)
    return tuple(found.values())


def _known(sizes: Iterable[Dim], view: NodeView) -> bool:
    return all(s in view.table for size in sizes for s in symbols_of(size))


def _origin(value: ir.Value | None, rules: Rules) -> str | None:
    """Name of the value from which reshapes, transposes and casts made these integers."""
    while value is not None and (node := value.producer()) is not None:
        rule, view = rules.by_node[node.name or ""], rules.views[node.name or ""]
        if not (_is_integer(value) and _is_integer(node.inputs[0]) and _rearranges(rule, view)):
            return None
        value = node.inputs[0]
    return value.name if value is not None else None


def _is_integer(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_integer()


def _rearranges(rule: OpRule, view: NodeView) -> bool:
    """Whether the output of a node has exactly the elements of its first operand."""
    alone = frozenset((0,))
    data = [index for index, operand in enumerate(rule.inputs) if not operand.mode]
    if data != [0] or len(rule.outputs) != 1:
        return False
    first, last = view.node.inputs[0], view.node.outputs[0]
    if first is not None and first.dtype != last.dtype:
        # A cast between integer types, element by element.
        return rule.inputs[0].dims == rule.outputs[0].dims
    # An operator that commutes with maximum, minimum and sum does not change integers.
    if any((reduction, alone) not in rule.linear for reduction in ("max", "min", "sum")):
        return False
    return view.table.equal(prod(view.shape(0)), prod(view.out_shape()))

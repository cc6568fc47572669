"""Ranges that operators demand of the elements of graph inputs, for the runtime to check.

onnxruntime refuses a label or token that is out of range where one device holds all classes. A
device that holds a part of them cannot tell such an index from one that is another device's, and
would find it nowhere: a silent zero. So what reaches an operator as an index is checked before a
run, where it is an input of the model, perhaps reshaped or cast on its way.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.core.rule import OpRule
from onnxpar.core.symbols import Dim, symbols_of
from onnxpar.facts.program import Program
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.node_rules import Rules


@dataclass(frozen=True)
class IndexRange:
    """What an operator demands of the elements of a graph input.

    Attributes:
        node: Name of the node, the first in the model's order that demands it.
        op_type: Its operator.
        input: Name of the graph input.
        low: Least element.
        high: Greatest element.
        ignored: An element that is admitted as well; None for none.
    """

    node: str
    op_type: str
    input: str
    low: Dim
    high: Dim
    ignored: int | None


def demanded_ranges(program: Program) -> tuple[IndexRange, ...]:
    """Returns the ranges that nodes demand of graph inputs, each once."""
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
    """Name of the value that has the same integers, before reshapes, transposes and casts."""
    while value is not None and (node := value.producer()) is not None:
        rule, view = rules.by_node[node.name or ""], rules.views[node.name or ""]
        if not (_is_integer(value) and _is_integer(node.inputs[0]) and _rearranges(rule, view)):
            return None
        value = node.inputs[0]
    return value.name if value is not None else None


def _is_integer(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_integer()


def _rearranges(rule: OpRule, view: NodeView) -> bool:
    """Whether a node's output has the elements of its first operand, all of them and no others."""
    alone = frozenset((0,))
    data = [index for index, operand in enumerate(rule.inputs) if not operand.mode]
    if data != [0] or len(rule.outputs) != 1:
        return False
    first, last = view.node.inputs[0], view.node.outputs[0]
    if first is not None and first.dtype != last.dtype:
        # From integers of one width to those of another, element by element: a cast.
        return rule.inputs[0].dims == rule.outputs[0].dims
    # What commutes with maximum, minimum and sum changes no integer.
    if any((reduction, alone) not in rule.linear for reduction in ("max", "min", "sum")):
        return False
    before: Dim = 1
    after: Dim = 1
    for size in view.shape(0):
        before = before * size
    for size in view.out_shape():
        after = after * size
    return view.table.equal(before, after)

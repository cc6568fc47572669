"""Sequences and optional values, which are folded away if lengths and positions are constant.

Exporters use a sequence as a list that they take apart at once: SplitToSequence, then SequenceAt at
constant positions. Such a list is known when the model is normalised. It becomes a Split or Concat,
which is sharded and differentiated like any other. A list whose length or positions depend on data
(one that a loop extends, or an input of the graph) stays, and is replicated.
"""

import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxpar.core.rule import OpRule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.operator import NOT_DIFFERENTIABLE, Missing, OpDef
from onnxpar.ops.registry import Registry
from onnxpar.ops.sequence.known_values import KnownValues


def fold_sequences(model: ir.Model, registry: Registry) -> bool:
    """Replaces nodes that read known sequences and optional values. The model is changed.

    Shapes of new nodes are unknown, so they must be inferred again afterwards.

    Args:
        model: The model, after shape inference.
        registry: The table of operators.

    Returns:
        Whether anything was replaced.

    Raises:
        NodeError: A constant position is outside its sequence.
    """
    known = KnownValues(model.graph)
    _fold(known, model.graph, registry)
    if known.lists or known.optional or known.changed:
        common.RemoveUnusedNodesPass()(model)
    return known.changed


def _fold(known: KnownValues, graph: ir.Graph, registry: Registry) -> None:
    for node in list(graph):
        definition = registry.of(node)
        if definition is not None and definition.sequence is not None:
            definition.sequence(known, node)
            continue
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                _fold(known, attribute.as_graph(), registry)


# -- sequences that stay ---------------------------------------------------------------------------


def sequence_rule(view: NodeView) -> OpRule:
    """Folded into Split, Concat and others if length and positions are known; else replicated."""
    raise view.fail("the length of its sequence, or a position, is unknown before the model runs")


def optional_rule(view: NodeView) -> OpRule:
    """Folded if it is known whether the value is present; else replicated."""
    raise view.fail("whether the value is present is unknown before the model runs")


_UNKNOWN = Missing("no gradient for a sequence of unknown length or positions")
_UNKNOWN_VALUE = Missing("no gradient for a value that may be absent")

DEFS = tuple(
    OpDef("", name, since, rule, gradient=gradient, sequence=fold)
    for name, since, rule, gradient, fold in (
        ("SequenceEmpty", 11, sequence_rule, NOT_DIFFERENTIABLE, KnownValues.empty),
        ("SequenceLength", 11, sequence_rule, NOT_DIFFERENTIABLE, KnownValues.length),
        ("SplitToSequence", 11, sequence_rule, _UNKNOWN, KnownValues.split),
        ("SequenceConstruct", 11, sequence_rule, _UNKNOWN, KnownValues.construct),
        ("SequenceInsert", 11, sequence_rule, _UNKNOWN, KnownValues.insert),
        ("SequenceErase", 11, sequence_rule, _UNKNOWN, KnownValues.erase),
        ("SequenceAt", 11, sequence_rule, _UNKNOWN, KnownValues.at),
        ("ConcatFromSequence", 11, sequence_rule, _UNKNOWN, KnownValues.concat),
        ("SequenceMap", 17, sequence_rule, _UNKNOWN, KnownValues.map),
        ("Optional", 15, optional_rule, _UNKNOWN_VALUE, KnownValues.wrap),
        ("OptionalGetElement", 15, optional_rule, _UNKNOWN_VALUE, KnownValues.element),
        ("OptionalHasElement", 15, optional_rule, NOT_DIFFERENTIABLE, KnownValues.presence),
    )
)

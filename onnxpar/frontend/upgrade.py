"""Brings a model to one opset: each node of an older opset is rewritten for `OPSET`.

The record of an operator says how its nodes are rewritten (`OpDef.upgrades`); other nodes have the
same meaning in the newer opset. Design note 0025 explains the choice of this opset.
"""

from collections.abc import Mapping
from contextlib import suppress

import onnx_ir as ir
from onnx_shape_inference import OpUsageError, ShapeInferenceError

from onnxpar.frontend.quiet import quiet
from onnxpar.graph.names import Names, names_of
from onnxpar.ops.inference import inference
from onnxpar.ops.old_node import OPSET, OldNode, Upgrade
from onnxpar.ops.registry import Registry


def upgrade_model(model: ir.Model, opset: int, registry: Registry) -> int:
    """Brings a model without functions to `OPSET` and returns its new opset.

    Args:
        model: The model; it is changed.
        opset: Version of the default domain.
        registry: The operators.

    Raises:
        ModelError: A node has no equal in the newer opset.
    """
    if opset >= OPSET:
        return opset
    nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
    pending = [u for node in nodes for u in _due(node, opset, OPSET, registry).values()]
    known = _known_shapes(model, registry) if any(u.by_shapes for u in pending) else {}
    upgrade_graph(model.graph, opset, OPSET, registry, known)
    model.opset_imports.pop("ai.onnx", None)
    model.opset_imports[""] = OPSET
    return OPSET


def upgrade_graph(
    graph: ir.Graph,
    given: int,
    wanted: int,
    registry: Registry,
    known: Mapping[ir.Value, ir.Shape],
) -> None:
    """Rewrites the nodes of a graph of the opset `given` for the opset `wanted`.

    Args:
        graph: The graph; it is changed, and its bodies too.
        given: Its version of the default domain.
        wanted: A newer version.
        registry: The operators.
        known: Known shapes of values.

    Raises:
        ModelError: A node has no equal in the newer opset.
    """
    names: Names | None = None
    for node in list(ir.traversal.RecursiveGraphIterator(graph)):
        version = given
        while due := _due(node, version, wanted, registry):
            version = min(due)
            names = names or names_of(graph)
            due[version].write(OldNode(node, known, names.fresh))


def _due(node: ir.Node, given: int, wanted: int, registry: Registry) -> Mapping[int, Upgrade]:
    """The upgrades between two opsets, by version."""
    if node.domain not in ("", "ai.onnx"):
        return {}
    found = registry.upgrades(node.op_type)
    return {version: upgrade for version, upgrade in found.items() if given < version <= wanted}


def _known_shapes(model: ir.Model, registry: Registry) -> dict[ir.Value, ir.Shape]:
    """The inferred shapes of all values; the model keeps its declared shapes, and gets types."""
    values = [v for n in ir.traversal.RecursiveGraphIterator(model.graph) for v in n.outputs]
    declared = [(v, v.shape, dict(v.metadata_props)) for v in values]
    try:
        # Errors are reported when the shapes are inferred again, after the upgrade.
        with (
            quiet("onnx_shape_inference"),
            suppress(ShapeInferenceError, OpUsageError, ValueError),
        ):
            inference(registry).infer_shapes(model)
        return {v: v.shape for v in values if v.shape is not None}
    finally:
        for value, shape, metadata in declared:
            value.shape = shape
            value.metadata_props.clear()
            value.metadata_props.update(metadata)

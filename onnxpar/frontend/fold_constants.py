"""Computes nodes whose operands are constant, once, when a model is read.

`torch.onnx.export(optimize=False)` leaves ranges, casts and shapes of constants in the graph, whose
sizes are known only once they are computed. Their results become initializers; a result that only
such nodes read is dropped. Values that may be trained are not folded: the floating-point
initializers of the file stay operands of the nodes that read them, and so do values computed from
them. A result is not a parameter: the file has no tensor of that name.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.graph.new_nodes import constant
from onnxpar.ops.registry import Registry
from onnxpar.ops.sizes.constant_folding import FOLD_BYTES, fold_node, folding_of, reads

Array = NDArray[Any]


def fold_constants(
    model: ir.Model, opset: int, kept: Collection[ir.Value], registry: Registry
) -> bool:
    """Replaces nodes whose operands are constant by their results. The model is changed.

    Nodes in bodies of control flow stay, and so do nodes that compute an output of the model.

    Args:
        model: The model, its nodes in topological order and its constants initializers.
        opset: Version of the default domain.
        kept: Initializers that may be trained.
        registry: The table of operators.

    Returns:
        Whether anything was replaced.
    """
    graph = model.graph
    results = set(graph.outputs)
    known: dict[ir.Value, Array] = {}
    folded: list[ir.Node] = []
    for node in graph:
        folding = folding_of(node, registry)
        if folding is None or any(out in results for out in node.outputs):
            continue
        needed = set(reads(node, folding))
        operands = [
            _constant(value, known, kept) if value is not None and index in needed else None
            for index, value in enumerate(node.inputs)
        ]
        if any(operands[i] is None for i in needed if node.inputs[i] is not None):
            continue
        made = fold_node(node, operands, opset, folding)
        if made is not None:
            known.update(zip(node.outputs, made, strict=True))
            folded.append(node)
    gone = set(folded)
    fresh = []
    for node in folded:
        for out in node.outputs:
            if any(user not in gone for user, _ in out.uses()):
                array = known[out]
                value = constant(out.name or "", np.ascontiguousarray(array).reshape(array.shape))
                out.replace_all_uses_with(value)
                fresh.append(value)
    graph.remove(reversed(folded), safe=True)
    for value in fresh:
        graph.register_initializer(value)
    return bool(folded)


def _constant(
    value: ir.Value, known: dict[ir.Value, Array], kept: Collection[ir.Value]
) -> Array | None:
    """The elements of a small constant that cannot be trained, else None."""
    if value in known:
        return known[value]
    tensor = value.const_value
    if not value.is_initializer() or tensor is None or tensor.nbytes > FOLD_BYTES:
        return None
    if value in kept or tensor.dtype == ir.DataType.STRING:
        return None
    return np.asarray(tensor.numpy())

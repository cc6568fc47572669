"""A training graph that adds up the gradients of micro-batches in the memory of the gradients.

The graph in the file has its gradients as outputs, and their sums over micro-batches as inputs.
onnxruntime holds all outputs of a run until it ends, so a step would need memory for both.
Therefore the graph is changed before it is loaded. If steps have several micro-batches, the
gradients of one micro-batch are values inside the graph. Their memory is free again once they have
been added to the sums, and the sums are in the memory of the gradients. If steps have one
micro-batch, nothing is added up.
"""

from collections.abc import Callable
from typing import Any

import onnx

from onnxpar_runtime.exposed_graph import DOMAIN

_BEFORE = 2
"""Operands of a node before the tensors: its token, and what it does."""


def add_up(graph: onnx.GraphProto, *, several: bool) -> None:
    """Changes a training graph for steps of several micro-batches, or of one.

    Args:
        graph: The graph.
        several: Whether steps have several micro-batches.
    """
    adding = [node for node in graph.node if _is(node, "Accumulate")]
    if several:
        sums: dict[str, str] = {}
        for node in adding:
            tensors = node.input[_BEFORE:]
            half = len(tensors) // 2
            sums.update(zip(tensors[:half], tensors[half:], strict=True))
        _keep(graph.output, lambda value: value.name not in sums)
        if not graph.output:
            # onnxruntime runs nothing without an output.
            token = onnx.helper.make_tensor_value_info(
                adding[-1].output[0], onnx.TensorProto.UINT8, [1]
            )
            graph.output.append(token)
        for node in graph.node:
            if _is(node, "StartAhead"):
                node.input[:] = [sums.get(name, name) for name in node.input]
        return
    # The nodes that wait for one that is removed wait for what it waits for.
    before = {node.output[0]: node.input[0] for node in adding}
    unread = {name for node in adding for name in node.input}
    _keep(graph.node, lambda node: not _is(node, "Accumulate"))
    for node in graph.node:
        for index, name in enumerate(node.input):
            while name in before:
                name = node.input[index] = before[name]
            unread.discard(name)
    _keep(graph.input, lambda value: value.name not in unread)


def _is(node: onnx.NodeProto, operator: str) -> bool:
    return node.domain == DOMAIN and node.op_type == operator


def _keep(items: Any, wanted: Callable[[Any], bool]) -> None:
    """Keeps the items of a repeated field that are wanted."""
    kept = [item for item in items if wanted(item)]
    del items[:]
    items.extend(kept)

"""The gradient of Dropout: the cotangents of kept elements, scaled like these."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.ops.grad_node import GradNode


def drops(node: ir.Node) -> bool:
    """Whether a Dropout node may drop elements: its training mode is true, or not constant."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is None:
        return False
    return mode.const_value is None or bool(mode.const_value.numpy())


def dropout_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives dx = mask · dy / (1 - ratio); the cotangent itself if nothing is dropped."""
    dy, view = node.cotangent(), node.view
    if not drops(view.node):
        return [dy]
    mask = node.further_output(1, ir.DataType.BOOL, node.shape(dy))
    one = node.number(1.0, dy)
    ratio = node.builder.cast(node.input(1), dy.dtype) if view.has(1) else node.number(0.5, dy)
    if view.has(2) and view.const(2) is None:
        ratio = node.op("Where", node.input(2), ratio, node.number(0, dy), dtype=dy.dtype, shape=[])
    kept = node.op("Div", dy, node.op("Sub", one, ratio, shape=[]))
    return [
        node.op("Where", mask, kept, node.number(0.0, dy), dtype=dy.dtype, shape=node.shape(dy))
    ]

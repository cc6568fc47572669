"""The gradient of Dropout: what was kept passes, scaled as it was."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.ops.grad_node import GradNode


def drops(node: ir.Node) -> bool:
    """Whether a Dropout node may drop anything: training is asked for, or nobody knows."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is None:
        return False
    return mode.const_value is None or bool(mode.const_value.numpy())


def dropout_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Dx = mask · dy / (1 - ratio); the cotangent itself where nothing is dropped."""
    dy, view = node.cotangent(), node.view
    if not drops(view.node):
        return [dy]
    assert dy.dtype is not None
    mask = node.further_output(1, ir.DataType.BOOL, node.shape(dy))
    one = node.number(1.0, dy)
    ratio: ir.Value = node.number(0.5, dy)
    if view.has(1):
        ratio = node.builder.cast(node.input(1), dy.dtype)
    if view.has(2) and view.const(2) is None:
        zero = node.builder.const(np.array(0), dy.dtype)
        ratio = node.op("Where", node.input(2), ratio, zero, dtype=dy.dtype, shape=[])
    kept = node.op("Div", dy, node.op("Sub", one, ratio, shape=[]))
    return [
        node.op("Where", mask, kept, node.number(0.0, dy), dtype=dy.dtype, shape=node.shape(dy))
    ]

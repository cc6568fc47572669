"""The axis of running sums and products, and the gradient of the running product."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.graph.node_view import NodeView
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.local_helpers import BOOL, normal_axis


def running_axis(view: NodeView) -> int:
    """Returns the axis of a CumSum or CumProd, counted from the front."""
    return normal_axis(view, (view.ints(1) or (0,))[0], len(view.shape(0)))


def cumprod_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """CumProd: dx_i = Π_{k<i} x_k · Σ_{j≥i} dy_j Π_{i<k≤j} x_k.

    It does not divide, so zeros are no exception. The price is that the products after i are n²
    numbers for a row of n elements.
    """
    x, dy, view = node.input(0), node.cotangent(), node.view
    shape = node.shape(x)
    axis = running_axis(view)
    reverse, exclusive = int(view.attr("reverse", 0)), int(view.attr("exclusive", 0))
    last = len(shape) - 1
    order = [*(d for d in range(last + 1) if d != axis), axis]
    rows, slopes = x, dy
    if axis != last:
        rows, slopes = (
            node.op("Transpose", v, shape=[shape[d] for d in order], perm=order) for v in (x, dy)
        )
    long = node.shape(rows)
    size = long[-1]
    # Row i, column k: x_k if k is after i, else 1; a reversed product runs below the diagonal.
    square = [size, size]
    ones = node.op("Expand", node.number(1, x), node.builder.sizes(square), shape=square)
    step = node.builder.const(np.array(-1 if reverse else 1))
    upper = int(not reverse)
    behind = node.op("Trilu", ones, step, upper=upper)
    tall = [*long[:-1], size, size]
    wide = node.builder.unsqueeze(rows, [last])
    behind_x = node.op(
        "Where", _true(node, behind), wide, node.number(1, x), dtype=x.dtype, shape=tall
    )
    flags: dict[str, Any] = {"reverse": reverse, "exclusive": exclusive}
    products = node.op("CumProd", behind_x, node.builder.const(np.array(last + 1)), **flags)
    # In an exclusive product y_i does not depend on x_i.
    from_i = behind if exclusive else node.op("Trilu", ones, upper=upper)
    spread = node.op("Mul", node.builder.unsqueeze(slopes, [last]), from_i, shape=tall)
    total = node.builder.reduce("ReduceSum", node.op("Mul", spread, products), [last + 1])
    before = node.op(
        "CumProd", rows, node.builder.const(np.array(last)), reverse=reverse, exclusive=1
    )
    dx = node.op("Mul", before, total)
    if axis != last:
        back = [order.index(d) for d in range(last + 1)]
        dx = node.op("Transpose", dx, shape=shape, perm=back)
    return [dx]


def _true(node: GradNode, mask: ir.Value) -> ir.Value:
    return node.op("Cast", mask, dtype=BOOL, to=int(BOOL))

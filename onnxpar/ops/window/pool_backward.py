"""The gradients of pools as operators of the undivided graph, and their local forms.

`MaxPoolGrad(dy, x)` finds the maxima again instead of keeping their indices: the forward pool is
faster without indices, which need twice the memory of its results. `SumPoolGrad(dy)` adds to each
element the cotangents of the results that read it, divided by their counts if `mean` is 1.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from onnxpar.core.mesh import Atoms
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN, INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import Missing, OpDef
from onnxpar.ops.window.geometry import (
    Spatial,
    kernel_of,
    spatial_dims,
    split_dims,
    unsharded_padding,
    words,
)
from onnxpar.ops.window.halo import Covering, DimSplit, skipped, window
from onnxpar.ops.window.pool_counts import divided_by_counts
from onnxpar.ops.window.pool_gradient import MAX_POOL_GRAD, SUM_POOL_GRAD
from onnxpar.ops.window.transposed import kept, spread

_ITSELF = Missing("it is already a gradient")


def _dims(view: NodeView) -> tuple[Spatial, ...]:
    return spatial_dims(view, kernel_of(view, None), view.out_shape()[2:], view.shape(0)[2:])


def max_pool_grad_rule(view: NodeView) -> OpRule:
    """`N C y x, N C y x -> N C y x; scaled: y x`, from the results' cotangent and the image."""
    space = words(_dims(view))
    text = f"N C {space.results}, N C {space.image} -> N C {space.image}"
    return parse_rule(f"{text}{space.clauses(kernel=False)}; linear: sum 0")


def max_pool_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """Finds the maxima of all windows that overlap the device's block and adds their cotangents."""
    dims = _dims(node.view)
    split = split_dims(node, dims)
    dy, dy_shape = node.input(0), list(node.in_shape(0))
    x, shape = node.input(1), list(node.in_shape(1))
    # Padding may be NaN, whose maximum has no valid index: it must not add anything.
    for factor in node.plan.factors:
        dy = node.masked(dy, 0, factor, 0, known_zero=node.zero[0])
    begins: dict[int, int | ir.Value] = {}
    for d, atoms in split.items():
        dim = dims[d]
        results = DimSplit(2 + d, atoms, dim.results, dim.size, dim.spreading)
        dy, dy_shape = window(node, dy, dy_shape, results, strict=True)
        cover = Covering(dim.stride, dim.extent, dim.before or 0)
        image = DimSplit(2 + d, atoms, dim.size, dim.size, cover)
        x, shape = window(node, x, shape, image, "lowest")
        begins[d] = skipped(node, image)
    _, index = node.builder.ops(
        "MaxPool",
        [x],
        [(x.dtype, dy_shape), (INT64, dy_shape)],
        {
            "kernel_shape": [d.kernel for d in dims],
            "strides": [d.stride for d in dims],
            "dilations": [d.dilation for d in dims],
            "pads": list(unsharded_padding(dims, split)),
            "ceil_mode": int(node.attr("ceil_mode", 0)),
        },
    )
    count = prod(dy_shape)
    index = node.builder.reshape(index, [count])
    if node.plan.factors:
        # A window that is all padding has a negative index.
        index = node.op("Max", index, node.builder.const([0]), shape=[count])
    size = prod(shape)
    nothing = ir.Tensor(np.zeros(1, (x.dtype or ir.DataType.FLOAT).numpy()), dtype=x.dtype)
    zeros = node.op(
        "ConstantOfShape", node.builder.size(size), dtype=x.dtype, shape=[size], value=nothing
    )
    flat = node.builder.reshape(dy, [count])
    made = node.op("ScatterElements", zeros, index, flat, shape=[size], axis=0, reduction="add")
    made = node.builder.reshape(made, shape)
    for d, start in begins.items():
        own = node.out_shape()[2 + d]
        made = kept(node, made, shape, 2 + d, start, own)
        shape[2 + d] = own
    return (made,)


def sum_pool_grad_rule(view: NodeView) -> OpRule:
    """`N C y x -> N C y x; scaled: y x`, from the results' cotangent."""
    space = words(_dims(view))
    text = f"N C {space.results} -> N C {space.image}{space.clauses(kernel=False)}"
    return parse_rule(f"{text}; linear: sum 0")


def sum_pool_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """A transposed convolution of each channel with ones; an Expand if windows do not overlap."""
    view, dims = node.view, _dims(node.view)
    shape, out = list(node.in_shape(0)), node.out_shape()
    dy, share = node.input(0), 1.0
    if view.attr("mean", 0):
        dy = divided_by_counts(node, dy, shape, dims, all_dims=True)
        share = 1 / prod(d.kernel for d in dims)
    split = split_dims(node, dims)
    if all(_is_tiled(node, dim, split.get(d, ())) for d, dim in enumerate(dims)):
        return (_tiled(node, dy, shape, dims, share),)
    # Batch and channels become one dim: the kernel is the same for all.
    rows, one = shape[0] * shape[1], list(out)
    one[:2] = [rows, 1]
    dy = node.builder.reshape(dy, [rows, 1, *shape[2:]])
    ones = np.full([1, 1, *(d.kernel for d in dims)], share)
    y = spread(node, dims, node.builder.const(ones, dy.dtype), 1, x=dy, out=one)
    return (node.builder.reshape(y, out),)


def _is_tiled(node: LocalNode, dim: Spatial, atoms: Atoms) -> bool:
    """Whether windows cover a dim side by side, also on each device.

    Shards of results and image end at the same windows only if the results are sharded evenly.
    """
    plain = (dim.stride, dim.dilation, dim.before) == (dim.kernel, 1, 0)
    table = node.table
    return (
        plain
        and table.equal(dim.size, dim.results * dim.stride)
        and (not atoms or table.divisible(dim.results, node.mesh.count(atoms)))
    )


def _tiled(
    node: LocalNode, dy: ir.Value, shape: Sequence[Dim], dims: Sequence[Spatial], share: float
) -> ir.Value:
    """Copies each cotangent to all elements of its window."""
    if share != 1:
        scale = node.builder.const(np.array(share), dy.dtype)
        dy = node.op("Mul", dy, scale, shape=shape)
    tall, wide = list(shape[:2]), list(shape[:2])
    for d, dim in enumerate(dims):
        tall += [shape[2 + d], 1]
        wide += [shape[2 + d], dim.kernel]
    dy = node.builder.reshape(dy, tall)
    dy = node.op("Expand", dy, node.builder.sizes(wide), shape=wide)
    return node.builder.reshape(dy, node.out_shape())


DEFS = (
    OpDef(DOMAIN, MAX_POOL_GRAD, 1, max_pool_grad_rule, max_pool_grad_local, gradient=_ITSELF),
    OpDef(DOMAIN, SUM_POOL_GRAD, 1, sum_pool_grad_rule, sum_pool_grad_local, gradient=_ITSELF),
)

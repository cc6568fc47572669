"""The two gradients of a convolution as operators of the global graph, and their local forms.

They are the transposes of the convolution in its image and in its weights, so each is divided
along every dim of the convolution: by images a split of output channels is summed, by weights a
split of batch and of spatial dims. Local forms are of standard operators alone; which ones, and how
fast they are, is in docs/design/0008-convolutions.md.
"""

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import convolves
from onnxpar.ops.operator import Missing, OpDef
from onnxpar.ops.slots import Kernel, KernelCall
from onnxpar.ops.window.channels import BATCH, Channels, channels
from onnxpar.ops.window.conv_gradient import INPUT_GRAD, WEIGHT_GRAD
from onnxpar.ops.window.geometry import Spatial, constant, kernel_of, spatial_dims, windowed, words
from onnxpar.ops.window.transposed import spread

_ITSELF = Missing("it is already a gradient")
FEW_CHANNELS = 16
"""Channels of a group below which the products of all elements of the kernel are one."""


def _input_dims(view: NodeView) -> tuple[Spatial, ...]:
    return spatial_dims(view, kernel_of(view, 1), view.out_shape()[2:], view.shape(0)[2:])


def _input_channels(view: NodeView) -> Channels:
    group = int(view.attr("group", 1))
    return channels(view, view.shape(1)[1] * group, view.shape(1)[0], group)


def input_grad_rule(view: NodeView) -> OpRule:
    """`N (G M) y x, (G M) C j i -> N (G C) y x; sum: M; scaled: y x`."""
    channel, space = _input_channels(view), words(_input_dims(view))
    text = f"{BATCH} {channel.results} {space.results}"
    text += f", {channel.results} {channel.few} {space.kernel}"
    text += f" -> {BATCH} {channel.image} {space.image}{channel.gathered}{space.clauses()}"
    return parse_rule(f"{text}; linear: sum 0, sum 1", channel.sizes)


def input_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """A convolution with turned weights where all strides are 1, else a transposed one."""
    dims = _input_dims(node.view)
    group = int(_input_channels(node.view).local_group(node))
    turned = _turned_dims(node, dims)
    if turned is None:
        return (spread(node, dims, node.input(1), group),)
    image = windowed(node, 0, turned)
    result = node.op(
        "Conv",
        image.x,
        _turned(node, group),
        shape=node.out_shape(),
        kernel_shape=[d.kernel for d in dims],
        dilations=[d.dilation for d in dims],
        pads=list(image.pads),
        group=group,
    )
    return (result,)


def _turned_dims(node: LocalNode, dims: Sequence[Spatial]) -> tuple[Spatial, ...] | None:
    """Geometry of the convolution over the cotangent; None where the gradient is none."""
    found = []
    for dim in dims:
        before = dim.extent - 1 - (dim.before or 0)
        after = constant(dim.size - dim.results + dim.extent - 1 - before, node.table)
        if dim.stride != 1 or before < 0 or after is None or after < 0:
            return None
        found.append(Spatial(dim.kernel, 1, dim.dilation, before, after, dim.results, dim.size))
    return tuple(found)


def _turned(node: LocalNode, group: int) -> ir.Value:
    """Local weights with the two kinds of channels exchanged and the kernel read backwards."""
    w, shape = node.input(1), list(node.in_shape(1))
    kernel = [int(k) for k in shape[2:]]
    many, few = int(shape[0]) // group, int(shape[1])
    turned = [group * few, many, *kernel]
    if few == 1 or many == 1:
        w = node.builder.reshape(w, turned)
    elif group == 1:
        perm = [1, 0, *range(2, len(shape))]
        w = node.op("Transpose", w, shape=turned, perm=perm)
    else:
        w = node.builder.reshape(w, [group, many, few, *kernel])
        perm = [0, 2, 1, *range(3, len(shape) + 1)]
        w = node.op("Transpose", w, shape=[group, few, many, *kernel], perm=perm)
        w = node.builder.reshape(w, turned)
    axes = [2 + d for d, k in enumerate(kernel) if k > 1]
    if not axes:
        return w
    low = np.iinfo(np.int64).min
    bounds = (
        node.builder.const(np.array([value] * len(axes) if value else axes, np.int64))
        for value in (-1, low, 0, -1)
    )
    return node.op("Slice", w, *bounds, shape=turned)


def _weight_dims(view: NodeView) -> tuple[Spatial, ...]:
    return spatial_dims(view, kernel_of(view, None), view.shape(0)[2:], view.shape(1)[2:])


def _weight_channels(view: NodeView) -> Channels:
    return channels(view, view.shape(0)[1], view.shape(1)[1], int(view.attr("group", 1)))


def weight_grad_rule(view: NodeView) -> OpRule:
    """`N (G C) y x, N (G M) y x -> (G M) C j i; sum: N y x; scaled: y x`."""
    channel, space = _weight_channels(view), words(_weight_dims(view))
    text = f"{BATCH} {channel.image} {space.image}, {BATCH} {channel.results} {space.results}"
    text += f" -> {channel.results} {channel.few} {space.kernel}"
    summed = [name for name in space.image.split() if name not in space.whole]
    text += f"; sum: {' '.join([BATCH, *summed])}{space.clauses()}"
    return parse_rule(f"{text}; linear: sum 0, sum 1", channel.sizes)


def weight_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """Of each element of the kernel a product over batch and results.

    With many channels one product after another, with few one product of all, whose operand is the
    image unrolled (im2col).
    """
    dims = _weight_dims(node.view)
    group = int(_weight_channels(node.view).local_group(node))
    image = windowed(node, 0, dims)
    shape, results = list(image.shape), node.in_shape(1)
    few, many = int(shape[1]) // group, int(results[1]) // group
    x = image.x
    if any(image.pads):
        rank = len(dims)
        begins = [0, 0, *image.pads[:rank]]
        ends = [0, 0, *image.pads[rank:]]
        shape = [s + b + e for s, b, e in zip(shape, begins, ends, strict=True)]
        x = node.op("Pad", x, node.builder.const(np.array([*begins, *ends], np.int64)), shape=shape)
    count: Dim = 1
    for size in results[2:]:
        count = count * size
    batch = shape[0]
    groups = [group] if group > 1 else []
    dy = node.builder.reshape(node.input(1), [batch, *groups, many, count])
    rows = [*groups, many]
    places = list(product(*(range(d.kernel) for d in dims)))

    def tap(place: Sequence[int]) -> ir.Value:
        met = _tap(node, x, shape, dims, place, results[2:])
        return node.builder.reshape(met, [batch, *groups, few, count])

    if few < FEW_CHANNELS and len(places) > 1:
        made = [batch, *groups, len(places) * few, count]
        axis = {"axis": len(groups) + 1}
        (taps,) = node.builder.ops("Concat", [tap(p) for p in places], [(x.dtype, made)], axis)
        products = [_summed(node, dy, taps, [batch, *rows], few * len(places))]
    else:
        # Each product follows its slice, so that there is one slice at a time.
        products = [_summed(node, dy, tap(place), [batch, *rows], few) for place in places]
    whole = [1, *rows, few * len(places)]
    y = products[0]
    if len(products) > 1:
        (y,) = node.builder.ops("Concat", products, [(x.dtype, whole)], {"axis": len(whole) - 1})
    if len(places) > 1:
        y = node.builder.reshape(y, [group * many, len(places), few])
        y = node.op("Transpose", y, shape=[group * many, few, len(places)], perm=[0, 2, 1])
    return (node.builder.reshape(y, node.out_shape()),)


def _tap(
    node: LocalNode,
    x: ir.Value,
    shape: Sequence[Dim],
    dims: Sequence[Spatial],
    place: Sequence[int],
    results: Sequence[Dim],
) -> ir.Value:
    """What one element of the kernel meets: a strided slice of the image."""
    starts, ends, axes, steps = [], [], [], []
    for d, (dim, at) in enumerate(zip(dims, place, strict=True)):
        start = at * dim.dilation
        end = start + (results[d] - 1) * dim.stride + 1
        if dim.kernel == 1 and dim.stride == 1 and shape[2 + d] == results[d]:
            continue
        starts.append(start)
        ends.append(end)
        axes.append(2 + d)
        steps.append(dim.stride)
    if not axes:
        return x
    begin, along, step = (node.builder.const(np.array(v, np.int64)) for v in (starts, axes, steps))
    made = [*shape[:2], *results]
    return node.op("Slice", x, begin, node.builder.sizes(ends), along, step, shape=made)


def _summed(
    node: LocalNode, dy: ir.Value, x: ir.Value, rows: Sequence[Dim], columns: Dim
) -> ir.Value:
    """The product of [N, …, M, P] and [N, …, C, P] over P, summed over N, which stays as 1."""
    made = [*rows, columns]
    (y,) = node.builder.ops(
        "FusedMatMul", [dy, x], [(dy.dtype, made)], {"transB": 1}, domain=MICROSOFT
    )
    return y if rows[0] == 1 else node.builder.reduce("ReduceSum", y, [0], keepdims=True)


def _unrolled(call: KernelCall) -> int:
    """A filter's gradient: a padded image, and slices of it that meet the cotangent.

    With few channels all slices lie beside each other before their product, with many there is one
    at a time; a product is summed over the batch afterwards.
    """
    image, cotangent, filters = call.inputs[0], call.inputs[1], call.outputs[0]
    if image is None or cotangent is None or filters is None:
        return 0
    few, taps, batch = filters[1], prod(filters[2:]), image[0]
    rank = len(filters) - 2
    pads = call.attributes.get("pads") or [0] * 2 * rank
    strides = call.attributes.get("strides") or [1] * rank
    padded = [n + pads[d] + pads[d + rank] for d, n in enumerate(image[2:])]
    sliced = taps > 1 or any(s > 1 for s in strides)
    tap = prod(image[:2]) * prod(cotangent[2:]) if sliced else 0
    window = prod(image[:2]) * prod(padded) if any(pads) else 0
    whole = prod(filters)
    if few < FEW_CHANNELS and taps > 1:
        each = whole * (batch + 1 if batch > 1 else 1)
        most = max(window + taps * tap, 2 * taps * tap, taps * tap + each)
    else:
        each = whole // taps * (batch + 1 if batch > 1 else 1)
        most = max(window + tap + whole - whole // taps + each, 2 * whole)
    # The result is there at the end only.
    return max(most - whole, 0) * call.itemsize


DEFS = (
    OpDef(
        DOMAIN,
        INPUT_GRAD,
        1,
        input_grad_rule,
        input_grad_local,
        gradient=_ITSELF,
        cost=convolves(0, 1),
    ),
    OpDef(
        DOMAIN,
        WEIGHT_GRAD,
        1,
        weight_grad_rule,
        weight_grad_local,
        gradient=_ITSELF,
        cost=convolves(1, None),
        memory=Kernel(work=_unrolled, form=True),
    ),
)

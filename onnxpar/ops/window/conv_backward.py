"""The two gradients of a convolution as operators of the undivided graph, and their local forms.

They are the transposes of the convolution in its image and in its weights, so each can be sharded
along every dim of the convolution. The gradient by the image sums over sharded output channels, the
gradient by the weights over a sharded batch and sharded spatial dims. Which operators the local
forms have, and how fast they are, is in docs/design/0008-convolutions.md.
"""

from collections.abc import Sequence
from itertools import product
from math import prod

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.function import Function
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import convolves
from onnxpar.ops.operator import Missing, OpDef, for_ranks
from onnxpar.ops.slots import Kernel, KernelCall
from onnxpar.ops.window.channels import BATCH, Channels, channels
from onnxpar.ops.window.conv import transposed_channels, transposed_rule
from onnxpar.ops.window.conv_gradient import INPUT_GRAD, WEIGHT_GRAD
from onnxpar.ops.window.geometry import Spatial, constant, kernel_of, spatial_dims, windowed, words
from onnxpar.ops.window.transposed import spread

_ITSELF = Missing("it is already a gradient")
FEW_CHANNELS = 16
"""With fewer channels in a group, all elements of the kernel share one product."""

TURNED_WEIGHTS = Function("""
    TurnedWeights <group> (w) => (turned) {
        one = Constant<value = int64[1] {1}>()
        rest = Constant<value = int64[1] {-1}>()
        last = Constant<value = int64[1] {3}>()
        lowest = Constant<value = int64[1] {-9223372036854775808}>()
        rows_shape = Constant<value = int64[3] {0, 0, -1}>()
        group0 = Constant<value_int: int = @group>()
        groups = Reshape(group0, one)
        rows = Reshape(w, rows_shape)
        filter = Shape<start = 1>(rows)
        parts_shape = Concat<axis = 0>(groups, rest, filter)
        parts = Reshape(rows, parts_shape)
        exchanged = Transpose<perm = [0, 2, 1, 3]>(parts)
        reversed = Slice(exchanged, rest, lowest, last, rest)
        many = Shape<start = 2, end = 3>(exchanged)
        kernel = Shape<start = 2>(w)
        shape = Concat<axis = 0>(rest, many, kernel)
        turned = Reshape(reversed, shape)
    }
""")


def _input_dims(view: NodeView) -> tuple[Spatial, ...]:
    return spatial_dims(view, kernel_of(view, 1), view.out_shape()[2:], view.shape(0)[2:])


def input_grad_rule(view: NodeView) -> OpRule:
    """`N (G M) y x, (G M) C j i -> N (G C) y x; sum: M; scaled: y x`."""
    return transposed_rule(view, words(_input_dims(view)))


def input_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """A convolution with turned weights if all strides are 1, else a transposed convolution."""
    dims = _input_dims(node.view)
    group = int(transposed_channels(node.view).local_group(node))
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
    """Geometry of the convolution over the cotangent; None where the gradient is not one."""
    found = []
    for dim in dims:
        before = dim.extent - 1 - (dim.before or 0)
        after = constant(dim.size - dim.results + dim.extent - 1 - before, node.table)
        if dim.stride != 1 or before < 0 or after is None or after < 0:
            return None
        found.append(Spatial(dim.kernel, 1, dim.dilation, before, after, dim.results, dim.size))
    return tuple(found)


def _turned(node: LocalNode, group: int) -> ir.Value:
    """Local weights with input and output channels exchanged and the kernel reversed."""
    shape = list(node.in_shape(1))
    turned = [group * int(shape[1]), int(shape[0]) // group, *shape[2:]]
    if 1 in (shape[1], turned[1]) and prod(shape[2:]) == 1:
        return node.builder.reshape(node.input(1), turned)
    name = TURNED_WEIGHTS.name
    return node.op(name, node.input(1), shape=turned, domain=DOMAIN, group=group)


def _weight_dims(view: NodeView) -> tuple[Spatial, ...]:
    return spatial_dims(view, kernel_of(view, None), view.shape(0)[2:], view.shape(1)[2:])


def _weight_channels(view: NodeView) -> Channels:
    return channels(view, view.shape(0)[1], view.shape(1)[1], int(view.attr("group", 1)))


def weight_grad_rule(view: NodeView) -> OpRule:
    """`N (G C) y x, N (G M) y x -> (G M) C j i; sum: N y x; scaled: y x`."""
    channel, space = _weight_channels(view), words(_weight_dims(view))
    text = f"{BATCH} {channel.image} {space.image}, {BATCH} {channel.results} {space.results}"
    text += f" -> {channel.results} {channel.few} {space.kernel}"
    summed = [name for name in space.image.split() if name not in space.replicated]
    text += f"; sum: {' '.join([BATCH, *summed])}{space.clauses()}"
    return parse_rule(f"{text}; linear: sum 0, sum 1", channel.sizes)


def weight_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """A product over batch and results for each element of the kernel.

    With many channels these are separate products. With few channels they are one product, whose
    operand is the unrolled image (im2col). If channels come first in both operands, a product runs
    over all images; else there is one for each image, and they are summed.
    """
    dims = _weight_dims(node.view)
    group = int(_weight_channels(node.view).local_group(node))
    image = windowed(node, 0, dims)
    shape, results = list(image.shape), node.in_shape(1)
    few, many = int(shape[1]) // group, int(results[1]) // group
    places = list(product(*(range(d.kernel) for d in dims)))
    count, batch = prod(results[2:]), shape[0]
    filters = group * many * few * len(places)
    first = _channels_first(batch, count, group * few, group * many, filters)
    x, dy = image.x, node.input(1)
    if first and len(places) > 1:
        x, shape = _exchanged(node, x, shape)
    if any(image.pads):
        rank = len(dims)
        begins = [0, 0, *image.pads[:rank]]
        ends = [0, 0, *image.pads[rank:]]
        shape = [s + b + e for s, b, e in zip(shape, begins, ends, strict=True)]
        x = node.op("Pad", x, node.builder.const([*begins, *ends]), shape=shape)
    groups = [group] if group > 1 else []
    # The images that have a product each.
    lead = [] if first or batch == 1 else [batch]
    if first:
        dy, _ = _exchanged(node, dy, results)
        count *= batch
    dy = node.builder.reshape(dy, [*lead, *groups, many, count])

    def product_with(taps: ir.Value, columns: Dim) -> ir.Value:
        made = [*lead, *groups, many, columns]
        (y,) = node.builder.ops(
            "FusedMatMul", [dy, taps], [(x.dtype, made)], {"transB": 1}, domain=MICROSOFT
        )
        return node.builder.reduce("ReduceSum", y, [0]) if lead else y

    def tap(place: Sequence[int]) -> ir.Value:
        met = _tap(node, x, shape, dims, place, results[2:])
        if first and len(places) == 1:
            # The slice of a single element is smaller than the image.
            met, _ = _exchanged(node, met, [*shape[:2], *results[2:]])
        return node.builder.reshape(met, [*lead, *groups, few, count])

    if few < FEW_CHANNELS and len(places) > 1:
        made = [*lead, *groups, len(places) * few, count]
        axis = {"axis": len(made) - 2}
        (taps,) = node.builder.ops("Concat", [tap(p) for p in places], [(x.dtype, made)], axis)
        products = [product_with(taps, few * len(places))]
    else:
        # Each product follows its slice, so that memory holds one slice at a time.
        products = [product_with(tap(place), few) for place in places]
    joined = [*groups, many, few * len(places)]
    y = products[0]
    if len(products) > 1:
        (y,) = node.builder.ops("Concat", products, [(x.dtype, joined)], {"axis": len(joined) - 1})
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
    """The elements that one element of the kernel reads: a strided slice of the image."""
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
    begin, along, step = map(node.builder.const, (starts, axes, steps))
    made = [*shape[:2], *results]
    return node.op("Slice", x, begin, node.builder.sizes(ends), along, step, shape=made)


def _channels_first(batch: Dim, count: Dim, image: Dim, results: Dim, filters: Dim) -> bool:
    """Whether to exchange batch and channels in both operands, rather than sum over images.

    Args:
        batch: Number of images.
        count: Number of results in a channel of an image.
        image: Number of channels of the image.
        results: Number of channels of the results.
        filters: Number of elements of the weights.
    """
    # What is copied of an image, and what is summed for it: about the same time for each element.
    copied = count * (image + results)
    return batch != 1 and isinstance(copied, int) and isinstance(filters, int) and copied < filters


def _exchanged(node: LocalNode, x: ir.Value, shape: Sequence[Dim]) -> tuple[ir.Value, list[Dim]]:
    """Exchanges batch and channels; returns the value and its shape."""
    made = [shape[1], shape[0], *shape[2:]]
    perm = [1, 0, *range(2, len(shape))]
    return node.op("Transpose", x, shape=made, perm=perm), made


def _unrolled(call: KernelCall) -> int:
    """The padded image, its slices that are multiplied by the cotangent, and exchanged operands.

    With few channels all slices exist before their product, with many channels one at a time; a
    product for each image is then summed over the batch.
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
    full = prod(filters)
    held, before, each = window, 0, full * (batch + 1 if batch > 1 else 1)
    if _channels_first(batch, prod(cotangent[2:]), image[1], cotangent[1], full):
        # Nothing reads the cotangent after it is exchanged.
        held, before, each = prod(image[:2]) * prod(cotangent[2:]), prod(cotangent), full
        if taps > 1:
            held, before = window or prod(image), max(prod(cotangent), prod(image)) + window
    if few < FEW_CHANNELS and taps > 1:
        most = max(before, held + taps * tap, held - window + 2 * taps * tap, taps * tap + each)
    else:
        each //= taps
        most = max(before, held + tap + full - full // taps + each, 2 * full)
    # The result itself exists only at the end.
    return max(most - full, 0) * call.itemsize


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
    for_ranks(TURNED_WEIGHTS.name, function=TURNED_WEIGHTS),
)

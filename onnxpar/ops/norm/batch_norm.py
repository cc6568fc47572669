"""BatchNormalization (Ioffe & Szegedy, 2015), with statistics over a sharded batch.

In inference form every dim is parallel. In training form the batch and the spatial dims are
special: each device sums its shard, and the sums are all-reduced, one number for each channel.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_helpers import reduced, work_dtype
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.norm.batch_norm_gradient import BATCH_NORM_GRAD, batch_norm_gradient
from onnxpar.ops.norm.old_versions import statistics_of_channels, training_as_attribute
from onnxpar.ops.norm.split_statistics import (
    global_count,
    inverse_deviation,
    masker,
    mean_and_variance,
)
from onnxpar.ops.old_node import Upgrade
from onnxpar.ops.operator import Missing, OpDef
from onnxpar.ops.slots import Roles


def _axes(rank: int) -> tuple[int, ...]:
    """The axes that statistics run over: all except the channels."""
    return (0, *range(2, rank))


def batch_norm_rule(view: NodeView) -> OpRule:
    """`a b c, b, b, b, b -> a b c`; in training form `a` and `c` are special.

    Raises:
        ModelError: There is no dim of channels, or the inference form has statistics as outputs.
    """
    rank = len(view.shape(0))
    if rank < 2:
        raise view.fail(f"expected at least 2 dims (batch and channels), got {rank}")
    names = axis_names(rank)
    dims = " ".join(names)
    outputs = [dims, *["b"] * (len(view.node.outputs) - 1)]
    trains = view.attr("training_mode", 0)
    if len(outputs) > 1 and not trains:
        raise view.fail("expected training_mode=1, because its statistics are outputs")
    text = f"{dims}, b, b, b, b -> {', '.join(outputs)}"
    if trains:
        text += f"; special: {' '.join(names[axis] for axis in _axes(rank))}"
    return parse_rule(text)


def batch_norm_local(node: LocalNode) -> Sequence[ir.Value]:
    """Copies the inference form; always writes the training form in other operators.

    That form works on each of onnxruntime's devices: CUDA has no kernel for the training form,
    and the CPU's kernel overwrites the old statistics with the new ones.
    """
    view = node.view
    if not view.attr("training_mode", 0):
        return node.copy()
    shape, dtype = node.in_shape(0), node.out_dtype()
    wide = work_dtype(dtype)
    channels = [shape[1]]
    axes = _axes(len(shape))
    x = node.builder.cast(node.input(0), wide)
    sizes = [view.shape(0)[axis] for axis in axes]
    _, mean, variance = mean_and_variance(node, x, shape, axes, sizes, masker(node))
    assert mean is not None
    statistics = [node.builder.reshape(value, channels) for value in (mean, variance)]
    scale, bias = (node.builder.cast(node.input(i), wide) for i in (1, 2))
    epsilon = float(view.attr("epsilon", 1e-5))
    y = node.op("BatchNormalization", x, scale, bias, *statistics, shape=shape, epsilon=epsilon)
    outputs = [node.builder.cast(y, dtype)]
    momentum = float(view.attr("momentum", 0.9))
    for index in range(1, len(view.node.outputs)):
        value = statistics[index - 1]
        if momentum:
            old = node.builder.cast(node.input(index + 2), wide)
            kept_share, new_share = (node.builder.const(m, wide) for m in (momentum, 1 - momentum))
            old = node.op("Mul", old, kept_share, shape=channels)
            new = node.op("Mul", value, new_share, shape=channels)
            value = node.op("Add", old, new, shape=channels)
        outputs.append(node.builder.cast(value, node.out_dtype(index)))
    return outputs


# -- the gradient in training form -----------------------------------------------------------------


def batch_norm_grad_rule(view: NodeView) -> OpRule:
    """`a b c, a b c, b, b, b -> a b c, b, b; special: a c`: the sums are all-reduced inside."""
    names = axis_names(len(view.shape(0)))
    dims = " ".join(names)
    outputs = [dims, *("b" if out.name else "." for out in view.node.outputs[1:])]
    special = " ".join(names[axis] for axis in _axes(len(names)))
    return parse_rule(f"{dims}, {dims}, b, b, b -> {', '.join(outputs)}; special: {special}")


def batch_norm_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """Follows `onnxpar.ops.norm.batch_norm_gradient`; one all-reduce carries both sums.

    With n elements in each channel, inverse deviation i and x̂ = (x - mean) i: dbias = Σ dy,
    dscale = Σ dy x̂, dx = scale i (dy - dbias / n - x̂ dscale / n).
    """
    view, shape = node.view, node.in_shape(0)
    wide = work_dtype(node.out_dtype())
    axes = _axes(len(shape))
    kept = reduced(shape, axes)
    mask = masker(node)
    dy, x = (node.builder.cast(node.input(i), wide) for i in (0, 1))
    scale, mean, variance = (
        node.builder.reshape(node.builder.cast(node.input(i), wide), kept) for i in (2, 3, 4)
    )
    count = global_count(node, [view.shape(0)[axis] for axis in axes], wide)
    inverse = inverse_deviation(node, variance, float(view.attr("epsilon", 1e-5)), kept)
    centred = node.op("Sub", x, mean, shape=shape)
    along = node.op("Mul", dy, centred, shape=shape)
    counted = [
        node.builder.reduce("ReduceSum", mask(values, False), axes, keepdims=True)
        for values in (dy, along)
    ]
    total, slope = _summed(node, counted, kept)
    slope = node.op("Mul", slope, inverse, shape=kept)
    step = node.op("Mul", scale, inverse, shape=kept)
    mean_dy = node.op("Div", total, count, shape=kept)
    bend = node.op("Mul", node.op("Div", slope, count, shape=kept), inverse, shape=kept)
    rest = node.op("Sub", dy, mean_dy, shape=shape)
    rest = node.op("Sub", rest, node.op("Mul", centred, bend, shape=shape), shape=shape)
    found = [node.op("Mul", rest, step, shape=shape)]
    found += [node.builder.reshape(value, [shape[1]]) for value in (slope, total)]
    return [node.builder.cast(value, node.out_dtype(index)) for index, value in enumerate(found)]


def _summed(node: LocalNode, parts: Sequence[ir.Value], shape: Sequence[Dim]) -> list[ir.Value]:
    """All-reduces values of one shape, whose first dim is 1, in one collective."""
    atoms = node.split_atoms("special")
    if not atoms:
        return list(parts)
    both = [len(parts), *shape[1:]]
    joined = node.builder.ops("Concat", list(parts), [(parts[0].dtype, both)], {"axis": 0})[0]
    joined = node.all_reduce(joined, atoms)
    return [
        node.op("Gather", joined, node.builder.const([index]), shape=shape, axis=0)
        for index in range(len(parts))
    ]


DEFS = (
    OpDef(
        "",
        "BatchNormalization",
        7,
        batch_norm_rule,
        batch_norm_local,
        gradient=batch_norm_gradient,
        roles=Roles(vectors=(1, 2), statistics=(3, 4)),
        upgrades={9: Upgrade(statistics_of_channels), 14: Upgrade(training_as_attribute)},
    ),
    OpDef(
        DOMAIN,
        BATCH_NORM_GRAD,
        1,
        batch_norm_grad_rule,
        batch_norm_grad_local,
        gradient=Missing("it is already a gradient"),
    ),
)

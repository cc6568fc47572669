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
from onnxpar.ops.function import Function
from onnxpar.ops.local_helpers import work_dtype
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.norm.batch_norm_gradient import BATCH_NORM_GRAD, batch_norm_gradient
from onnxpar.ops.norm.old_versions import statistics_of_channels, training_as_attribute
from onnxpar.ops.norm.split_statistics import (
    global_count,
    inverse_deviation,
    masker,
)
from onnxpar.ops.old_node import Upgrade
from onnxpar.ops.operator import Missing, OpDef, for_ranks
from onnxpar.ops.slots import IN_PLACE, Roles

# A tensor as [N, C, the rest], and a vector of channels that broadcasts to it.
_ROWS = """
    rows = Constant<value = int64[3] {0, 0, -1}>()
    column = Constant<value = int64[2] {-1, 1}>()
    axes = Constant<value = int64[2] {0, 2}>()
    x_rows = Reshape(x, rows)
    middle = Reshape(mean, column)
    centred = Sub(x_rows, middle)
"""

CHANNEL_SQUARE_SUM = Function(f"""
    ChannelSquareSum (x, mean) => (sum) {{
        {_ROWS}
        sum = ReduceSumSquare<keepdims = 0>(centred, axes)
    }}
""")

CHANNEL_SUMS = Function(f"""
    ChannelSums (dy, x, mean) => (total, along) {{
        {_ROWS}
        dy_rows = Reshape(dy, rows)
        part = Mul(dy_rows, centred)
        total = ReduceSum<keepdims = 0>(dy_rows, axes)
        along = ReduceSum<keepdims = 0>(part, axes)
    }}
""")

INPUT_GRAD = Function(f"""
    BatchNormalizationInputGrad (dy, x, scale, mean, inv_std, total, slope, count) => (dx) {{
        {_ROWS}
        dy_rows = Reshape(dy, rows)
        mean_dy = Div(total, count)
        mean_slope = Div(slope, count)
        bend = Mul(mean_slope, inv_std)
        step = Mul(scale, inv_std)
        mean_column = Reshape(mean_dy, column)
        bend_column = Reshape(bend, column)
        step_column = Reshape(step, column)
        part = Sub(dy_rows, mean_column)
        share = Mul(centred, bend_column)
        rest = Sub(part, share)
        dx_rows = Mul(rest, step_column)
        shape = Shape(x)
        dx = Reshape(dx_rows, shape)
    }}
""")


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
    mask, atoms = masker(node), node.split_atoms("special")
    x = node.builder.cast(node.input(0), wide)
    count = global_count(node, [view.shape(0)[axis] for axis in axes], wide)
    counted = mask(x, node.zero[0])
    total = node.all_reduce(node.builder.reduce("ReduceSum", counted, axes), atoms)
    mean = node.op("Div", total, count, shape=channels)
    # Of x - mean: E[x²] - E[x]² loses all digits where the mean is large (Chan, Golub & LeVeque,
    # 1983).
    if all(node.is_even(factor) for factor in node.split_factors("special")):
        squares = node.op(CHANNEL_SQUARE_SUM.name, x, mean, shape=channels, domain=DOMAIN)
    else:
        middle = node.builder.unsqueeze(mean, axes)
        centred = mask(node.op("Sub", x, middle, shape=shape), False)
        squares = node.builder.reduce("ReduceSumSquare", centred, axes)
    variance = node.op("Div", node.all_reduce(squares, atoms), count, shape=channels)
    statistics = [mean, variance]
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
    channels = [shape[1]]
    dy, x, scale, mean, variance = (node.builder.cast(node.input(i), wide) for i in range(5))
    count = global_count(node, [view.shape(0)[axis] for axis in _axes(len(shape))], wide)
    inverse = inverse_deviation(node, variance, float(view.attr("epsilon", 1e-5)), channels)
    mask = masker(node)
    sums = node.builder.ops(
        CHANNEL_SUMS.name,
        [mask(dy, node.zero[0]), mask(x, node.zero[1]), mean],
        [(wide, channels)] * 2,
        domain=DOMAIN,
    )
    total, along = _all_reduced(node, sums, shape[1])
    slope = node.op("Mul", along, inverse, shape=channels)
    vectors = (scale, mean, inverse, total, slope, count)
    dx = node.op(INPUT_GRAD.name, dy, x, *vectors, shape=shape, domain=DOMAIN)
    found = [dx, slope, total]
    for index in (1, 2):
        if not view.node.outputs[index].name:
            # A separate value, since it will lose its name; no node reads it.
            found[index] = node.op("Identity", found[index], shape=channels)
    return [node.builder.cast(value, node.out_dtype(index)) for index, value in enumerate(found)]


def _all_reduced(node: LocalNode, parts: Sequence[ir.Value], size: Dim) -> Sequence[ir.Value]:
    """All-reduces vectors of one size in one collective."""
    atoms = node.split_atoms("special")
    if not atoms:
        return parts
    dtype, count = parts[0].dtype, len(parts)
    (joined,) = node.builder.ops("Concat", list(parts), [(dtype, [count * size])], {"axis": 0})
    joined = node.all_reduce(joined, atoms)
    return node.builder.ops(
        "Split", [joined], [(dtype, [size])] * count, {"axis": 0, "num_outputs": count}
    )


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
    for_ranks(CHANNEL_SQUARE_SUM.name, function=CHANNEL_SQUARE_SUM),
    for_ranks(CHANNEL_SUMS.name, function=CHANNEL_SUMS),
    for_ranks(INPUT_GRAD.name, function=INPUT_GRAD, memory=IN_PLACE),
)

"""Normalisations over single instances, groups of channels, chosen axes, and neighbours."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_helpers import (
    BOOL,
    axis_of,
    copy_or,
    reduced,
    work_dtype,
    written_out,
)
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.norm.group_norm_gradient import (
    MVN_EPSILON,
    group_norm_gradient,
    instance_norm_gradient,
    lp_norm_gradient,
    mean_variance_norm_gradient,
    mvn_axes,
)
from onnxpar.ops.norm.old_versions import affine_of_channels
from onnxpar.ops.norm.split_statistics import (
    masker,
    mean_and_variance,
    normalised,
)
from onnxpar.ops.old_node import Upgrade
from onnxpar.ops.operator import BY_BODY, OpDef
from onnxpar.ops.slots import Roles

# -- InstanceNormalization -------------------------------------------------------------------------


def instance_norm_rule(view: NodeView) -> OpRule:
    """`a b c d, b, b -> a b c d; special: c d` (Ulyanov et al., 2016)."""
    names = axis_names(len(view.shape(0)))
    dims, space = " ".join(names), " ".join(names[2:])
    return parse_rule(f"{dims}, b, b -> {dims}" + (f"; special: {space}" if space else ""))


def instance_norm_local(node: LocalNode) -> Sequence[ir.Value]:
    """Statistics are all-reduced, two numbers for each channel of an instance."""
    shape, dtype = node.in_shape(0), node.out_dtype()
    wide = work_dtype(dtype)
    axes = range(2, len(shape))
    x = node.builder.cast(node.input(0), wide)
    sizes = node.view.shape(0)[2:]
    y = normalised(node, x, shape, axes, sizes, float(node.attr("epsilon", 1e-5))).y
    aside = [1, shape[1], *[1] * len(axes)]
    scale, bias = (
        node.builder.reshape(node.builder.cast(node.input(i), wide), aside) for i in (1, 2)
    )
    y = node.op("Add", node.op("Mul", y, scale, shape=shape), bias, shape=shape)
    return (node.builder.cast(y, dtype),)


# -- GroupNormalization ----------------------------------------------------------------------------


def group_norm_rule(view: NodeView) -> OpRule:
    """`a (g k) c, (g k), (g k) -> a (g k) c; special: k c` (Wu & He, 2018).

    Raises:
        ModelError: The number of channels is unknown, or not a multiple of the groups.
    """
    shape = view.shape(0)
    groups = int(view.attr("num_groups", 1))
    if not isinstance(shape[1], int) or groups < 1 or shape[1] % groups:
        raise view.fail(f"expected channels in {groups} groups, got {shape[1]}")
    space = [f"s{axis}" for axis in range(2, len(shape))]
    dims = " ".join(["n", "(g k)", *space])
    text = f"{dims}, (g k), (g k) -> {dims}; special: {' '.join(['k', *space])}"
    return parse_rule(text, {"g": groups, "k": shape[1] // groups})


def group_norm_local(node: LocalNode) -> Sequence[ir.Value]:
    """The device's own groups; where groups are sharded, their statistics are all-reduced."""
    view, shape = node.view, node.in_shape(0)
    groups, inner = node.local_size("g"), node.local_size("k")
    if not node.split_factors("special"):
        return node.copy(attributes={"num_groups": int(groups)})
    dtype = node.out_dtype()
    wide = work_dtype(dtype)
    grouped = [shape[0], groups, inner, *shape[2:]]
    axes = range(2, len(grouped))
    sizes = [node.size("k"), *view.shape(0)[2:]]
    flat = masker(node)

    def mask(x: ir.Value, known_zero: bool) -> ir.Value:
        x = flat(node.builder.reshape(x, shape), known_zero)
        return node.builder.reshape(x, grouped)

    x = node.builder.reshape(node.builder.cast(node.input(0), wide), grouped)
    epsilon = float(view.attr("epsilon", 1e-5))
    y = normalised(node, x, grouped, axes, sizes, epsilon, mask=mask).y
    aside = [1, groups, inner, *[1] * len(shape[2:])]
    scale, bias = (
        node.builder.reshape(node.builder.cast(node.input(i), wide), aside) for i in (1, 2)
    )
    y = node.op("Add", node.op("Mul", y, scale, shape=grouped), bias, shape=grouped)
    return (node.builder.cast(node.builder.reshape(y, shape), dtype),)


# -- MeanVarianceNormalization and LpNormalization -------------------------------------------------


def _axes_rule(view: NodeView, axes: Sequence[int]) -> OpRule:
    names = axis_names(len(view.shape(0)))
    text = " ".join(names)
    special = " ".join(names[axis] for axis in axes)
    return parse_rule(f"{text} -> {text}" + (f"; special: {special}" if special else ""))


def mean_variance_norm_rule(view: NodeView) -> OpRule:
    """Every dim may be sharded; along normalised dims, devices exchange statistics."""
    return _axes_rule(view, mvn_axes(view))


def mean_variance_norm_local(node: LocalNode) -> Sequence[ir.Value]:
    """(x - mean) / (deviation + 1e-9), with all-reduced statistics."""
    shape, dtype = node.in_shape(0), node.out_dtype()
    wide, axes = work_dtype(dtype), mvn_axes(node.view)
    x = node.builder.cast(node.input(0), wide)
    sizes = [node.view.shape(0)[axis] for axis in axes]
    centred, _, variance = mean_and_variance(node, x, shape, axes, sizes, masker(node))
    kept = reduced(shape, axes)
    deviation = node.op("Sqrt", variance, shape=kept)
    deviation = node.op("Add", deviation, node.builder.const(MVN_EPSILON, wide), shape=kept)
    return (node.builder.cast(node.op("Div", centred, deviation, shape=shape), dtype),)


def lp_norm_rule(view: NodeView) -> OpRule:
    """Every dim may be sharded; along the normalised dim, devices exchange norms."""
    return _axes_rule(view, [axis_of(view, -1)])


def lp_norm_local(node: LocalNode) -> Sequence[ir.Value]:
    """Norms are all-reduced; where a norm is zero, so is the result."""
    shape, dtype = node.in_shape(0), node.out_dtype()
    wide, axes = work_dtype(dtype), [axis_of(node.view, -1)]
    x = masker(node)(node.input(0), node.zero[0])
    x = node.builder.cast(x, wide)
    kept = reduced(shape, axes)
    one = node.attr("p", 2) == 1
    part = node.builder.reduce("ReduceL1" if one else "ReduceSumSquare", x, axes, keepdims=True)
    norm = node.all_reduce(part, node.split_atoms("special"))
    if not one:
        norm = node.op("Sqrt", norm, shape=kept)
    none = node.op("Equal", norm, node.builder.const(0, wide), dtype=BOOL, shape=kept)
    norm = node.op("Where", none, node.builder.const(1, wide), norm, dtype=wide, shape=kept)
    return (node.builder.cast(node.op("Div", x, norm, shape=shape), dtype),)


# -- LRN -------------------------------------------------------------------------------------------


def lrn_rule(view: NodeView) -> OpRule:
    """Every dim except the channels, since an element needs the neighbouring channels."""
    names = axis_names(len(view.shape(0)))
    text = " ".join(names)
    return parse_rule(f"{text} -> {text}; replicated: {names[1]}")


def lrn_body(node: BodyNode) -> Sequence[ir.Value]:
    """Emits x (bias + alpha/size Σ x²)^-beta, Σ over adjacent channels (Krizhevsky et al., 2012).

    The window is added up shift by shift: it is usually five channels wide, and a sum of shifts
    has a gradient in every element type.
    """
    view, x = node.view, node.input(0)
    shape = node.shape(x)
    rank, size = len(shape), int(view.attr("size", 1))
    before = (size - 1) // 2
    square = node.op("Mul", x, x)
    pads = [0] * (2 * rank)
    pads[1], pads[rank + 1] = before, size - 1 - before
    wider = [shape[0], shape[1] + size - 1, *shape[2:]]
    padded = node.op("Pad", square, node.builder.sizes(pads), shape=wider)
    parts = []
    for shift in range(size):
        ends = node.builder.sizes([shape[1] + shift])
        bounds = node.builder.sizes([shift]), ends, node.builder.sizes([1])
        parts.append(node.op("Slice", padded, *bounds, shape=shape))
    total = node.op("Sum", *parts)
    share = node.number(float(view.attr("alpha", 1e-4)) / size, x)
    base = node.op("Add", node.op("Mul", total, share), node.number(view.attr("bias", 1.0), x))
    return [node.op("Mul", x, node.op("Pow", base, node.number(-view.attr("beta", 0.75), x)))]


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "",
        "InstanceNormalization",
        6,
        instance_norm_rule,
        copy_or(instance_norm_local),
        gradient=instance_norm_gradient,
        roles=Roles(vectors=(1, 2), expresses="group norm"),
    ),
    OpDef(
        "",
        "GroupNormalization",
        18,
        group_norm_rule,
        group_norm_local,
        gradient=group_norm_gradient,
        roles=Roles(vectors=(1, 2)),
        upgrades={21: Upgrade(affine_of_channels, by_shapes=True)},
    ),
    OpDef(
        "",
        "MeanVarianceNormalization",
        9,
        mean_variance_norm_rule,
        written_out(mean_variance_norm_local, mvn_axes),
        gradient=mean_variance_norm_gradient,
    ),
    OpDef(
        "",
        "LpNormalization",
        1,
        lp_norm_rule,
        copy_or(lp_norm_local),
        gradient=lp_norm_gradient,
    ),
    OpDef("", "LRN", 1, lrn_rule, gradient=BY_BODY, body=lrn_body),
)

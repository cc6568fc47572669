"""Resize and Upsample: batch and channels are parallel, and resized dims may be sharded too.

The same devices shard a resized dim before and after. If every element is repeated in place and the
shards line up, as when a feature map is enlarged by 2, devices do not communicate. Otherwise each
device gathers the dim and computes its own shard of the result from its rows of the interpolation's
matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxpar.core.mesh import Mesh
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.sharding import Component, local_size
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.image.inference import infer_resize
from onnxpar.ops.image.interpolation import Interpolation, matrix, nearest, repeats
from onnxpar.ops.image.resize_gradient import along, resize_gradient
from onnxpar.ops.local_helpers import BOOL, global_index, with_padding, work_dtype
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.old_node import OldNode, Upgrade, operands, renamed
from onnxpar.ops.operator import BY_BODY, OpDef, expanded

_MATRIX_LIMIT = 1 << 22
"""Most elements of a matrix of weights that is written into a graph."""
_SCALES = 2


def _places(view: NodeView) -> tuple[int, ...]:
    """The axes to which scales and sizes apply."""
    rank = len(view.shape(0))
    axes = view.attr("axes")
    return tuple(range(rank)) if not axes else tuple(a % rank for a in axes)


def _scales(view: NodeView) -> dict[int, float] | None:
    """The scale of each axis that has one; None if the node has sizes instead.

    Raises:
        ModelError: They are not constant.
    """
    if not view.has(_SCALES) or view.shape(_SCALES) == (0,):
        return None
    known = view.const(_SCALES)
    given = None if known is None else [float(s) for s in known]
    if given is None or len(given) != len(_places(view)):
        raise view.fail("sharding needs a constant scale for each axis")
    return dict(zip(_places(view), given, strict=True))


def _mode(view: NodeView) -> str:
    return str(view.attr("mode", "nearest"))


def _crops(view: NodeView) -> bool:
    return bool(view.attr("coordinate_transformation_mode") == "tf_crop_and_resize")


def _keeps_ratio(view: NodeView) -> bool:
    return str(view.attr("keep_aspect_ratio_policy", "stretch")) != "stretch"


def resized(view: NodeView) -> dict[int, Interpolation | None]:
    """Returns the interpolation of each resized axis; None if it is unknown or crops.

    Raises:
        ModelError: The scales are not constant.
    """
    shape, out = view.shape(0), view.out_shape()
    scales = _scales(view)
    if not _crops(view) and shape == out and all(isinstance(d, int) for d in shape):
        return {}  # onnxruntime then copies, whatever the scales are
    found: dict[int, Interpolation | None] = {}
    policy = scales is None and _keeps_ratio(view)
    for axis, (before, after) in enumerate(zip(shape, out, strict=True)):
        scale = None if scales is None else scales.get(axis, 1.0)
        same = (before == after and not policy) if scale is None else scale == 1
        if axis not in _places(view) or (same and not _crops(view)):
            continue
        if not isinstance(before, int) or not isinstance(after, int) or _crops(view) or policy:
            found[axis] = None
            continue
        found[axis] = Interpolation(
            before,
            after,
            after / before if scale is None else float(np.float32(scale)),
            _mode(view),
            view.attr("coordinate_transformation_mode", "half_pixel"),
            view.attr("nearest_mode", "round_prefer_floor"),
            float(view.attr("cubic_coeff_a", -0.75)),
            bool(view.attr("exclude_outside", 0)),
            bool(view.attr("antialias", 0)),
        )
    return found


def _linear(view: NodeView, axes: Mapping[int, Interpolation | None]) -> str:
    value = view.node.inputs[0]
    if value is None or value.dtype is None or not value.dtype.is_floating_point():
        return ""
    if not axes or (_mode(view) == "nearest" and not _crops(view)):
        return "; linear: any 0"
    return "; linear: sum 0" if not _crops(view) or view.attr("extrapolation_value", 0) == 0 else ""


def _splits(view: NodeView, axis: Interpolation | None) -> bool:
    """Whether a resized axis may be sharded."""
    if axis is None or axis.size * axis.out > _MATRIX_LIMIT:
        return False
    value = view.node.inputs[0]
    real = value is not None and value.dtype is not None and value.dtype.is_floating_point()
    return real or axis.mode == "nearest"


def resize_rule(view: NodeView) -> OpRule:
    """Resize: `a b h w -> a b h w; scaled: h w`; dims of unknown size must be replicated.

    Raises:
        ModelError: The scales are not constant, or dims that are not resized take part in a kept
            aspect ratio.
    """
    names = axis_names(len(view.shape(0)))
    axes = resized(view)
    by_sizes = _scales(view) is None
    if by_sizes and _keeps_ratio(view) and set(_places(view)) != set(axes):
        raise view.fail(
            "with 'keep_aspect_ratio_policy', sharding needs 'axes' that name only the resized dims"
        )
    right, scaled, replicated = list(names), [], []
    for axis, how in axes.items():
        if _splits(view, how):
            scaled.append(names[axis])
        else:
            right[axis] = f"{names[axis]}_out"
            replicated += [names[axis], right[axis]]
    rest = "".join(", ." if view.has(i) else ", -" for i in range(1, view.arity))
    text = f"{' '.join(names)}{rest} -> {' '.join(right)}"
    text += f"; scaled: {' '.join(scaled)}; replicated: {' '.join(replicated)}"
    return parse_rule(text + _linear(view, axes))


def resize_local(node: LocalNode) -> Sequence[ir.Value]:
    """Sharded axes whose shards do not line up are resized by matrices, all others by a Resize."""
    if not node.plan.factors:
        return node.copy()
    view, names = node.view, axis_names(len(node.in_shape(0)))
    axes = resized(view)
    x, shape, out = _safe(node), list(node.in_shape(0)), node.out_shape()
    left = dict(axes)
    for axis, how in axes.items():
        if how is None or not node.atoms(names[axis]) or _lines_up(node, how, names[axis]):
            continue
        x = _shard(node, x, axis, how, shape)
        shape[axis] = out[axis]
        del left[axis]
    if not left:
        return (x,)
    return (_rest(node, x, left),)


def _safe(node: LocalNode) -> ir.Value:
    """The operand; its padding is zero if onnxruntime would read it.

    Of tensors with fewer than four dims, it interpolates all dims. It then multiplies padding by
    zero, which would keep a NaN.
    """
    if len(node.in_shape(0)) < 4 and _mode(node.view) != "nearest":
        return with_padding(node, 0)
    return node.input(0)


def _lines_up(node: LocalNode, how: Interpolation, factor: str) -> bool:
    """Whether a device's shard of the result is its shard of the operand, each element repeated."""
    times = repeats(how)
    size, out = how.size, how.out
    for atom in node.atoms(factor):
        count = node.mesh.atoms[atom]
        size, out = -(-size // count), -(-out // count)
        if not times or out != size * times:
            return False
    return repeats(replace(how, size=size, out=out)) == times


def _shard(
    node: LocalNode, x: ir.Value, axis: int, how: Interpolation, shape: Sequence[Dim]
) -> ir.Value:
    """This device's shard of a resized dim, from the operand of local shape `shape`, gathered."""
    sharding = node.plan.inputs[0]
    assert sharding is not None
    (component,) = sharding.dims[axis]
    x = node.all_gather(x, component.atoms, axis)
    wide = [*shape[:axis], how.size, *shape[axis + 1 :]]
    held = _held(component, node.mesh, how.size)
    padded = int(local_size(component, node.mesh, node.table)) * node.mesh.count(component.atoms)
    if padded != how.size:
        x = node.op("Gather", x, node.builder.const(held), shape=wide, axis=axis)
    factor = axis_names(len(shape))[axis]
    result = [*wide[:axis], node.local_size(factor), *wide[axis + 1 :]]
    index = global_index(node, factor)
    length = [node.local_size(factor)]
    if not node.is_even(factor):
        last = node.builder.const(np.array(how.out - 1, np.int64))
        inside = node.op("Less", index, last, dtype=BOOL, shape=length)
        index = node.op("Where", inside, index, last, dtype=INT64, shape=length)
    if how.mode == "nearest":
        table = node.builder.const(nearest(how))
        taken = node.op("Gather", table, index, shape=length, axis=0)
        return node.op("Gather", x, taken, shape=result, axis=axis)
    kind = work_dtype(x.dtype)
    before = x.dtype
    weights = node.builder.const(matrix(how), kind)
    weights = node.op("Gather", weights, index, shape=[*length, how.size], axis=0)
    x = along(node, node.builder.cast(x, kind), weights, axis)
    return node.builder.cast(x, before)


def _held(component: Component, mesh: Mesh, size: int) -> np.ndarray:
    """The index of each element of a dim in its gathered shards, which have padding."""
    place, length = np.zeros(size, np.int64), size
    inside = np.arange(size)
    for atom in component.atoms:
        count = mesh.atoms[atom]
        length = -(-length // count)
        place = place * count + inside // length
        inside = inside % length
    return place * length + inside


def _rest(node: LocalNode, x: ir.Value, left: Mapping[int, object]) -> ir.Value:
    """A Resize of the axes `left`; all others already have their local sizes."""
    view, out = node.view, node.out_shape()
    scales, places = _scales(view), _places(view)
    inputs = list(node.inputs)
    inputs[0] = x
    if scales is None:
        if any(out[p] != view.out_shape()[p] for p in places):
            inputs[3] = node.builder.sizes([out[p] for p in places])
        return node.copy(inputs)[0]
    given = [scales[p] if p in left else 1.0 for p in places]
    inputs[_SCALES] = node.builder.const(np.array(given, np.float32))
    return node.copy(inputs)[0]


def _gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """The transposed matrices, axis by axis; sums over elements that were repeated.

    Raises:
        ModelError: The size of a resized axis is unknown, or the axis is cropped.
    """
    axes = resized(node.view)
    scales = _scales(node.view)
    times: dict[int, int] = {}
    for axis, how in axes.items():
        if how is not None:
            times[axis] = repeats(how)
        elif scales is not None and not _crops(node.view):
            times[axis] = _always_repeats(node.view, scales[axis])
        if how is None and not times.get(axis):
            raise node.fail(f"a gradient needs constant sizes and no cropping along axis {axis}")
    return [resize_gradient(node, axes, times)]


def _always_repeats(view: NodeView, scale: float) -> int:
    """How often elements are repeated in place, whatever the size; 0 if they may not be."""
    mode = view.attr("coordinate_transformation_mode", "half_pixel")
    if scale != int(scale) or scale < 1 or mode in ("align_corners", "half_pixel_symmetric"):
        return 0
    # It depends only on the position within an element, so one size stands for all.
    size = 64
    return repeats(
        Interpolation(
            size,
            size * int(scale),
            scale,
            _mode(view),
            mode,
            view.attr("nearest_mode", "round_prefer_floor"),
        )
    )


def _coordinates_as_attributes(old: OldNode) -> None:
    """Coordinates were asymmetric, and rounded down in an enlargement, else up.

    In onnxruntime, an empty mode means this for any scales.
    """
    mode = old.attr("mode", "nearest")
    # Some versions have bilinear and the like.
    mode = "linear" if mode.endswith("linear") else mode
    given = old.input(1)
    scales = None if given is None else ir.convenience.get_const_tensor(given)
    rounded = ""
    if scales is not None and (scales.numpy() >= 1).all():
        rounded = "floor"
    elif scales is not None and (scales.numpy() <= 1).all():
        rounded = "ceil"
    attributes = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    if mode == "nearest":
        attributes["nearest_mode"] = rounded
    old.become("Resize", [old.input(0), None, given], attributes)


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "",
        "Resize",
        10,
        resize_rule,
        resize_local,
        gradient=_gradient,
        host_operands=(1, 2, 3),
        infer=infer_resize,
        upgrades={11: Upgrade(_coordinates_as_attributes)},
    ),
    OpDef(
        "",
        "Upsample",
        7,
        expanded,
        gradient=BY_BODY,
        upgrades={9: operands(scales=1), 10: renamed("Resize")},
    ),
)

"""Operators that read images at places that other operands give: GridSample, RoiAlign and others.

They may read any place, so the spatial dims of images are replicated. Batch, channels, regions and
places may be sharded. For regions of another device's images, the result is zero, and the sum is
partial.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.image.inference import infer_roi_align
from onnxpar.ops.image.sample_body import affine_body, grid_body, roi_body
from onnxpar.ops.local_helpers import locate, with_padding, zero_unless
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.old_node import OldNode, Upgrade
from onnxpar.ops.operator import BY_BODY, NOT_DIFFERENTIABLE, Missing, OpDef, expanded

_IMAGE = "N"


def grid_rule(view: NodeView) -> OpRule:
    """GridSample: `n c h w, n y x 1 -> n c y x; replicated: h w; linear: sum 0`."""
    rank = len(view.shape(0)) - 2
    names = axis_names(rank)
    before = [f"{n}_in" for n in names]
    text = f"N C {' '.join(before)}, N {' '.join(names)} 1 -> N C {' '.join(names)}"
    # Without a border of zeros, every result is an element of the image.
    moves = view.attr("mode") == "nearest" and view.attr("padding_mode", "zeros") != "zeros"
    linear = "any 0" if moves else "sum 0"
    return parse_rule(f"{text}; replicated: {' '.join(before)}; linear: {linear}")


def align_rule(view: NodeView) -> OpRule:
    """RoiAlign: `N C h w, R 1, R -> R C y x; sum: N; replicated: h w y x`, linear (sum or max)."""
    linear = "sum 0" if view.attr("mode", "avg") == "avg" else "max 0"
    kinds = "sum: N; replicated: h w y x"
    return parse_rule(f"N C h w, R 1, R -> R C y x; {kinds}; linear: {linear}")


def align_local(node: LocalNode) -> Sequence[ir.Value]:
    """Regions of other devices' images give zero; regions that are padding read the first image."""
    rois, images = with_padding(node, 1), with_padding(node, 2)
    rest = node.inputs[3:]
    if not node.atoms(_IMAGE):
        return node.copy([node.input(0), rois, images, *rest])
    shape = node.in_shape(2)
    place, inside = locate(node, _IMAGE, node.builder.cast(images, INT64), shape)
    place = node.builder.cast(place, images.dtype)
    made = node.copy([node.input(0), rois, place, *rest])[0]
    inside = node.builder.reshape(inside, [*shape, 1, 1, 1])
    return (zero_unless(node, inside, made),)


def crop_rule(view: NodeView) -> OpRule:
    """CropAndResize (com.microsoft): as RoiAlign, with the sizes of the crop as an operand."""
    linear = "" if view.attr("extrapolation_value", 0.0) else "; linear: sum 0"
    return parse_rule(f"N C h w, R 1, R, . -> R C y x; sum: N; replicated: h w y x{linear}")


def max_rule(view: NodeView) -> OpRule:
    """MaxRoiPool: `N C h w, R 1 -> R C y x; replicated: N h w y x`: a region names its image."""
    return parse_rule("N C h w, R 1 -> R C y x; replicated: N h w y x; linear: max 0")


def max_local(node: LocalNode) -> Sequence[ir.Value]:
    """Regions that are padding read the first image."""
    return node.copy([node.input(0), with_padding(node, 1)])


def suppression_rule(view: NodeView) -> OpRule:
    """NonMaxSuppression: replicated, since how many boxes it selects depends on the data.

    Raises:
        ModelError: Always.
    """
    raise view.fail(
        "the number of boxes that it selects from each image is known only at run time, and one "
        "list contains those of all images"
    )


def _modes_of_any_rank(old: OldNode) -> None:
    mode = old.attr("mode", "bilinear")
    old.node.attributes.add(ir.AttrString("mode", mode.removeprefix("bi")))


def _from_the_corner(old: OldNode) -> None:
    """Coordinates of pixels were those of their corners, not of their centres."""
    mode = ir.AttrString("coordinate_transformation_mode", "output_half_pixel")
    old.node.attributes.add(mode)


_ELSEWHERE = Missing("it has no gradient rule; RoiAlign has one")
DEFS: tuple[OpDef, ...] = (
    OpDef(
        "",
        "GridSample",
        16,
        grid_rule,
        gradient=BY_BODY,
        body=grid_body,
        upgrades={20: Upgrade(_modes_of_any_rank)},
    ),
    OpDef(MICROSOFT, "GridSample", 1, grid_rule, gradient=BY_BODY, body=grid_body),
    OpDef("", "AffineGrid", 20, expanded, gradient=BY_BODY, body=affine_body),
    OpDef(
        "",
        "RoiAlign",
        10,
        align_rule,
        align_local,
        gradient=BY_BODY,
        body=roi_body,
        infer=infer_roi_align,
        upgrades={16: Upgrade(_from_the_corner)},
    ),
    OpDef(
        MICROSOFT,
        "CropAndResize",
        1,
        crop_rule,
        align_local,
        gradient=_ELSEWHERE,
        infer=infer_roi_align,
    ),
    OpDef("", "MaxRoiPool", 1, max_rule, max_local, gradient=_ELSEWHERE),
    OpDef(
        "",
        "NonMaxSuppression",
        10,
        suppression_rule,
        gradient=NOT_DIFFERENTIABLE,
        host_operands=(2, 3, 4),
    ),
)

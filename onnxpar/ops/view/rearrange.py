"""Operators that rearrange elements: DepthToSpace, SpaceToDepth, ReverseSequence."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_helpers import with_padding
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import OpDef
from onnxpar.ops.slots import FOLLOWS
from onnxpar.ops.view.rearrange_gradient import (
    depth_to_space_gradient,
    reverse_sequence_gradient,
    space_to_depth_gradient,
)

# The factors of the depth channels: x and y are the row and column within a block.
_DEPTH = {"DCR": "(x y c)", "CRD": "(c x y)"}
_SPACE = "n c (h x) (w y)"


def _sizes(view: NodeView, space: Sequence[Dim], depth: Sequence[Dim]) -> dict[str, Dim]:
    if len(space) != 4:
        raise view.fail(f"expected 4 dims, got {len(space)}")
    block = int(view.attr("blocksize"))
    return {"x": block, "y": block, "c": space[1], "h": depth[2], "w": depth[3]}


def _depth(view: NodeView) -> str:
    mode = str(view.attr("mode", "DCR"))
    if mode not in _DEPTH:
        raise view.fail(f"expected mode DCR or CRD, got {mode!r}")
    return _DEPTH[mode]


def depth_to_space_rule(view: NodeView) -> OpRule:
    """DepthToSpace: `n (x y c) h w -> n c (h x) (w y)`, x y replicated; CRD has `(c x y)`."""
    sizes = _sizes(view, view.out_shape(), view.shape(0))
    return parse_rule(f"n {_depth(view)} h w -> {_SPACE}; replicated: x y; linear: any 0", sizes)


def space_to_depth_rule(view: NodeView) -> OpRule:
    """SpaceToDepth: `n c (h x) (w y) -> n (x y c) h w`, x y replicated; CRD has `(c x y)`."""
    sizes = _sizes(view, view.shape(0), view.out_shape())
    return parse_rule(f"{_SPACE} -> n {_depth(view)} h w; replicated: x y; linear: any 0", sizes)


def reverse_sequence_rule(view: NodeView) -> OpRule:
    """ReverseSequence: the time axis is replicated; all other axes may be sharded."""
    names = axis_names(len(view.shape(0)))
    batch, time = (int(view.attr(f"{n}_axis", d)) for n, d in (("batch", 1), ("time", 0)))
    if {batch, time} != {0, 1}:
        raise view.fail(f"expected axes 0 and 1 for batch and time, got {batch} and {time}")
    text = " ".join(names)
    return parse_rule(f"{text}, {names[batch]} -> {text}; replicated: {names[time]}; linear: any 0")


def reverse_sequence_local(node: LocalNode) -> Sequence[ir.Value]:
    """Reverses the local sequences; padding counts as empty sequences."""
    return node.copy([node.input(0), with_padding(node, 1)])


DEFS = (
    OpDef(
        "",
        "DepthToSpace",
        1,
        depth_to_space_rule,
        gradient=depth_to_space_gradient,
        keeps_zero=True,
        precision=FOLLOWS,
    ),
    OpDef(
        "",
        "SpaceToDepth",
        1,
        space_to_depth_rule,
        gradient=space_to_depth_gradient,
        keeps_zero=True,
        precision=FOLLOWS,
    ),
    OpDef(
        "",
        "ReverseSequence",
        10,
        reverse_sequence_rule,
        reverse_sequence_local,
        gradient=reverse_sequence_gradient,
        keeps_zero=True,
    ),
)

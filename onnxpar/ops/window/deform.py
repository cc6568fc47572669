"""DeformConv and Col2Im: sharded by batch, channels and groups; spatial dims are replicated."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contraction.matmul import on_first
from onnxpar.ops.fallback import require_readable
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import convolves
from onnxpar.ops.operator import BY_BODY, OpDef
from onnxpar.ops.slots import Roles
from onnxpar.ops.window.channels import BATCH, FEW, GROUP, MANY, channels
from onnxpar.ops.window.deform_body import deform_conv_body
from onnxpar.ops.window.deform_gradient import col2im_gradient

_OFFSETS = "O"


def deform_conv_rule(view: NodeView) -> OpRule:
    """DeformConv: `N (O C) y x, M (O C) j i, N (O t) q p, M, N (O u) q p -> N M q p; sum: O C`.

    Groups are a factor if each has its own offsets, or all share one set of offsets.

    Raises:
        ModelError: A number of channels is unknown, or groups and offset groups differ.
    """
    group, offsets = int(view.attr("group", 1)), int(view.attr("offset_group", 1))
    if group > 1 and offsets not in (1, group):
        raise view.fail(f"expected 1 or {group} offset groups for sharding, got {offsets}")
    x, w = view.shape(0), view.shape(1)
    channel = channels(view, x[1], w[0], group)
    image, results, few = channel.image, channel.results, channel.few
    sizes: dict[str, Dim] = dict(channel.sizes)
    outer = ""
    summed = [FEW] if few != "1" else []
    if offsets > 1 and group > 1:
        outer = GROUP
    elif offsets > 1:
        outer = _OFFSETS
        sizes |= {_OFFSETS: offsets, FEW: int(x[1]) // offsets}
        image = few = f"({_OFFSETS} {FEW})"
        summed = [_OFFSETS, FEW]
    taps = int(w[2]) * int(w[3])
    if outer:
        sizes |= {"t": 2 * taps} | ({"u": taps} if view.has(4) else {})
    steps, mask = (f"({outer} {name})" if outer else name for name in ("t", "u"))
    operands = [
        f"{BATCH} {image} y x",
        f"{results} {few} j i",
        f"{BATCH} {steps} q p",
        results if view.has(3) else "-",
        f"{BATCH} {mask} q p" if view.has(4) else "-",
    ][: view.arity]
    replicated = ["y", "x", "j", "i", "t", "q", "p", *(["u"] if view.has(4) else [])]
    linear = [0, 1, *([4] if view.has(4) else [])]
    with_bias = "+3" if view.has(3) else ""
    text = f"{', '.join(operands)} -> {BATCH} {results} q p; replicated: {' '.join(replicated)}"
    text += f"; sum: {' '.join(summed)}" if summed else ""
    text += f"; linear: {', '.join(f'sum {i}{with_bias}' for i in linear)}"
    text += ", max 3, min 3" if view.has(3) else ""
    return parse_rule(text, sizes)


def deform_conv_local(node: LocalNode) -> Sequence[ir.Value]:
    """Runs on local channels; one of the devices that sum channels adds the bias."""
    if not node.plan.factors:
        return node.copy()
    group = int(node.attr("group", 1))
    offsets = int(node.attr("offset_group", 1))
    local = node.local_size(GROUP) if group > 1 else 1
    if offsets > 1:
        offsets = int(local if group > 1 else node.local_size(_OFFSETS))
    operands = list(node.inputs)
    split = node.split_atoms("sum")
    if split and node.has(3):
        operands[3] = on_first(node, 3, split)
    return node.copy(operands, {"group": int(local), "offset_group": offsets})


def col2im_rule(view: NodeView) -> OpRule:
    """Col2Im: `N (C k) l -> N C y x`; blocks and image are replicated.

    Raises:
        ModelError: The number of channels is unknown before the model runs.
    """
    made, held = view.out_shape(), view.shape(0)
    require_readable(view, "the shape of the image", made)
    count, rows = made[1], held[1]
    if not isinstance(count, int) or not isinstance(rows, int):
        raise view.fail(f"sharding needs a constant number of channels, got {count}")
    space = " ".join(f"s{d}" for d in range(len(made) - 2))
    text = f"{BATCH} ({MANY} k) l, ., . -> {BATCH} {MANY} {space}; replicated: k l {space}"
    return parse_rule(f"{text}; linear: sum 0", {MANY: count, "k": rows // count})


DEFS = (
    OpDef(
        "",
        "DeformConv",
        19,
        deform_conv_rule,
        deform_conv_local,
        gradient=BY_BODY,
        cost=convolves(None, 1),
        body=deform_conv_body,
        roles=Roles(weights=(1,), vectors=(3,)),
    ),
    OpDef("", "Col2Im", 18, col2im_rule, gradient=col2im_gradient),
)

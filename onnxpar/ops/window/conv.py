"""Conv and ConvTranspose, sharded along any of their dims.

Batch, groups and output channels are parallel. Sharding the input channels leaves a partial sum.
Sharded spatial dims exchange halos (`onnxpar.ops.window.halo`).
"""

from collections.abc import Sequence
from math import prod

import onnx_ir as ir

from onnxpar.core.errors import NodeError
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contraction.matmul import on_first
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import convolves
from onnxpar.ops.operator import OpDef
from onnxpar.ops.parts import PartForm, Shapes
from onnxpar.ops.slots import HALF, Kernel, KernelCall, Roles
from onnxpar.ops.window.channels import BATCH, FEW, MANY, Channels, channels
from onnxpar.ops.window.conv_gradient import conv_gradient, conv_transpose_gradient
from onnxpar.ops.window.geometry import Words, conv_dims, windowed, words
from onnxpar.ops.window.transposed import spread, transpose_dims


def _channels(view: NodeView) -> Channels:
    few, group = view.shape(0)[1], int(view.attr("group", 1))
    own = view.shape(1)[1]
    if isinstance(few, int) and isinstance(own, int) and own * group != few:
        raise view.fail(
            f"operand 1 has filters of {own} channels in "
            f"{group} groups: expected {own * group} channels of operand 0, got {few}",
            NodeError,
        )
    return channels(view, few, view.shape(1)[0], group)


def conv_rule(view: NodeView) -> OpRule:
    """Conv: `N (G C) y x, (G M) C j i, (G M) -> N (G M) y x; sum: C; scaled: y x`."""
    channel, space = _channels(view), words(conv_dims(view))
    image, results = (channel.image, space.image), (channel.results, space.results)
    return _rule(view, channel, space, image, results, channel.summed)


def transposed_rule(view: NodeView, space: Words) -> OpRule:
    """Returns the rule of a transposed convolution, whose operands are results and weights.

    Args:
        view: The node.
        space: Its spatial dims, in the roles that they have in the convolution.
    """
    channel = transposed_channels(view)
    image, results = (channel.image, space.image), (channel.results, space.results)
    return _rule(view, channel, space, results, image, channel.gathered)


def _rule(
    view: NodeView,
    channel: Channels,
    space: Words,
    operand: tuple[str, str],
    result: tuple[str, str],
    summed: str,
) -> OpRule:
    """The rule; of operand 0 and the result, channels and spatial dims are given."""
    text = f"{BATCH} {' '.join(operand)}, {channel.results} {channel.few} {space.kernel}"
    linear = "sum 0, sum 1"
    if view.has(2):
        text += f", {result[0]}"
        linear = "sum 0+2, sum 1+2, max 2, min 2"
    elif view.arity > 2:
        text += ", -"
    text += f" -> {BATCH} {' '.join(result)}{summed}{space.clauses()}"
    return parse_rule(f"{text}; linear: {linear}", channel.sizes)


def conv_local(node: LocalNode) -> Sequence[ir.Value]:
    """Runs on windows of the image; one of the devices that sum channels adds the bias."""
    if not node.plan.factors:
        return node.copy()
    image = windowed(node, 0, conv_dims(node.view))
    return node.copy(
        [image.x, node.input(1), *bias_once(node, FEW)],
        {
            "pads": list(image.pads),
            "auto_pad": None,
            "group": int(_channels(node.view).local_group(node)),
        },
    )


def conv_part(view: NodeView, operands: Shapes, result: Sequence[Dim]) -> PartForm | None:
    """A part of the results: of the only group, or of all groups some."""
    group, many, few = int(view.attr("group", 1)), view.shape(1)[0], operands[1][0]
    if group == 1:
        return PartForm()
    # A part consists of complete groups, since their factor is the major one.
    assert isinstance(many, int)
    assert isinstance(few, int)
    return PartForm({"group": few * group // many})


def bias_once(node: LocalNode, summed: str) -> list[ir.Value]:
    """Returns the bias, if there is one: zero on all but the first of the devices that sum."""
    if not node.has(2):
        return []
    atoms = node.atoms(summed) if summed in node.plan.factors else ()
    return [on_first(node, 2, atoms) if atoms else node.input(2)]


def transposed_channels(view: NodeView) -> Channels:
    """Returns the channels of a transposed convolution, in their roles in the convolution."""
    group = int(view.attr("group", 1))
    many, few = view.shape(1)[:2]
    return channels(view, few * group, many, group)


def conv_transpose_rule(view: NodeView) -> OpRule:
    """ConvTranspose: `N (G M) y x, (G M) C j i, (G C) -> N (G C) y x; sum: M; scaled: y x`."""
    return transposed_rule(view, words(transpose_dims(view)))


def conv_transpose_local(node: LocalNode) -> Sequence[ir.Value]:
    """Runs on windows of the operand and drops the results outside the device's block."""
    if not node.plan.factors:
        return node.copy()
    dims = transpose_dims(node.view)
    group = int(transposed_channels(node.view).local_group(node))
    return (spread(node, dims, node.input(1), group, bias_once(node, MANY)),)


def _columns(call: KernelCall) -> int:
    """The kernel multiplies the filters with one image after another."""
    image, filters = call.inputs[0], call.inputs[1]
    if image is None or filters is None:
        return 0
    return prod(filters[1:]) * prod(image[2:]) * call.itemsize


def _conv_bias(node: ir.Node, weight: Sequence[int]) -> int:
    return weight[0]


def _transposed_bias(node: ir.Node, weight: Sequence[int]) -> int:
    return weight[1] * node.attributes.get_int("group", 1)


def _uneven_padding(node: ir.Node) -> str | None:
    """Padding that differs before and after."""
    pads = node.attributes.get_ints("pads", ())
    half = len(pads) // 2
    if tuple(pads[:half]) != tuple(pads[half:]):
        return "cuDNN has no transposed convolution with different padding before and after"
    if node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):
        return "the padding of auto_pad may differ before and after"
    return None


DEFS = (
    OpDef(
        "",
        "Conv",
        1,
        conv_rule,
        conv_local,
        gradient=conv_gradient,
        cost=convolves(None, 1),
        roles=Roles(weights=(1,), vectors=(2,), product=True, bias_size=_conv_bias),
        windowed=True,
        precision=HALF,
        on_part=conv_part,
    ),
    OpDef(
        "",
        "ConvTranspose",
        1,
        conv_transpose_rule,
        conv_transpose_local,
        gradient=conv_transpose_gradient,
        cost=convolves(0, 1),
        roles=Roles(weights=(1,), vectors=(2,), product=True, bias_size=_transposed_bias),
        memory=Kernel(work=_columns),
        refused=_uneven_padding,
        windowed=True,
        precision=HALF,
    ),
)

"""Operators that extend a tensor: Pad by a border, Tile by copies."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.fallback import require_readable
from onnxpar.ops.folding import MOVE, Operands
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.local_helpers import normal_axis
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.old_node import OldNode, Upgrade
from onnxpar.ops.operator import OpDef
from onnxpar.ops.sizes.computed_sizes import tiled
from onnxpar.ops.slots import FOLLOWS
from onnxpar.ops.view.inference import infer_pad
from onnxpar.ops.view.pad_gradient import pad_gradient, tile_gradient
from onnxpar.ops.view.reshape import further


def _amounts(view: NodeView) -> dict[int, tuple[Dim, Dim]]:
    """Returns for each axis that gains or loses elements how many before and after.

    Raises:
        ModelError: The pads are unknown before the model runs.
    """
    rank = len(view.shape(0))
    given, axes = view.contents(1), view.ints(3)
    if given is None:
        raise view.fail("sharding needs pads that are known before the model runs")
    places = range(rank) if axes is None else [normal_axis(view, a, rank) for a in axes]
    if len(given) != 2 * len(places):
        raise view.fail(f"expected {2 * len(places)} pads, got {len(given)}")
    ends = zip(given[: len(places)], given[len(places) :], strict=True)
    return {a: e for a, e in zip(places, ends, strict=True) if e != (0, 0)}


def _linear(view: NodeView, padded: bool) -> str:
    """What may stay partial: reducing the devices' borders must give the border again."""
    if not padded or _mode(view) != "constant":
        return "any 0"
    if view.has(2):
        known = view.const(2)
        border = None if known is None or known.size != 1 else known.item()
    else:
        border = 0
    if border == 0:
        return "any 0"
    return "max 0, min 0" + (", prod 0" if border == 1 else "")


def _mode(view: NodeView) -> str:
    return str(view.attr("mode", "constant"))


def pad_rule(view: NodeView) -> OpRule:
    """Pad: a dim that keeps its size may be sharded, the others are replicated."""
    names = axis_names(len(view.shape(0)))
    padded = sorted(_amounts(view))
    result = [f"{n}_pad" if axis in padded else n for axis, n in enumerate(names)]
    text = f"{' '.join(names)}{further(view)} -> {' '.join(result)}"
    if padded:
        text += f"; replicated: {' '.join(f'{names[a]} {names[a]}_pad' for a in padded)}"
    return parse_rule(f"{text}; linear: {_linear(view, bool(padded))}")


def padded_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """As `onnxpar.ops.view.pad_gradient` says."""
    return pad_gradient(node, _mode(node.view), _amounts(node.view))


def _repeats(view: NodeView) -> tuple[Dim, ...]:
    known = view.contents(1)
    if known is None:
        raise view.fail("sharding needs repeats that are known before the model runs")
    if len(known) != len(view.shape(0)):
        raise view.fail(f"expected {len(view.shape(0))} repeats, got {len(known)}")
    require_readable(view, "the repeats", known)
    return known


def tile_rule(view: NodeView) -> OpRule:
    """Tile: `a b -> (t a) b`; the repetitions t may be sharded."""
    shape, repeats = view.shape(0), _repeats(view)
    names = axis_names(len(shape))
    operand, result = [], []
    sizes: dict[str, Dim] = {}
    for name, size, count in zip(names, shape, repeats, strict=True):
        copies = f"t_{name}"
        if count == 1:
            operand.append(name)
            result.append(name)
        elif size == 1:
            operand.append("1")
            result.append(copies)
        else:
            operand.append(name)
            result.append(f"({copies} {name})")
            sizes |= {copies: count, name: size}
    return parse_rule(f"{' '.join(operand)}, . -> {' '.join(result)}; linear: any 0", sizes)


def tile_local(node: LocalNode) -> Sequence[ir.Value]:
    """Repeats as often as the device's shard needs."""
    if not node.plan.factors:
        return node.copy()
    names = axis_names(len(node.in_shape(0)))
    repeats = [
        1 if count == 1 else node.local_size(f"t_{name}")
        for name, count in zip(names, _repeats(node.view), strict=True)
    ]
    return node.copy([node.input(0), node.builder.sizes(repeats)])


def tiled_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Sums over the repetitions."""
    return tile_gradient(node, _repeats(node.view))


def _pads_as_operands(old: OldNode) -> None:
    old.operand("pads", 1)
    old.operand("value", 2)
    old.like(2)


def _tiled_elements(operands: Operands) -> int:
    x, repeats = operands[0], operands[1]
    return 0 if x is None or repeats is None else x.size * prod(map(int, repeats.ravel()))


DEFS = (
    OpDef(
        "",
        "Pad",
        2,
        pad_rule,
        gradient=padded_gradient,
        host_operands=(1, 2, 3),
        precision=FOLLOWS,
        infer=infer_pad,
        upgrades={11: Upgrade(_pads_as_operands)},
    ),
    OpDef(
        "",
        "Tile",
        6,
        tile_rule,
        tile_local,
        gradient=tiled_gradient,
        keeps_zero=True,
        host_operands=(1,),
        precision=FOLLOWS,
        values=tiled,
        folding=replace(MOVE, size=_tiled_elements),
    ),
)

"""Operators without a rule whose body is ours: where ONNX's is missing, or worse to divide.

Operators that ONNX's own bodies serve well need no entry: they are replaced without being asked.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.operator import BY_BODY, OpDef, expanded


def center_crop_pad_body(node: BodyNode) -> Sequence[ir.Value]:
    """A Slice of the dims that are cut and a Pad of those that grow; the others are left alone.

    ONNX's body pads and cuts every dim, by numbers that it computes when the model runs.

    Raises:
        ModelError: It is unknown which dims are cut and which grow; ONNX's body is then taken.
    """
    x, view = node.input(0), node.view
    shape = list(node.shape(x))
    target = view.contents(1)
    rank = len(shape)
    axes = [int(a) % rank for a in view.attr("axes", range(rank))]
    if target is None or len(target) != len(axes):
        raise node.fail("expected a target shape that is known before the model runs")
    starts: dict[int, tuple[int, int]] = {}
    pads = [0] * (2 * rank)
    for axis, wanted in zip(axes, target, strict=True):
        have = shape[axis]
        if view.table.equal(have, wanted):
            continue
        if not isinstance(have, int) or not isinstance(wanted, int):
            raise node.fail(f"expected to know whether dim {axis} shrinks or grows")
        if wanted < have:
            start = (have - wanted) // 2
            starts[axis] = start, start + wanted
        else:
            before = (wanted - have) // 2
            pads[axis], pads[rank + axis] = before, wanted - have - before
    y = x
    if starts:
        y = _cut(node, y, shape, starts)
    if any(pads):
        shape = [
            size + pads[axis] + pads[rank + axis] if pads[axis] or pads[rank + axis] else size
            for axis, size in enumerate(node.shape(y))
        ]
        y = node.op("Pad", y, node.builder.const(pads), shape=shape)
    return [y]


def _cut(
    node: BodyNode, x: ir.Value, shape: Sequence[Dim], ranges: dict[int, tuple[int, int]]
) -> ir.Value:
    cut: list[Dim] = list(shape)
    for axis, (start, end) in ranges.items():
        cut[axis] = end - start
    starts, ends = ([pair[i] for pair in ranges.values()] for i in (0, 1))
    operands = (node.builder.const(values) for values in (starts, ends, list(ranges)))
    return node.op("Slice", x, *operands, shape=cut)


DEFS: tuple[OpDef, ...] = (
    OpDef("", "CenterCropPad", 18, expanded, gradient=BY_BODY, body=center_crop_pad_body),
)

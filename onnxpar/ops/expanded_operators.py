"""Operators without a rule whose body is ours, since ONNX's body is missing or harder to shard.

Operators for which ONNX's own bodies suffice need no record: they are always replaced.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.operator import BY_BODY, OpDef, expanded


def center_crop_pad_body(node: BodyNode) -> Sequence[ir.Value]:
    """A Slice of the dims that shrink and a Pad of those that grow; other dims are not touched.

    ONNX's body pads and slices every dim, by numbers that it computes when the model runs.

    Raises:
        ModelError: It is unknown which dims shrink and which grow; ONNX's body is then used.
    """
    x, view = node.input(0), node.view
    shape = list(node.shape(x))
    target = view.contents(1)
    rank = len(shape)
    axes = [int(a) % rank for a in view.attr("axes", range(rank))]
    if target is None or len(target) != len(axes):
        raise node.fail("expected a target shape that is known before the model runs")
    kept: dict[int, tuple[int, int]] = {}
    pads = [0] * (2 * rank)
    for axis, wanted in zip(axes, target, strict=True):
        have = shape[axis]
        if view.table.equal(have, wanted):
            continue
        if not isinstance(have, int) or not isinstance(wanted, int):
            raise node.fail(f"it is unknown whether dim {axis} shrinks or grows")
        if wanted < have:
            start = (have - wanted) // 2
            kept[axis] = start, start + wanted
        else:
            before = (wanted - have) // 2
            pads[axis], pads[rank + axis] = before, wanted - have - before
    y = x
    if kept:
        for axis, (start, end) in kept.items():
            shape[axis] = end - start
        first, last = ([bounds[i] for bounds in kept.values()] for i in (0, 1))
        operands = map(node.builder.const, (first, last, list(kept)))
        y = node.op("Slice", y, *operands, shape=shape)
    if any(pads):
        shape = [size + pads[axis] + pads[rank + axis] for axis, size in enumerate(shape)]
        y = node.op("Pad", y, node.builder.const(pads), shape=shape)
    return [y]


DEFS: tuple[OpDef, ...] = (
    OpDef("", "CenterCropPad", 18, expanded, gradient=BY_BODY, body=center_crop_pad_body),
)

"""Fourier transforms and related operators: DFT, STFT, MelWeightMatrix.

A transformed axis is replicated; all other dims may be sharded. The frames of an STFT may be
sharded, too: a device takes its own frames from the undivided signal. Operators that make windows
(HannWindow and others) are replaced by their bodies.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.local_helpers import global_index, normal_axis
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.old_node import OldNode, Upgrade
from onnxpar.ops.operator import BY_BODY, NOT_DIFFERENTIABLE, OpDef
from onnxpar.ops.signal.fourier_gradient import dft_gradient
from onnxpar.ops.view.reshape import further

_FRAME = "F"


def transformed_axis(view: NodeView) -> int:
    """Returns the axis that a DFT transforms, counted from the front.

    Raises:
        ModelError: The operand that gives it is not constant.
    """
    rank = len(view.shape(0))
    if not view.has(2):
        return rank - 2
    known = view.contents(2)
    if known is None or not isinstance(known[0], int):
        raise view.fail("sharding needs a constant axis")
    return normal_axis(view, known[0], rank)


def dft_rule(view: NodeView) -> OpRule:
    """DFT: `a t_in 1, ., . -> a t 1; replicated: t_in t; linear: sum 0` for axis 1 of 3 dims."""
    rank = len(view.shape(0))
    names = axis_names(rank - 1)
    axis = transformed_axis(view)
    left, right = list(names), list(names)
    left[axis], right[axis] = f"{names[axis]}_in", f"{names[axis]}_out"
    return parse_rule(
        f"{' '.join(left)} 1{further(view)} -> {' '.join(right)} 1; "
        f"replicated: {left[axis]} {right[axis]}; linear: sum 0"
    )


def _scalar(view: NodeView, index: int, what: str) -> int:
    known = view.contents(index)
    if known is None or len(known) != 1 or not isinstance(known[0], int):
        raise view.fail(f"sharding needs a constant {what}")
    return known[0]


def _lengths(view: NodeView) -> tuple[int, int]:
    """The step from one frame to the next and the length of a frame, in elements.

    Raises:
        ModelError: They are not constant.
    """
    step = _scalar(view, 1, "step")
    if view.has(3):
        return step, _scalar(view, 3, "length of a frame")
    length = view.shape(2)[0]
    if not isinstance(length, int):
        raise view.fail("sharding needs a window of constant length")
    return step, length


def stft_rule(view: NodeView) -> OpRule:
    """STFT: `n t 1, ., ., . -> n F b 1; replicated: t b; special: F; linear: sum 0`."""
    _lengths(view)
    signal = "N t" + " 1" * (len(view.shape(0)) - 2)
    text = f"{signal}{further(view)} -> N {_FRAME} b 1; replicated: t b"
    text += f"; special: {_FRAME}" if isinstance(view.out_shape()[1], int) else f" {_FRAME}"
    return parse_rule(f"{text}; linear: sum 0")


def stft_local(node: LocalNode) -> Sequence[ir.Value]:
    """Gathers the part of the signal that this device's frames cover."""
    if not node.atoms(_FRAME):
        return node.copy()
    step, length = _lengths(node.view)
    frames = int(node.local_size(_FRAME))
    shape = list(node.in_shape(0))
    covered = (frames - 1) * step + length
    # Indices beyond the end read the last element: only padding frames cover them.
    first = global_index(node, _FRAME)
    zero, one = (node.builder.const([n]) for n in (0, 1))
    first = node.op("Slice", first, zero, one, dtype=INT64, shape=[1])
    first = node.op("Mul", first, node.builder.const([step]), shape=[1])
    place = node.builder.const(np.arange(covered, dtype=np.int64))
    place = node.op("Add", place, first, dtype=INT64, shape=[covered])
    last = node.op("Sub", node.builder.size(shape[1]), one, shape=[1])
    place = node.op("Min", place, last, dtype=INT64, shape=[covered])
    shape[1] = covered
    part = node.op("Gather", node.input(0), place, shape=shape, axis=1)
    return node.copy([part, *node.inputs[1:]])


def stft_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """STFT: a gather of frames, their product with the window, and a DFT.

    Raises:
        ModelError: The number of frames, the step or their length is not constant.
    """
    view, signal = node.view, node.input(0)
    step, length = _lengths(view)
    batch, frames, bins, _ = view.out_shape()
    if not isinstance(frames, int):
        raise node.fail(f"its body needs a constant number of frames, got {frames}")
    rest = list(node.shape(signal)[2:])
    places = np.arange(frames)[:, None] * step + np.arange(length)
    shape: list[Dim] = [batch, frames, length, *rest]
    parts = node.op("Gather", signal, node.builder.const(places), shape=shape, axis=1)
    if not rest:
        parts = node.builder.unsqueeze(parts, [3])
        shape.append(1)
    if view.has(2):
        window = node.builder.unsqueeze(node.input(2), [1])
        parts = node.op("Mul", parts, window, shape=shape)
    onesided = int(view.attr("onesided", 1))
    out = [batch, frames, bins, 2]
    axis = node.builder.const(2)
    return [node.op("DFT", parts, None, axis, shape=out, onesided=onesided)]


def mel_rule(view: NodeView) -> OpRule:
    """MelWeightMatrix: a small matrix, which every device computes.

    Raises:
        ModelError: Always.
    """
    raise view.fail("this small matrix is computed on every device")


def _gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """The adjoint transform."""
    return [dft_gradient(node, transformed_axis(node.view))]


def _axis_as_operand(old: OldNode) -> None:
    """Axis 1 was the default."""
    old.node.attributes.setdefault("axis", ir.AttrInt64("axis", 1))
    old.operand("axis", 2)


DEFS: tuple[OpDef, ...] = (
    OpDef("", "DFT", 17, dft_rule, gradient=_gradient, upgrades={20: Upgrade(_axis_as_operand)}),
    OpDef("", "STFT", 17, stft_rule, stft_local, gradient=BY_BODY, body=stft_body),
    OpDef("", "MelWeightMatrix", 17, mel_rule, gradient=NOT_DIFFERENTIABLE),
)

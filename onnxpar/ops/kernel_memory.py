"""What memory a kernel takes: outputs that lie where an operand lies, and room to work in.

Of the kernels of onnxruntime's CPU provider and of the runtime's own library, found by measuring
each (tests/exec/test_kernel_memory.py), and of local forms of many nodes. A kernel that is not
named here writes each of its outputs to memory of its own and needs no more. Convolutions have
64 KiB for each thread besides, collectives the buffers of their transport: neither grows with the
tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.window.conv_backward import FEW_CHANNELS
from onnxpar.ops.window.conv_gradient import WEIGHT_GRAD

Shape = tuple[int, ...]


@dataclass(frozen=True)
class KernelCall:
    """A node as its kernel sees it.

    Attributes:
        inputs: Shape of each operand, None where it is absent or unknown.
        outputs: Shape of each result.
        itemsize: Bytes of an element of the first result.
        attributes: Its attributes by name.
        after_bias: Whether its operand is a sum with a row that nobody else reads.
    """

    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape | None, ...]
    itemsize: int
    attributes: Mapping[str, Any]
    after_bias: bool

    def bytes(self, shape: Shape | None) -> int:
        """Bytes of a tensor of that shape with elements of the first result's size."""
        return 0 if shape is None else prod(shape) * self.itemsize


WorkspaceFn = Callable[[KernelCall], int]


def _nothing(call: KernelCall) -> int:
    return 0


@dataclass(frozen=True)
class Kernel:
    """What a kernel does with memory.

    Attributes:
        view: Whether its first output is its first operand under another shape.
        over: Pairs `(operand, output)`: the output takes the operand's memory where the operand is
            read there for the last time and both have the same size.
        work: Bytes that it needs while it runs.
    """

    view: bool = False
    over: tuple[tuple[int, int], ...] = ()
    work: WorkspaceFn = _nothing


def _where(call: KernelCall) -> int:
    """Both choices are spread out over the condition before they are joined."""
    condition, *choices = call.inputs[:3]
    if condition is None or any(c is None for c in choices):
        return 0
    spread = [np.broadcast_shapes(condition, c) for c in choices if c is not None]
    return sum(map(call.bytes, spread))


def _softmax(call: KernelCall) -> int:
    """Along another dim than the last it works on a transposed copy, and writes another."""
    shape = call.inputs[0]
    axis = call.attributes.get("axis", -1)
    last = shape is None or axis in (-1, len(shape) - 1)
    return 0 if last else 2 * call.bytes(shape)


def _gelu(call: KernelCall) -> int:
    """With a bias before it onnxruntime makes one kernel of both, which keeps the sum."""
    return call.bytes(call.outputs[0]) if call.after_bias else 0


def _unrolled(call: KernelCall) -> int:
    """A filter's gradient: a padded image, and slices of it that meet the cotangent.

    With few channels all slices lie beside each other before their product, with many there is one
    at a time; a product is summed over the batch afterwards (`onnxpar.ops.window.conv_backward`).
    """
    image, cotangent, filters = call.inputs[0], call.inputs[1], call.outputs[0]
    if image is None or cotangent is None or filters is None:
        return 0
    few, taps, batch = filters[1], prod(filters[2:]), image[0]
    rank = len(filters) - 2
    pads = call.attributes.get("pads") or [0] * 2 * rank
    strides = call.attributes.get("strides") or [1] * rank
    padded = [n + pads[d] + pads[d + rank] for d, n in enumerate(image[2:])]
    sliced = taps > 1 or any(s > 1 for s in strides)
    tap = prod(image[:2]) * prod(cotangent[2:]) if sliced else 0
    window = prod(image[:2]) * prod(padded) if any(pads) else 0
    whole = prod(filters)
    if few < FEW_CHANNELS and taps > 1:
        each = whole * (batch + 1 if batch > 1 else 1)
        most = max(window + taps * tap, 2 * taps * tap, taps * tap + each)
    else:
        each = whole // taps * (batch + 1 if batch > 1 else 1)
        most = max(window + tap + whole - whole // taps + each, 2 * whole)
    # The result is there at the end only.
    return max(most - whole, 0) * call.itemsize


def _columns(call: KernelCall) -> int:
    """A transposed convolution multiplies the filters with one image after another."""
    image, filters = call.inputs[0], call.inputs[1]
    if image is None or filters is None:
        return 0
    return prod(filters[1:]) * prod(image[2:]) * call.itemsize


_VIEW = Kernel(view=True)
_OVER_FIRST = Kernel(over=((0, 0),))
_SOFTMAX = Kernel(over=((0, 0),), work=_softmax)

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_IN_PLACE = (
    "Cast", "Celu", "Clip", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "ScatterElements", "Selu",
    "Shrink", "Sigmoid", "Softplus", "Softsign", "Tanh", "ThresholdedRelu", "Trilu",
)  # fmt: skip
_OWN_IN_PLACE = (
    "AllReduce", "Broadcast", "GeluGrad", "LayerNormalizationGrad", "LogSoftmaxGrad", "ReluGrad",
    "SgdStep", "SigmoidGrad", "SoftmaxGrad", "TanhGrad",
)  # fmt: skip

KERNELS: Mapping[tuple[str, str], Kernel] = {
    **{("", name): _VIEW for name in _VIEWS},
    **{("", name): _OVER_FIRST for name in _IN_PLACE},
    **{(DOMAIN, name): _OVER_FIRST for name in _OWN_IN_PLACE},
    ("", "Softmax"): _SOFTMAX,
    ("", "LogSoftmax"): _SOFTMAX,
    ("", "ConvTranspose"): Kernel(work=_columns),
    ("", "Gelu"): Kernel(work=_gelu),
    ("", "Where"): Kernel(work=_where),
    (DOMAIN, "Barrier"): _OVER_FIRST,
    (DOMAIN, "MomentumStep"): Kernel(over=((0, 0), (2, 1))),
    (DOMAIN, "AdamStep"): Kernel(over=((0, 0), (2, 1), (3, 2))),
    (DOMAIN, "AdamWStep"): Kernel(over=((0, 0), (2, 1), (3, 2))),
}
"""By domain and type; "" is ONNX's default domain."""

FORMS: Mapping[tuple[str, str], Kernel] = {(DOMAIN, WEIGHT_GRAD): Kernel(work=_unrolled)}
"""Operators of the undivided program that no kernel computes: what their local forms take."""

PLAIN = Kernel()


def kernel(domain: str, op_type: str) -> Kernel:
    """Returns what the kernel, or the local form, of an operator does with memory."""
    key = ("" if domain == "ai.onnx" else domain, op_type)
    return KERNELS.get(key) or FORMS.get(key, PLAIN)


def call(
    node: ir.Node, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None], itemsize: int
) -> KernelCall:
    """Returns a node as its kernel sees it.

    Args:
        node: The node.
        inputs: Shape of each operand, None where it is absent or unknown.
        outputs: Shape of each result.
        itemsize: Bytes of an element of the first result.
    """
    attributes = {a.name: a.value for a in node.attributes.values()}
    return KernelCall(tuple(inputs), tuple(outputs), itemsize, attributes, _after_bias(node))


def _after_bias(node: ir.Node) -> bool:
    value = node.inputs[0] if node.inputs else None
    made = value.producer() if value is not None else None
    if value is None or made is None or made.op_type != "Add" or len(value.uses()) != 1:
        return False
    return any(v is not None and v.shape is not None and len(v.shape) == 1 for v in made.inputs)

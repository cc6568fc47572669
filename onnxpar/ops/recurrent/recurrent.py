"""RNN, GRU and LSTM: batch and directions may be sharded, the rest must be replicated.

The gates of a step read the complete hidden state of the previous step, through a full matrix: with
a sharded hidden size, every step of every direction would gather the state. Steps follow each
other, and the input size is contracted inside a nonlinear function. That leaves the batch and, in a
bidirectional network, the directions: a device with the backward direction reverses its input.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import ABSENT, REPLICATED_OPERAND, OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.local_helpers import BOOL, global_index
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import recurs
from onnxpar.ops.operator import BY_BODY, OpDef
from onnxpar.ops.recurrent.body import CELLS, activation_lists, recurrent_body
from onnxpar.ops.slots import Roles

X, W, R, B, LENGTHS, H0, C0, P = range(8)
_OPERANDS = {W: "d g i", R: "d g h", B: "d e", LENGTHS: "b", P: "d p"}


def recurrent_rule(view: NodeView) -> OpRule:
    """`t b i, d g i, d g h, d e, b, d b h, d b h, d p -> t d b h, d b h, d b h`.

    Batch is parallel; two directions are special if they have the same activations.
    """
    batch_first = view.attr("layout", 0) == 1
    state = "b d h" if batch_first else "d b h"
    texts = {X: "b t i" if batch_first else "t b i", **_OPERANDS, H0: state, C0: state}
    inputs = [texts[i] if view.has(i) else ABSENT for i in range(view.arity)]
    results = ["b t d h" if batch_first else "t d b h", state, state]
    outputs = [
        text if out.name else REPLICATED_OPERAND
        for text, out in zip(results, view.node.outputs, strict=False)
    ]
    present = {name for text in (*inputs, *outputs) for name in text.split()}
    replicated = " ".join(name for name in "tighep" if name in present)
    replicated += "; special: d" if _two_alike(view) else " d"
    return parse_rule(f"{', '.join(inputs)} -> {', '.join(outputs)}; replicated: {replicated}")


def _two_alike(view: NodeView) -> bool:
    """Whether there are two directions with the same activations."""
    if view.attr("direction", "forward") != "bidirectional":
        return False
    first, second = activation_lists(view)
    return first == second


def recurrent_local(node: LocalNode) -> Sequence[ir.Value]:
    """Runs on local rows; rows that are padding get length 1, which every kernel accepts."""
    inputs = list(node.inputs)
    lengths = inputs[LENGTHS] if len(inputs) > LENGTHS else None
    if lengths is not None:
        inputs[LENGTHS] = node.masked(lengths, LENGTHS, "b", 1)
    if "d" not in node.split_factors("special"):
        return node.copy(inputs)
    return _one_direction(node, inputs)


def _one_direction(node: LocalNode, inputs: list[ir.Value | None]) -> Sequence[ir.Value]:
    """The forward network, on the reversed input if the device has the backward direction."""
    view = node.view
    batch_first = view.attr("layout", 0) == 1
    times, rows = (1, 0) if batch_first else (0, 1)
    shape = node.in_shape(X)
    lengths = inputs[LENGTHS] if len(inputs) > LENGTHS else None
    if lengths is None:
        steps = node.builder.size(shape[times])
        lengths = node.op("Expand", steps, node.builder.sizes([shape[rows]]), shape=[shape[rows]])
    else:
        lengths = node.op("Cast", lengths, dtype=INT64, shape=[shape[rows]], to=int(INT64))
    one = node.builder.const([1])
    backward = node.op("Equal", global_index(node, "d"), one, dtype=BOOL, shape=[1])

    def turned(x: ir.Value, size: Sequence[Dim]) -> ir.Value:
        reversed_ = node.op(
            "ReverseSequence", x, lengths, shape=size, batch_axis=rows, time_axis=times
        )
        return node.op("Where", backward, reversed_, x, dtype=x.dtype, shape=size)

    inputs[X] = turned(node.input(X), shape)
    changed: dict[str, object] = {"direction": "forward"}
    for name in ("activations", "activation_alpha", "activation_beta"):
        values = view.attr(name)
        if values is not None:
            changed[name] = list(values)[: len(values) // 2]
    outputs = list(node.copy(inputs, changed))
    if view.node.outputs[0].name:
        full = node.out_shape(0)
        flat = [s for i, s in enumerate(full) if i != (2 if batch_first else 1)]
        y = turned(node.builder.reshape(outputs[0], flat), flat)
        outputs[0] = node.builder.reshape(y, full)
    return outputs


def _unusual_recurrence(node: ir.Node) -> str | None:
    """Refuses activations, peepholes and orders of operations that cuDNN does not have."""
    for name in ("activation_alpha", "activation_beta", "clip"):
        if name in node.attributes:
            return f"cuDNN has no {name}"
    kind = CELLS[node.op_type]
    known = kind.activations * 2
    given = tuple(a.lower() for a in node.attributes.get_strings("activations", ()))
    if given != known[: len(given)]:
        return f"cuDNN has no activations {', '.join(given)}"
    if node.attributes.get_int("input_forget", 0):
        return "cuDNN does not couple the gates (input_forget)"
    if node.attributes.get_int("linear_before_reset", 1) != 1:
        return "cuDNN applies the reset gate after the product (linear_before_reset)"
    place = kind.peepholes
    if place is not None and len(node.inputs) > place and node.inputs[place] is not None:
        return "cuDNN has no peepholes"
    return None


DEFS = tuple(
    OpDef(
        "",
        op_type,
        7,
        recurrent_rule,
        recurrent_local,
        gradient=BY_BODY,
        cost=recurs,
        body=recurrent_body,
        refused=_unusual_recurrence,
        roles=Roles(weights=(1, 2), vectors=(3, kind.peepholes) if kind.peepholes else (3,)),
    )
    for op_type, kind in CELLS.items()
)

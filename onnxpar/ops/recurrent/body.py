"""The body of RNN, GRU and LSTM, a Scan over the steps, from which their gradients follow.

The products with the input do not depend on each other and are one product for all steps; a step
multiplies only the hidden state. (ONNX's operator specification, RNN, GRU and LSTM since version
7; Hochreiter & Schmidhuber, 1997; Cho et al., 2014.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.control.build_loops import Along, scan
from onnxpar.ops.local_helpers import BOOL

Activation = tuple[str, float | None, float | None]

# Default alpha and beta of the activations that have them.
_ALPHA = {"leakyrelu": 0.01, "thresholdedrelu": 1.0, "hardsigmoid": 0.2, "elu": 1.0}
_BETA = {"hardsigmoid": 0.5}
_TAKES_ALPHA = ("affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu")
_TAKES_BETA = ("affine", "scaledtanh", "hardsigmoid")
_OPERATORS = {
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "relu": "Relu",
    "softsign": "Softsign",
    "softplus": "Softplus",
    "leakyrelu": "LeakyRelu",
    "thresholdedrelu": "ThresholdedRelu",
    "hardsigmoid": "HardSigmoid",
    "elu": "Elu",
}
_KNOWN = (*_OPERATORS, "affine", "scaledtanh")


def activation_lists(view: NodeView) -> tuple[tuple[Activation, ...], ...]:
    """Returns the activations of each direction: name in lower case, alpha, beta."""
    count = 2 if view.attr("direction", "forward") == "bidirectional" else 1
    names = [
        name.lower() for name in view.attr("activations") or CELLS[view.op_type].activations * count
    ]
    alphas = list(view.attr("activation_alpha") or ())
    betas = list(view.attr("activation_beta") or ())
    found: list[Activation] = []
    for name in names:
        alpha = beta = None
        if name in _TAKES_ALPHA:
            alpha = alphas.pop(0) if alphas else _ALPHA.get(name, 1.0)
        if name in _TAKES_BETA:
            beta = betas.pop(0) if betas else _BETA.get(name, 1.0)
        found.append((name, alpha, beta))
    each = len(found) // count
    return tuple(tuple(found[d * each : (d + 1) * each]) for d in range(count))


@dataclass(frozen=True)
class _Emit:
    """Emission within one body or graph."""

    builder: GlobalBuilder

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        first = inputs[0]
        return self.builder.op(op_type, *inputs, shape=self.builder.shape_of(first), **attributes)

    def number(self, value: float, like: ir.Value) -> ir.Value:
        return self.builder.const(np.array(value), like.dtype)

    def matmul(self, x: ir.Value, w: ir.Value) -> ir.Value:
        shape = [*self.builder.shape_of(x)[:-1], self.builder.shape_of(w)[-1]]
        return self.builder.op("MatMul", x, w, shape=shape)

    def split(self, x: ir.Value, count: int, axis: int = -1) -> tuple[ir.Value, ...]:
        """`x` split into equal pieces along an axis of known size."""
        if count == 1:
            return (x,)
        shape = list(self.builder.shape_of(x))
        size = shape[axis]
        assert isinstance(size, int)
        shape[axis] = size // count
        sizes = self.builder.const([size // count] * count)
        return self.builder.ops("Split", [x, sizes], [(x.dtype, shape)] * count, {"axis": axis})

    def transpose(self, x: ir.Value, order: Sequence[int]) -> ir.Value:
        shape = self.builder.shape_of(x)
        return self.builder.op("Transpose", x, shape=[shape[i] for i in order], perm=list(order))

    def reshape(self, x: ir.Value, sizes: Sequence[int], shape: Sequence[Dim]) -> ir.Value:
        """`x` reshaped to `sizes`, in which 0 means unchanged; the result has the shape `shape`."""
        return self.builder.op("Reshape", x, self.builder.const(list(sizes)), shape=shape)

    def activate(self, x: ir.Value, by: Sequence[Activation], clip: float | None) -> ir.Value:
        """Clips `x`, then applies the activation of each direction, which is its first axis."""
        if clip is not None:
            x = self.op("Clip", x, self.number(-clip, x), self.number(clip, x))
        if len(set(by)) == 1:
            return self._activate(x, by[0])
        parts = [self._activate(*pair) for pair in zip(self.split(x, len(by), 0), by, strict=True)]
        return self.builder.op("Concat", *parts, shape=self.builder.shape_of(x), axis=0)

    def _activate(self, x: ir.Value, by: Activation) -> ir.Value:
        name, alpha, beta = by
        if name in _OPERATORS:
            given = {key: v for key, v in (("alpha", alpha), ("beta", beta)) if v is not None}
            return self.op(_OPERATORS[name], x, **given)
        assert alpha is not None and beta is not None
        if name == "affine":
            return self.op("Add", self.op("Mul", x, self.number(alpha, x)), self.number(beta, x))
        inner = self.op("Tanh", self.op("Mul", x, self.number(beta, x)))
        return self.op("Mul", inner, self.number(alpha, x))


@dataclass(frozen=True)
class _Cell:
    """The values and options that all steps share.

    Attributes:
        r: Recurrent weights, [directions, hidden, gates * hidden].
        bias: Biases of input and recurrence, [directions, 2 * gates * hidden], or None.
        peepholes: Peepholes of the gates i, o, f, [directions, 3 * hidden], or None (LSTM).
        activations: f, g, h of each direction.
        after: Whether the reset gate is applied after the product (GRU).
        clip: Bound of the operands of activations.
        coupled: Whether the forget gate is 1 minus the input gate (LSTM).
    """

    r: ir.Value
    bias: ir.Value | None
    peepholes: ir.Value | None
    activations: tuple[tuple[Activation, ...], ...]
    after: bool
    clip: float | None
    coupled: bool

    def activate(self, e: _Emit, x: ir.Value, which: int) -> ir.Value:
        """Activation f, g or h (0, 1, 2)."""
        return e.activate(x, [each[which] for each in self.activations], self.clip)


def _rnn_step(e: _Emit, cell: _Cell, x: ir.Value, states: Sequence[ir.Value]) -> list[ir.Value]:
    return [cell.activate(e, e.op("Add", x, e.matmul(states[0], cell.r)), 0)]


def _gru_step(e: _Emit, cell: _Cell, x: ir.Value, states: Sequence[ir.Value]) -> list[ir.Value]:
    h = states[0]
    xz, xr, xh = e.split(x, 3)
    if cell.after:
        hz, hr, hh = e.split(e.matmul(h, cell.r), 3)
    else:
        rz, rr, rh = e.split(cell.r, 3)
        hz, hr = e.matmul(h, rz), e.matmul(h, rr)
    z = cell.activate(e, e.op("Add", xz, hz), 0)
    r = cell.activate(e, e.op("Add", xr, hr), 0)
    inner = e.op("Mul", r, hh) if cell.after else e.matmul(e.op("Mul", r, h), rh)
    if cell.after and cell.bias is not None:
        # The product with the input contains all of this bias: r (h R + b) = r h R + b + (r - 1) b.
        bias = e.builder.unsqueeze(e.split(cell.bias, 6)[5], [1])
        inner = e.op("Add", inner, e.op("Mul", e.op("Sub", r, e.number(1, r)), bias))
    new = cell.activate(e, e.op("Add", xh, inner), 1)
    # (1 - z) new + z h
    return [e.op("Add", new, e.op("Mul", z, e.op("Sub", h, new)))]


def _lstm_step(e: _Emit, cell: _Cell, x: ir.Value, states: Sequence[ir.Value]) -> list[ir.Value]:
    h, c = states
    gi, go, gf, gc = e.split(e.op("Add", x, e.matmul(h, cell.r)), 4)
    peepholes: Sequence[ir.Value] = ()
    if cell.peepholes is not None:
        peepholes = [e.builder.unsqueeze(p, [1]) for p in e.split(cell.peepholes, 3)]
        gi = e.op("Add", gi, e.op("Mul", c, peepholes[0]))
        gf = e.op("Add", gf, e.op("Mul", c, peepholes[2]))
    i = cell.activate(e, gi, 0)
    if cell.coupled:
        one = e.number(1, i)
        forget = e.builder.op("Sub", one, i, shape=e.builder.shape_of(i))
    else:
        forget = cell.activate(e, gf, 0)
    new = e.op("Mul", i, cell.activate(e, gc, 1))
    new = e.op("Add", e.op("Mul", forget, c), new)
    if peepholes:
        go = e.op("Add", go, e.op("Mul", new, peepholes[1]))
    o = cell.activate(e, go, 0)
    return [e.op("Mul", o, cell.activate(e, new, 2)), new]


CellFn = Callable[[_Emit, _Cell, ir.Value, Sequence[ir.Value]], list[ir.Value]]


@dataclass(frozen=True)
class CellKind:
    """What distinguishes the three recurrent operators.

    Attributes:
        step: Emits one step.
        activations: The activations of one direction, unless the node names others.
        states: The operands that hold the state before the first step.
        peepholes: The operand of the peephole weights; None if the operator has none.
    """

    step: CellFn
    activations: tuple[str, ...]
    states: tuple[int, ...] = (5,)
    peepholes: int | None = None


CELLS: Mapping[str, CellKind] = {
    "RNN": CellKind(_rnn_step, ("tanh",)),
    "GRU": CellKind(_gru_step, ("sigmoid", "tanh")),
    "LSTM": CellKind(_lstm_step, ("sigmoid", "tanh", "tanh"), states=(5, 6), peepholes=7),
}


def recurrent_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """One Scan, which computes both directions if there are two.

    The weights of both directions stay together, so that their gradients have the same layout.

    Raises:
        ModelError: An activation is not one of ONNX's, or a size that must be a number is symbolic.
    """
    view, e = node.view, _Emit(node.builder)
    kind = CELLS[view.op_type]
    lists = activation_lists(view)
    for name in {name for each in lists for name, _, _ in each}:
        if name not in _KNOWN:
            raise node.fail(f"its activation {name!r} has no gradient")
    hidden = node.shape(node.input(2))[-1]
    if not isinstance(hidden, int):
        raise node.fail(f"the hidden size must be a number, got {hidden}")
    batch_first = view.attr("layout", 0) == 1
    x = e.transpose(node.input(0), (1, 0, 2)) if batch_first else node.input(0)
    steps, batch, _ = node.shape(x)
    count = len(lists)
    cell = _Cell(
        e.transpose(node.input(2), (0, 2, 1)),
        node.input(3) if node.has(3) else None,
        node.input(kind.peepholes) if kind.peepholes and node.has(kind.peepholes) else None,
        lists,
        bool(view.attr("linear_before_reset", 0)),
        view.attr("clip"),
        bool(view.attr("input_forget", 0)),
    )
    begin = []
    for operand in kind.states:
        if node.has(operand):
            state = node.input(operand)
            begin.append(e.transpose(state, (1, 0, 2)) if batch_first else state)
        else:
            begin.append(e.builder.zeros([count, batch, hidden], x.dtype))
    ways = [False, True] if count == 2 else [view.attr("direction", "forward") == "reverse"]
    gates = e.split(_gates(node, e, x, count), count, 1)
    *last, y = _run(e, kind.step, cell, gates, begin, _lengths(node, e, steps), ways)
    results: list[ir.Value | None] = [e.transpose(y, (2, 0, 1, 3)) if batch_first else y]
    results += [e.transpose(state, (1, 0, 2)) if batch_first else state for state in last]
    return results


def _gates(node: BodyNode, e: _Emit, x: ir.Value, count: int) -> ir.Value:
    """X W + b for all steps and directions, [steps, directions, batch, gates * hidden]."""
    w = node.input(1)
    rows, size = node.shape(w)[1:]
    steps, batch, _ = node.shape(x)
    if not isinstance(rows, int) or not isinstance(size, int):
        raise node.fail(f"its weights must have a constant shape, got {node.shape(w)}")
    flat = e.transpose(e.reshape(w, [-1, size], [count * rows, size]), (1, 0))
    y = e.matmul(x, flat)
    if node.has(3):
        pairs = e.reshape(node.input(3), [count, 2, rows], [count, 2, rows])
        bias = e.builder.reduce("ReduceSum", pairs, [1], keepdims=True)
        y = e.op("Add", y, e.reshape(bias, [-1], [count * rows]))
    y = e.reshape(y, [0, 0, count, rows], [steps, batch, count, rows])
    return e.transpose(y, (0, 2, 1, 3))


def _lengths(node: BodyNode, e: _Emit, steps: Dim) -> tuple[ir.Value, ir.Value] | None:
    """The numbers of the steps, and the lengths of the rows as int64 [batch, 1]."""
    if not node.has(4):
        return None
    lengths = e.builder.cast(node.input(4), INT64)
    zero, one = map(e.builder.const, (0, 1))
    stop = e.builder.sizes([steps])
    stop = e.builder.op("Squeeze", stop, shape=[])
    numbers = e.builder.op("Range", zero, stop, one, shape=[steps], dtype=INT64)
    return numbers, e.builder.unsqueeze(lengths, [1])


def _run(
    e: _Emit,
    step: CellFn,
    cell: _Cell,
    gates: Sequence[ir.Value],
    begin: Sequence[ir.Value],
    lengths: tuple[ir.Value, ir.Value] | None,
    ways: Sequence[bool],
) -> tuple[ir.Value, ...]:
    """Emits the Scan and returns the last states and all hidden states."""
    count = len(ways)

    def one_step(
        inner: GlobalBuilder, states: Sequence[ir.Value], slices: Sequence[ir.Value]
    ) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
        here = _Emit(inner)
        parts, numbers = slices[:count], slices[count:]
        new = step(here, cell, _join(here, parts), states)
        result = new[0]
        if lengths is not None:
            going = _join(here, [_going(here, number, lengths[1]) for number in numbers])
            zero = here.number(0, result)
            new = [_where(here, going, a, b) for a, b in zip(new, states, strict=True)]
            result = _where(here, going, result, zero)
        return new, here.split(result, count, 0)

    along = [Along(0, reverse) for reverse in ways]
    scanned = list(zip(gates, along, strict=True))
    if lengths is not None:
        scanned += [(lengths[0], a) for a in along]
    made = scan(e.builder, begin, scanned, one_step, along)
    return *made[: len(begin)], _join(e, made[len(begin) :], 1)


def _going(e: _Emit, number: ir.Value, lengths: ir.Value) -> ir.Value:
    """Whether each row has this step, bool [1, batch, 1]."""
    shape = e.builder.shape_of(lengths)
    going = e.builder.op("Less", number, lengths, shape=shape, dtype=BOOL)
    return e.builder.unsqueeze(going, [0])


def _join(e: _Emit, parts: Sequence[ir.Value], axis: int = 0) -> ir.Value:
    if len(parts) == 1:
        return parts[0]
    shape = list(e.builder.shape_of(parts[0]))
    shape[axis] = len(parts)
    return e.builder.op("Concat", *parts, shape=shape, axis=axis)


def _where(e: _Emit, condition: ir.Value, x: ir.Value, other: ir.Value) -> ir.Value:
    shape = e.builder.shape_of(x)
    return e.builder.op("Where", condition, x, other, shape=shape, dtype=x.dtype)

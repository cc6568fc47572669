"""What RNN, GRU and LSTM compute, as a Scan over the steps: for their gradients.

The products with the input do not wait for one another and are one product for all steps; a step
multiplies the hidden state alone. (ONNX's operator specification, RNN, GRU and LSTM since version
7; Hochreiter & Schmidhuber, 1997; Cho et al., 2014.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.analysis.shapes import NodeView
from onnxpar.ops.body import BodyFn, BodyNode
from onnxpar.ops.loops import Along, scan
from onnxpar.passes.builder import INT64
from onnxpar.passes.global_graph import GlobalBuilder
from onnxpar.symbols import Dim

BOOL = ir.DataType.BOOL
Activation = tuple[str, float | None, float | None]

_DEFAULTS = {"RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")}
# Default alpha and beta of the activations that have them.
_ALPHA = {"leakyrelu": 0.01, "thresholdedrelu": 1.0, "hardsigmoid": 0.2, "elu": 1.0}
_BETA = {"hardsigmoid": 0.5}
_TAKES_ALPHA = ("affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu")
_TAKES_BETA = ("affine", "scaledtanh", "hardsigmoid")


def activation_lists(view: NodeView) -> tuple[tuple[Activation, ...], ...]:
    """Returns the activations of each direction: name in lower case, alpha, beta."""
    count = 2 if view.attr("direction", "forward") == "bidirectional" else 1
    kind = view.node.op_type
    names = [name.lower() for name in view.attr("activations") or _DEFAULTS[kind] * count]
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
        """`x` cut into equal pieces along an axis of known size."""
        if count == 1:
            return (x,)
        shape = list(self.builder.shape_of(x))
        whole = shape[axis]
        assert isinstance(whole, int)
        shape[axis] = whole // count
        sizes = self.builder.const(np.full(count, whole // count, np.int64))
        return self.builder.ops("Split", [x, sizes], [(x.dtype, shape)] * count, {"axis": axis})

    def squeeze(self, x: ir.Value, axis: int) -> ir.Value:
        shape = [s for i, s in enumerate(self.builder.shape_of(x)) if i != axis]
        axes = self.builder.const(np.array([axis], np.int64))
        return self.builder.op("Squeeze", x, axes, shape=shape)

    def transpose(self, x: ir.Value, order: Sequence[int]) -> ir.Value:
        shape = self.builder.shape_of(x)
        return self.builder.op("Transpose", x, shape=[shape[i] for i in order], perm=list(order))

    def activate(self, x: ir.Value, by: Activation, clip: float | None) -> ir.Value:
        """An activation, its operand clipped before."""
        name, alpha, beta = by
        if clip is not None:
            x = self.op("Clip", x, self.number(-clip, x), self.number(clip, x))
        simple = {
            "sigmoid": "Sigmoid",
            "tanh": "Tanh",
            "relu": "Relu",
            "softsign": "Softsign",
            "softplus": "Softplus",
        }
        if name in simple:
            return self.op(simple[name], x)
        if name == "leakyrelu":
            return self.op("LeakyRelu", x, alpha=alpha)
        if name == "thresholdedrelu":
            return self.op("ThresholdedRelu", x, alpha=alpha)
        if name == "hardsigmoid":
            return self.op("HardSigmoid", x, alpha=alpha, beta=beta)
        if name == "elu":
            return self.op("Elu", x, alpha=alpha)
        assert alpha is not None and beta is not None
        if name == "affine":
            return self.op("Add", self.op("Mul", x, self.number(alpha, x)), self.number(beta, x))
        inner = self.op("Tanh", self.op("Mul", x, self.number(beta, x)))
        return self.op("Mul", inner, self.number(alpha, x))


_KNOWN = (
    "sigmoid",
    "tanh",
    "relu",
    "softsign",
    "softplus",
    "leakyrelu",
    "thresholdedrelu",
    "hardsigmoid",
    "elu",
    "affine",
    "scaledtanh",
)


@dataclass(frozen=True)
class _Direction:
    """The operands of one direction.

    Attributes:
        r: Recurrent weights, [hidden, gates * hidden].
        rb: Recurrent bias of the last gate where it is added apart (GRU), else None.
        p: Peepholes of the gates i, o, f (LSTM), or nothing.
        activations: f, g, h.
        clip: Bound of the operands of activations.
        coupled: Whether the forget gate is 1 minus the input gate.
    """

    r: ir.Value
    rb: ir.Value | None
    p: tuple[ir.Value, ...]
    activations: tuple[Activation, ...]
    clip: float | None
    coupled: bool


def _rnn_step(e: _Emit, d: _Direction, x: ir.Value, states: Sequence[ir.Value]) -> list[ir.Value]:
    total = e.op("Add", x, e.matmul(states[0], d.r))
    return [e.activate(total, d.activations[0], d.clip)]


def _gru_step(e: _Emit, d: _Direction, x: ir.Value, states: Sequence[ir.Value]) -> list[ir.Value]:
    h = states[0]
    f, g = d.activations
    xz, xr, xh = e.split(x, 3)
    rz, rr, rh = e.split(d.r, 3)
    if d.rb is not None:
        hz, hr, hh = e.split(e.matmul(h, d.r), 3)
    else:
        hz, hr, hh = e.matmul(h, rz), e.matmul(h, rr), h
    z = e.activate(e.op("Add", xz, hz), f, d.clip)
    r = e.activate(e.op("Add", xr, hr), f, d.clip)
    if d.rb is not None:
        inner = e.op("Mul", r, e.op("Add", hh, d.rb))
    else:
        inner = e.matmul(e.op("Mul", r, hh), rh)
    new = e.activate(e.op("Add", xh, inner), g, d.clip)
    # (1 - z) new + z h
    return [e.op("Add", new, e.op("Mul", z, e.op("Sub", h, new)))]


def _lstm_step(e: _Emit, d: _Direction, x: ir.Value, states: Sequence[ir.Value]) -> list[ir.Value]:
    h, c = states
    f, g, last = d.activations
    gi, go, gf, gc = e.split(e.op("Add", x, e.matmul(h, d.r)), 4)
    if d.p:
        gi = e.op("Add", gi, e.op("Mul", c, d.p[0]))
        gf = e.op("Add", gf, e.op("Mul", c, d.p[2]))
    i = e.activate(gi, f, d.clip)
    forget = (
        e.builder.op("Sub", e.number(1, i), i, shape=e.builder.shape_of(i), dtype=i.dtype)
        if d.coupled
        else e.activate(gf, f, d.clip)
    )
    cell = e.op("Mul", i, e.activate(gc, g, d.clip))
    cell = e.op("Add", e.op("Mul", forget, c), cell)
    if d.p:
        go = e.op("Add", go, e.op("Mul", cell, d.p[1]))
    o = e.activate(go, f, d.clip)
    return [e.op("Mul", o, e.activate(cell, last, d.clip)), cell]


StepFn = Callable[[_Emit, _Direction, ir.Value, Sequence[ir.Value]], list[ir.Value]]
_STEPS: Mapping[str, StepFn] = {"RNN": _rnn_step, "GRU": _gru_step, "LSTM": _lstm_step}


def recurrent_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """One Scan for each direction.

    Raises:
        ModelError: An activation is none of ONNX's, or a size that must be known is not.
    """
    view, e = node.view, _Emit(node.builder)
    kind = view.node.op_type
    lists = activation_lists(view)
    for name in {name for each in lists for name, _, _ in each}:
        if name not in _KNOWN:
            raise node.fail(f"its activation {name!r} has no gradient")
    count = len(lists)
    hidden = node.shape(node.input(2))[-1]
    if not isinstance(hidden, int):
        raise node.fail(f"the hidden size must be a number, got {hidden}")
    batch_first = view.attr("layout", 0) == 1
    x = e.transpose(node.input(0), (1, 0, 2)) if batch_first else node.input(0)
    steps, batch, _ = node.shape(x)
    lengths = _lengths(node, e, steps, batch)
    states = [_initial(node, e, index, batch_first) for index in _states(kind)]
    ways = ["forward", "reverse"] if count == 2 else [view.attr("direction", "forward")]
    outputs: list[list[ir.Value]] = []
    for index, way in enumerate(ways):
        xw, direction = _direction(node, e, x, index, lists[index])
        begin = [_begin(e, whole, index, count, xw, (batch, hidden)) for whole in states]
        made = _run(e, _STEPS[kind], direction, xw, begin, lengths, way == "reverse")
        outputs.append([made[-1], *made[:-1]])
    results: list[ir.Value | None] = []
    for place, out in enumerate(view.node.outputs):
        if not out.name:
            results.append(None)
            continue
        axis = 1 if place == 0 else 0
        parts = [_insert(e, each[place], axis) for each in outputs]
        shape = list(node.shape(parts[0]))
        shape[axis] = count
        y = parts[0] if count == 1 else e.builder.op("Concat", *parts, shape=shape, axis=axis)
        if batch_first:
            y = e.transpose(y, (2, 0, 1, 3) if place == 0 else (1, 0, 2))
        results.append(y)
    return results


def _states(kind: str) -> tuple[int, ...]:
    return (5, 6) if kind == "LSTM" else (5,)


def _insert(e: _Emit, x: ir.Value, axis: int) -> ir.Value:
    return e.builder.unsqueeze(x, [axis])


def _initial(node: BodyNode, e: _Emit, index: int, batch_first: bool) -> ir.Value | None:
    if not node.has(index):
        return None
    value = node.input(index)
    return e.transpose(value, (1, 0, 2)) if batch_first else value


def _begin(
    e: _Emit,
    whole: ir.Value | None,
    index: int,
    count: int,
    like: ir.Value,
    shape: Sequence[Dim],
) -> ir.Value:
    if whole is not None:
        return e.squeeze(e.split(whole, count, 0)[index], 0)
    zero = e.number(0, like)
    return e.builder.op("Expand", zero, e.builder.sizes(shape), shape=shape)


def _direction(
    node: BodyNode, e: _Emit, x: ir.Value, index: int, activations: tuple[Activation, ...]
) -> tuple[ir.Value, _Direction]:
    """The product of the input with the weights of a direction, biases added, and the rest."""
    view, kind = node.view, node.view.node.op_type
    count = 2 if view.attr("direction", "forward") == "bidirectional" else 1

    def part(operand: int) -> ir.Value:
        return e.squeeze(e.split(node.input(operand), count, 0)[index], 0)

    w, r = (e.transpose(part(i), (1, 0)) for i in (1, 2))
    xw = e.matmul(x, w)
    apart: ir.Value | None = None
    if node.has(3):
        wb, rb = e.split(part(3), 2)
        if kind == "GRU" and view.attr("linear_before_reset", 0):
            gates = e.split(rb, 3)
            wbs = e.split(wb, 3)
            shape = e.builder.shape_of(wb)
            pair = [e.op("Add", wbs[i], gates[i]) for i in (0, 1)]
            bias = e.builder.op("Concat", *pair, wbs[2], shape=shape, axis=0)
            apart = gates[2]
        else:
            bias = e.op("Add", wb, rb)
        xw = e.op("Add", xw, bias)
    elif kind == "GRU" and view.attr("linear_before_reset", 0):
        hidden = node.shape(node.input(2))[-1]
        apart = e.builder.const(np.zeros(int(hidden)), x.dtype)
    peepholes = e.split(part(7), 3) if kind == "LSTM" and node.has(7) else ()
    clip = view.attr("clip")
    coupled = kind == "LSTM" and bool(view.attr("input_forget", 0))
    return xw, _Direction(r, apart, peepholes, activations, clip, coupled)


def _lengths(node: BodyNode, e: _Emit, steps: Dim, batch: Dim) -> tuple[ir.Value, ir.Value] | None:
    """The numbers of the steps, and the length of each row as int64 [batch, 1]."""
    if not node.has(4):
        return None
    lengths = e.builder.cast(node.input(4), INT64)
    zero, one = (e.builder.const(np.array(n, np.int64)) for n in (0, 1))
    stop = e.builder.sizes([steps])
    stop = e.squeeze(stop, 0)
    numbers = e.builder.op("Range", zero, stop, one, shape=[steps], dtype=INT64)
    return numbers, e.builder.unsqueeze(lengths, [1])


def _run(
    e: _Emit,
    step: StepFn,
    direction: _Direction,
    xw: ir.Value,
    begin: Sequence[ir.Value],
    lengths: tuple[ir.Value, ir.Value] | None,
    reverse: bool,
) -> tuple[ir.Value, ...]:
    """Emits the Scan of one direction and returns the last states and all hidden states."""
    along = Along(0, reverse)

    def one_step(
        inner: GlobalBuilder, states: Sequence[ir.Value], slices: Sequence[ir.Value]
    ) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
        here = _Emit(inner)
        new = step(here, direction, slices[0], states)
        result = new[0]
        if lengths is not None:
            shape = inner.shape_of(lengths[1])
            going = inner.op("Less", slices[1], lengths[1], shape=shape, dtype=BOOL)
            zero = here.number(0, result)
            new = [_where(here, going, a, b) for a, b in zip(new, states, strict=True)]
            result = _where(here, going, result, zero)
        return new, [result]

    scanned = [(xw, along)] + ([(lengths[0], along)] if lengths is not None else [])
    return scan(e.builder, begin, scanned, one_step, [along])


def _where(e: _Emit, condition: ir.Value, x: ir.Value, other: ir.Value) -> ir.Value:
    shape = e.builder.shape_of(x)
    return e.builder.op("Where", condition, x, other, shape=shape, dtype=x.dtype)


BODIES: Mapping[str, BodyFn] = dict.fromkeys(_STEPS, recurrent_body)

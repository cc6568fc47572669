"""Finds what exporters write in several operators: RMS norms, rotary positions, gated units.

The same nodes are found in an undivided graph, for gradients in one operator, and in that of a
rank, for operators in place of the nodes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.ops.function import Function
from onnxpar.ops.fused.activation_gradients import GATED_GELU, GATED_GELU_TANH, GATED_SILU

FindMaker = Callable[[ir.Value | None], ir.Node | None]


@dataclass(frozen=True)
class Written:
    """A graph in which nodes are looked for.

    Attributes:
        maker: Returns the node that makes a value, if it may be one of those that are found.
        shape: Returns the shape of a value; empty if it is unknown.
        varying: The values that are not what they are in the file, since they depend on what is
            trained.
    """

    maker: FindMaker
    shape: Callable[[ir.Value], Sequence[Dim]]
    varying: Collection[ir.Value] = ()

    def node(self, value: ir.Value | None, op_type: str) -> ir.Node | None:
        """The node of ONNX's operator that makes a value, if it does."""
        maker = self.maker(value)
        found = maker is not None and (maker.op_type, maker.domain) == (op_type, "")
        return maker if found else None

    def operands(self, value: ir.Value | None, op_type: str) -> tuple[ir.Value, ...]:
        """The operands of the node of an operator that makes a value; none if none does."""
        maker = self.node(value, op_type)
        return () if maker is None else tuple(v for v in maker.inputs if v is not None)

    def number(self, value: ir.Value) -> float | None:
        """The number that a constant is, unless it is trained."""
        return None if value in self.varying else number_of(value)


def number_of(value: ir.Value | None) -> float | None:
    """The number that a constant of one element is, of at most one dim."""
    tensor = None if value is None else value.const_value
    if tensor is None or tensor.size != 1 or len(tensor.shape) > 1:
        return None
    return float(np.asarray(tensor.numpy()).reshape(()))


def either_way(values: Sequence[ir.Value]) -> Sequence[tuple[ir.Value, ir.Value]]:
    """Both orders of two values; none if there are not two."""
    return [(values[0], values[1]), (values[1], values[0])] if len(values) == 2 else []


def _integers(value: ir.Value | None) -> list[int] | None:
    """The elements of a constant of a few integers."""
    tensor = None if value is None else value.const_value
    if tensor is None or tensor.size > 8:
        return None
    return [int(n) for n in np.asarray(tensor.numpy()).reshape(-1)]


# -- RMS normalisation (Zhang and Sennrich, 2019) ------------------------------------------------


@dataclass(frozen=True)
class Normal:
    """A product x · inverse, where inverse is 1 / sqrt(mean(x²) + epsilon) over the last dim.

    Attributes:
        x: The first factor.
        inverse: The second one.
        epsilon: The number that is added.
        inner: The values between x and the inverse.
    """

    x: ir.Value
    inverse: ir.Value
    epsilon: float
    inner: tuple[ir.Value, ...]


def find_normal(graph: Written, value: ir.Value) -> Normal | None:
    """Returns what a value is an RMS normalisation of, if it is one."""
    for x, inverse in either_way(graph.operands(value, "Mul")):
        root = graph.operands(inverse, "Reciprocal")
        if not root:
            quotient = graph.operands(inverse, "Div")
            root = quotient[1:] if quotient and graph.number(quotient[0]) == 1.0 else ()
        inside = graph.operands(root[0], "Sqrt") if root else ()
        for mean, added in either_way(graph.operands(inside[0], "Add") if inside else ()):
            epsilon, square = graph.number(added), _averaged(graph, mean)
            if epsilon is not None and square is not None and _is_square(graph, square, x):
                return Normal(x, inverse, epsilon, (root[0], inside[0], mean, square))
    return None


def _averaged(graph: Written, mean: ir.Value) -> ir.Value | None:
    """The value of which a value is the mean over the last dim, which stays as 1."""
    reduced = graph.node(mean, "ReduceMean")
    if reduced is None or len(reduced.inputs) < 2 or reduced.inputs[0] is None:
        return None
    axes, value = _integers(reduced.inputs[1]), reduced.inputs[0]
    last = axes is not None and len(axes) == 1 and axes[0] in _last(graph, value)
    return value if last and reduced.attributes.get_int("keepdims", 1) == 1 else None


def _is_square(graph: Written, value: ir.Value, x: ir.Value) -> bool:
    power = graph.operands(value, "Pow")
    if power:
        return power[0] is x and graph.number(power[1]) == 2.0
    factors = graph.operands(value, "Mul")
    return len(factors) == 2 and all(factor is x for factor in factors)


# -- rotary positions (Su et al., 2021) ----------------------------------------------------------


@dataclass(frozen=True)
class Rotation:
    """A sum x · cos + turned(x) · sin, where turned(x) has rows (-b, a) for rows (a, b) of x.

    Attributes:
        x: What is turned.
        cos: The cosines of the angles, one for each element of a row.
        sin: The sines.
        along: The term x · cos.
        inner: The values between x and the sum, among them both terms.
    """

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    along: ir.Value
    inner: tuple[ir.Value, ...]


def find_rotation(graph: Written, terms: Sequence[ir.Value]) -> Rotation | None:
    """Returns the rotation that the sum of two terms is, as transformers writes it, or None."""
    for along, across in either_way(terms):
        for turned, sin in either_way(graph.operands(across, "Mul")):
            for x, cos in either_way(graph.operands(along, "Mul")):
                between = _between(graph, x, turned)
                shapes = [tuple(graph.shape(v)) for v in (along, across)]
                angles = [tuple(graph.shape(v)) for v in (cos, sin)]
                shape = tuple(graph.shape(x))
                fits = shapes == [shape] * 2 and angles == [angles[0]] * 2
                if between is not None and fits and angles[0][-1:] == shape[-1:]:
                    return Rotation(x, cos, sin, along, (along, across, turned, *between))
    return None


def _between(graph: Written, x: ir.Value, turned: ir.Value) -> tuple[ir.Value, ...] | None:
    """The values between x and turned(x), or None if the second is not made from the first.

    Both may be casts, as in mixed precision.
    """
    cast, given = (graph.operands(value, "Cast") for value in (turned, x))
    halves = _turned(graph, cast[0] if cast else turned)
    if halves is None or halves[0] is not (given[0] if cast and given else x):
        return None
    return (*cast, *halves[1:])


def _turned(graph: Written, value: ir.Value) -> tuple[ir.Value, ...] | None:
    """The value of whose rows (a, b) a value has (-b, a); behind it a, b and -b."""
    joined = graph.node(value, "Concat")
    if joined is None or len(joined.inputs) != 2:
        return None
    negative, a = joined.inputs
    (b,) = graph.operands(negative, "Neg") or (None,)
    if joined.attributes.get_int("axis", 0) not in _last(graph, value):
        return None
    first, second = _half(graph, a), _half(graph, b)
    if first is None or second is None or (first[1], second[1]) != (0, 1):
        return None
    assert a is not None and b is not None and negative is not None
    return (first[0], a, b, negative) if first[0] is second[0] else None


def _last(graph: Written, value: ir.Value) -> tuple[int, int]:
    """Both numbers of the last dim of a value."""
    return -1, len(graph.shape(value)) - 1


def _half(graph: Written, value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """The value of which a value is a half along the last dim, and which half it is."""
    if value is None:
        return None
    maker = graph.node(value, "Split") or graph.node(value, "Slice")
    whole = None if maker is None else maker.inputs[0]
    if maker is None or whole is None:
        return None
    if not graph.shape(whole) or not graph.shape(value):
        return None
    width, half = graph.shape(whole)[-1], graph.shape(value)[-1]
    if not isinstance(half, int) or 2 * half != width:
        return None
    if maker.op_type == "Split":
        last = maker.attributes.get_int("axis", 0) in _last(graph, whole)
        return (whole, value.index() or 0) if last and len(maker.outputs) == 2 else None
    starts, _, axes, steps = [*maker.inputs[1:], None, None][:4]
    cut, along = _integers(starts), _integers(axes)
    if along is None or len(along) != 1 or along[0] not in _last(graph, whole):
        return None
    if cut is None or (steps is not None and _integers(steps) != [1]):
        return None
    places = {0: 0, half: 1, -half: 1, -width: 0}
    return (whole, places[cut[0]]) if cut[0] in places else None


# -- activations ---------------------------------------------------------------------------------


def find_sigmoid(graph: Written, value: ir.Value) -> ir.Value | None:
    """Returns the operand of the Sigmoid that makes a value, if one does."""
    found = graph.operands(value, "Sigmoid")
    return found[0] if found else None


@dataclass(frozen=True)
class Gate:
    """A product act(x) · up, where act is SiLU or Gelu (Shazeer, 2020).

    Attributes:
        x: The gate before its activation.
        up: The other factor.
        function: The operator that computes the product from both.
        inner: The values between x and the product; the first is act(x).
    """

    x: ir.Value
    up: ir.Value
    function: Function
    inner: tuple[ir.Value, ...]


def find_gate(graph: Written, factors: Sequence[ir.Value]) -> Gate | None:
    """Returns what the product of two factors of one shape is, if the first or second is act(x)."""
    for active, up in either_way(factors):
        shape = tuple(graph.shape(active))
        if active is up or not shape or shape != tuple(graph.shape(up)):
            continue
        gelu = graph.node(active, "Gelu")
        if gelu is not None and gelu.inputs[0] is not None:
            tanh = gelu.attributes.get_string("approximate", "none") == "tanh"
            return Gate(gelu.inputs[0], up, GATED_GELU_TANH if tanh else GATED_GELU, (active,))
        for x, share in either_way(graph.operands(active, "Mul")):
            if find_sigmoid(graph, share) is x:
                return Gate(x, up, GATED_SILU, (active, share))
    return None

"""The arithmetic operations and bytes of one device's share of a node.

The default (`by_rule`) counts a multiplication and an addition for every combination of factors if
two operands share a factor that no result has, as in MatMul and Einsum. Otherwise it counts one
operation for each element of the largest tensor. All operands are read and all results written
once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from onnxpar.core.rule import ANY, OpRule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView

Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class Share:
    """A device's share of a node.

    Sizes are numbers; they may be expressions if only operations are counted, not bytes
    (`onnxpar.cost.flops`).

    Attributes:
        rule: The node's rule.
        view: The node's attributes and global shapes.
        factors: Local size of each factor.
        inputs: Local shape of each operand; None if it is absent or its elements are not read.
        outputs: Local shape of each result.
        input_bytes: Bytes of each local operand; 0 if its shape is None.
        output_bytes: Bytes of each local result.
    """

    rule: OpRule
    view: NodeView
    factors: Mapping[str, Dim]
    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape, ...]
    input_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]

    @property
    def bytes(self) -> float:
        """Bytes of all operands and results."""
        return sum(self.input_bytes) + sum(self.output_bytes)

    def input(self, index: int) -> Shape:
        """Local shape of an operand; () if it is absent."""
        return (self.inputs[index] if index < len(self.inputs) else None) or ()


@dataclass(frozen=True)
class Cost:
    """Arithmetic operations, and bytes read and written; both are 0 for a view."""

    flops: float | Dim
    traffic: float


CostFn = Callable[[Share], Cost]


def by_rule(share: Share) -> Cost:
    """Counts by the rule's factors, as the module says."""
    if contracts(share):
        return Cost(2 * prod(share.factors.values()), share.bytes)
    shapes = [s for s in (*share.inputs, *share.outputs) if s is not None]
    return Cost(float(max(map(prod, shapes), default=0)), share.bytes)


def contracts(share: Share) -> bool:
    """Whether two operands share a factor that no result has."""
    rule = share.rule
    made = {f for o in rule.outputs for names in o.dims for f in names}
    read = [{f for names in i.dims for f in names} for i in rule.inputs if i.mode != ANY]
    return any(f not in made and sum(f in r for r in read) > 1 for f in share.factors)


def view_only(share: Share) -> Cost:
    """A view of its operand: it computes nothing and moves nothing."""
    return Cost(0.0, 0.0)


def moves(share: Share) -> Cost:
    """All is read and written once, and nothing computed."""
    return Cost(0.0, share.bytes)


def selects(share: Share) -> Cost:
    """Reads at most as much of each operand as it writes: rows of a table, a part of a tensor."""
    written = sum(share.output_bytes)
    return Cost(0.0, written + sum(min(size, written) for size in share.input_bytes))


def convolves(image: int | None, weight: int | None) -> CostFn:
    """Each element of an image is multiplied by the weights of its channel.

    Args:
        image: Operand of the image; None for the result.
        weight: Operand of the weights, whose first dim is the channels of the image; None for the
            result.
    """

    def cost(share: Share) -> Cost:
        many = share.outputs[0] if image is None else share.input(image)
        kernel = share.outputs[0] if weight is None else share.input(weight)
        return Cost(2 * prod(many) * prod(kernel[1:]), share.bytes)

    return cost


def attends(past: int) -> CostFn:
    """Queries are multiplied by all keys, and scores by all values; operands 0 and 1 are q and k.

    Args:
        past: Operand of the keys of earlier positions, if there are any.
    """

    def cost(share: Share) -> Cost:
        made = prod(share.outputs[0])
        separate = len(share.input(1)) > 1
        met = share.input(1)[-2] if separate else share.input(0)[1]
        if len(share.input(past)) > 2:
            met += share.input(past)[-2]
        return Cost(2 * met * ((prod(share.input(0)) if separate else made) + made), share.bytes)

    return cost


def recurs(share: Share) -> Cost:
    """Each step multiplies by the weights of the input and of the state; see `recurrent_rule`."""
    size = {name: share.factors.get(name, 1) for name in "tbdgih"}
    steps = size["t"] * size["b"] * size["d"]
    return Cost(2 * steps * size["g"] * (size["i"] + size["h"]), share.bytes)


def keeps_state(share: Share) -> Cost:
    """Each key writes a matrix of the state with its value, and each query reads it."""
    values = share.factors.get("e", 1)
    return Cost(4 * prod(share.input(0)) * values, share.bytes)


def routes(*weights: int, bits: int = 8) -> CostFn:
    """Each token is multiplied by the weights of its experts.

    Args:
        *weights: Operands that are weights; their first dim is the experts.
        bits: Bits of a weight's element, unless the attribute `expert_weight_bits` gives them; 8 if
            elements are not packed.
    """

    def cost(share: Share) -> Cost:
        tokens = prod(share.input(0)[:-1])
        packed = 8 // int(share.view.attr("expert_weight_bits", bits))
        one = sum(prod(share.input(w)[1:]) for w in weights if share.input(w))
        return Cost(2 * tokens * int(share.view.attr("k", 1)) * one * packed, share.bytes)

    return cost

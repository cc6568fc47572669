"""The view and the builder of a gradient: `GradNode`.

A gradient gets the cotangents of a node's results and returns those of its operands (reverse-mode
automatic differentiation on the undivided graph; the cotangent of y is ∂loss/∂y and has the shape
of y). It may read the node's operands and results, ask for further outputs of the forward operator
(statistics, masks), and emit any operator that has an `OpDef`. It emits no collectives: its nodes
are partitioned later, like all others.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx_ir as ir

from onnxpar.core.errors import RuleError
from onnxpar.core.symbols import Dim, dim_str
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.ops.emitted_node import EmittedNode
from onnxpar.ops.function import Function


class InnerGradients(Protocol):
    """Differentiates the nodes of a body, for the gradients of control flow."""

    def expand(
        self, builder: GlobalBuilder, variables: Sequence[ir.Value], results: Sequence[ir.Value]
    ) -> None:
        """Replaces those nodes of the builder's graph whose gradient is that of their body.

        Args:
            builder: The builder of the body's graph.
            variables: The values to differentiate by.
            results: The values to differentiate.
        """

    def differentiate(
        self,
        builder: GlobalBuilder,
        cotangents: Mapping[ir.Value, ir.Value],
        variables: Sequence[ir.Value],
    ) -> dict[ir.Value, ir.Value]:
        """Appends the gradient of the nodes of the builder's graph.

        Args:
            builder: The builder of the body's graph.
            cotangents: The cotangent of each result that has one.
            variables: The values to differentiate by: inputs of the body or values of outer graphs.

        Returns:
            The cotangent of each variable on which a result with a cotangent depends.
        """


@dataclass(frozen=True)
class GradNode(EmittedNode[GlobalBuilder]):
    """A node of the undivided graph, with the cotangents of its results.

    Attributes:
        view: The node, with its shapes and constants.
        builder: The builder.
        cotangents: Cotangent of each output, with its shape and dtype; None if the loss does not
            depend on that output.
        wanted: Indices of the operands whose cotangent is needed; others may be omitted.
        varying: The values of the node's graph that depend on what is differentiated by.
        inner: Differentiates bodies.
    """

    cotangents: tuple[ir.Value | None, ...]
    wanted: frozenset[int]
    varying: Collection[ir.Value]
    inner: InnerGradients

    # -- the node --------------------------------------------------------------------------------

    def output(self, index: int = 0) -> ir.Value:
        """Result `index` of the forward node."""
        return self.view.node.outputs[index]

    def further_output(
        self, index: int, dtype: ir.DataType | None, shape: Sequence[Dim]
    ) -> ir.Value:
        """Result `index` of the forward node, which is added if the node lacks it.

        This serves statistics that the operator computes anyway (LayerNormalization's mean and
        inverse deviation, Dropout's mask, the log-probabilities of SoftmaxCrossEntropyLoss).
        """
        node = self.view.node
        if len(node.outputs) <= index:
            node.resize_outputs(index + 1)
        value = node.outputs[index]
        if not value.name:
            value.name = self.builder.fresh(f"{self.view.name}:{index}")
            self.builder.declare(value, dtype, shape)
        return value

    def cotangent(self, index: int = 0) -> ir.Value:
        """Cotangent of result `index`; RuleError if the loss does not depend on it."""
        value = self.cotangents[index]
        if value is None:
            raise self.fail(
                f"its gradient needs the cotangent of output {index}, but the loss does not "
                "depend on that output",
                RuleError,
            )
        return value

    def wants(self, index: int) -> bool:
        """Whether the cotangent of input `index` is needed."""
        return index in self.wanted

    # -- emission --------------------------------------------------------------------------------

    def fused(self, function: Function, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Emits a fused gradient with one output, which has the shape of the first input."""
        return self.op(function.name, *inputs, domain=DOMAIN, **attributes)

    def unbroadcast(self, x: ir.Value, index: int) -> ir.Value:
        """Sums `x`, which has a shape that input `index` was broadcast to, to the input's shape.

        Raises:
            ModelError: It is unknown before the model runs whether a dim is 1.
        """
        target = self.input(index)
        want, have = self.shape(target), self.shape(x)
        extra = len(have) - len(want)
        axes = list(range(extra))
        for position, size in enumerate(want):
            broadcast = have[extra + position]
            if size == 1 and broadcast != 1:
                axes.append(extra + position)
            elif not (
                isinstance(size, int)
                or self.table.equal(size, broadcast)
                or self.table.one_only_with(size, broadcast)
            ):
                raise self.fail(
                    f"dim {position} of input {index} is {dim_str(size)} and is combined with "
                    f"{dim_str(broadcast)}: a gradient needs to know whether it is broadcast"
                )
        if axes:
            x = self.builder.reduce("ReduceSum", x, axes, keepdims=extra == 0)
        return self.builder.reshape_like(x, target)


@dataclass(frozen=True)
class Placed:
    """A cotangent that is zero outside of one piece along an axis.

    Pieces of one value are joined with one another before zeros are put between them.

    Attributes:
        piece: The piece.
        axis: The axis.
        start: Its first index along the axis, counted from the front.
    """

    piece: ir.Value
    axis: int
    start: Dim


@dataclass(frozen=True)
class Through:
    """The cotangent of an earlier value, given in place of that of an operand made from it.

    So one gradient serves several nodes, of which it is the last one's: those that make the operand
    from the earlier value are not differentiated for this use of the operand.

    Attributes:
        value: The earlier value.
        cotangent: Its cotangent by this use.
    """

    value: ir.Value
    cotangent: ir.Value


Gradient = Callable[[GradNode], Sequence[ir.Value | Placed | Through | None]]

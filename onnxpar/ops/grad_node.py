"""What a gradient rule sees and may emit: `GradNode`.

A rule gets the cotangents of a node's outputs and returns those of its inputs (reverse-mode
automatic differentiation on the global graph; the cotangent of y is ∂loss/∂y, shaped as y). It may
read the node's operands and results, ask for further outputs that the forward operator offers
(statistics, masks), and emit any operator that has an `OpDef`. Collectives never occur: what it
emits is divided later, as everything else is.
"""

from collections.abc import Callable, Mapping, Sequence
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
        """Replaces the nodes of the builder's graph that are differentiated by their body.

        Args:
            builder: Over the body.
            variables: What is differentiated by.
            results: What is differentiated.
        """

    def differentiate(
        self,
        builder: GlobalBuilder,
        cotangents: Mapping[ir.Value, ir.Value],
        variables: Sequence[ir.Value],
    ) -> dict[ir.Value, ir.Value]:
        """Appends the gradient of the nodes of the builder's graph.

        Args:
            builder: Over the body.
            cotangents: The cotangent of each result that has one.
            variables: What to differentiate by: inputs of the body, or values of outer graphs.

        Returns:
            The cotangent of each variable on which a result with a cotangent depends.
        """


@dataclass(frozen=True)
class GradNode(EmittedNode[GlobalBuilder]):
    """A node of the global graph whose cotangents are known.

    Attributes:
        view: The node and what is known of it.
        builder: Where nodes are emitted.
        cotangents: Cotangent of each output, of its shape and dtype; None where the loss does not
            depend on it.
        wanted: Indices of the inputs whose cotangent is needed; others may be left out.
        inner: Differentiates bodies.
    """

    cotangents: tuple[ir.Value | None, ...]
    wanted: frozenset[int]
    inner: InnerGradients

    # -- the node --------------------------------------------------------------------------------

    def output(self, index: int = 0) -> ir.Value:
        """Result `index` of the forward node."""
        return self.view.node.outputs[index]

    def further_output(
        self, index: int, dtype: ir.DataType | None, shape: Sequence[Dim]
    ) -> ir.Value:
        """Result `index` of the forward node, which is made to have it if it does not yet.

        For statistics that the operator computes anyway (LayerNormalization's mean and inverse
        deviation, Dropout's mask, the log-probabilities of SoftmaxCrossEntropyLoss).
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
        """Cotangent of result `index`, which must not be None."""
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
        """Emits a fused gradient of one output, shaped as the first input."""
        return self.op(function.name, *inputs, domain=DOMAIN, **attributes)

    def unbroadcast(self, x: ir.Value, index: int) -> ir.Value:
        """Sums `x`, shaped as a broadcast of input `index`, down to the shape of that input.

        Dims that the input does not have are summed away, dims of size 1 summed and kept.

        Raises:
            ModelError: It is unknown before the model runs whether a dim is 1.
        """
        target = self.input(index)
        want, have = self.shape(target), self.shape(x)
        extra = len(have) - len(want)
        axes = list(range(extra))
        for position, size in enumerate(want):
            whole = have[extra + position]
            if size == 1 and whole != 1:
                axes.append(extra + position)
            elif isinstance(size, int) or self.builder.table.equal(size, whole):
                continue
            else:
                raise self.view.fail(
                    f"dim {position} of input "
                    f"{index} is {dim_str(size)} and is combined with {dim_str(whole)}: a "
                    "gradient needs to know whether it is broadcast"
                )
        if axes:
            x = self.builder.reduce("ReduceSum", x, axes, keepdims=extra == 0)
        return self.builder.reshape_like(x, target)


Gradient = Callable[[GradNode], Sequence[ir.Value | None]]

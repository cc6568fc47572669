"""What an operator must say to be sharded: `OpDef`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.rule import OpRule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.body_node import BodyFn
from onnxpar.ops.function import Function
from onnxpar.ops.grad_node import Gradient
from onnxpar.ops.local_node import LocalNode, copy_node
from onnxpar.ops.node_cost import CostFn
from onnxpar.ops.old_node import Upgrade
from onnxpar.ops.sizes.computed_sizes import ValuesFn
from onnxpar.ops.slots import (
    FLOAT32,
    NO_ROLES,
    PLAIN,
    DrawsFn,
    Folding,
    InferFn,
    Kernel,
    Precision,
    Roles,
    never,
)

RuleFn = Callable[[NodeView], OpRule]
LocalFn = Callable[[LocalNode], Sequence[ir.Value]]
IndicesFn = Callable[[NodeView], Iterable[tuple[int, Dim, Dim, int | None]]]


@dataclass(frozen=True)
class Missing:
    """A slot that is not filled, and why."""

    reason: str


@dataclass(frozen=True)
class NotDifferentiable(Missing):
    """Of a gradient that is no gap: nothing flows back through the operator, by what it is."""


@dataclass(frozen=True)
class ByBody:
    """Of a gradient that is that of the operator's body.

    A node on a path from what is trained to the loss is replaced by its body before it is
    differentiated; elsewhere the operator's own rule divides it.
    """


BY_BODY = ByBody()
UNWRITTEN = Missing("it has no gradient rule")
NOT_DIFFERENTIABLE = NotDifferentiable("not differentiable")
FOR_RANKS = NotDifferentiable("it is only in the graphs of ranks")
FROM_RULE = Missing("from the rule's factors")


@dataclass(frozen=True)
class OpDef:
    """What an operator must say: how it is split, written for one device, differentiated, priced.

    Attributes:
        domain: "" for ONNX's default domain.
        op_type: Name of the operator.
        since_version: First opset version for which this definition holds.
        rule: Returns the sharding rule of a node.
        local: Emits the node's local form; the default copies the node as it is, which is right
            where the rule's parallel factors and partial reductions say all.
        gradient: Emits the gradient, or BY_BODY, or why there is none.
        cost: Counts what a device computes and moves for its share; else why the default holds.
        keeps_zero: Whether the padding of the outputs is zero where that of all inputs is.
        indices: Returns which operands are indices, as `(operand, least, greatest, ignored)`: the
            range that its elements must lie in, and one element that may lie outside (None: none).
        body: Emits what the operator does in operators that have rules; None where the function
            body of ONNX's own schema says it, if the schema has one.
        infer: Infers the shapes of a node's results where `onnx-shape-inference` says more, or
            less, than is true; None where it is right, or the operator broadcasts.
        values: Computes the elements of its results from those of its operands, where they are
            sizes (see `onnxpar.ops.sizes.computed_sizes`).
        folding: How its results are computed of constants when a model is read; None: they are not.
        reads_bodies: Whether its rule and local form follow from the rules of the nodes in its
            bodies (see `NodeView.bodies`).
        carries_integers: Whether integers that the operator makes stand for floats, as quantised
            ones do, so that what reads them may pass a cotangent on, which is a float.
        draws: Tells whether a node draws random numbers. Copies would draw different ones on each
            device, so that its local form must draw by the element's global index.
        host_operands: Positions of the operands that a device's kernel reads in the host's memory:
            sizes, axes, bounds, counts. As onnxruntime 1.31's CUDA provider has it, and the
            runtime's library. What is computed on the device is copied to the host first, and the
            host waits for it.
        reads_shape_only: Whether it reads no element, only how many there are. Its result is then
            left in the host's memory.
        roles: What its operands are to a layer.
        memory: What its kernel does with memory.
        precision: Whether it is computed in 16 bits where the user asks for them.
        broadcasts: Whether its operands are broadcast against one another, as numpy does.
        windowed: Whether it slides windows over the dims of its result from the third on, so that
            it has no result where these are empty.
        function: Of an operator of `onnxpar`: its body, which graphs that call it carry.
        device_function: The operator of `onnxpar`, as a function of its name, that stands for it on
            GPUs where onnxruntime's CUDA provider has no kernel and the runtime's library has one.
        refused: Returns why the CUDA provider refuses a node in spite of a kernel, because of an
            attribute; None where it takes it.
        upgrades: By version of the operator, how a node of the version before is written for it,
            where that is not the same node. The rest holds for `OPSET` and newer.
    """

    domain: str
    op_type: str
    since_version: int
    rule: RuleFn
    local: LocalFn = copy_node
    gradient: Gradient | ByBody | Missing = UNWRITTEN
    cost: CostFn | Missing = FROM_RULE
    keeps_zero: bool = False
    indices: IndicesFn | None = None
    body: BodyFn | None = None
    reads_bodies: bool = False
    infer: InferFn | None = None
    values: ValuesFn | None = None
    folding: Folding | None = None
    carries_integers: bool = False
    draws: DrawsFn = never
    host_operands: tuple[int, ...] = ()
    reads_shape_only: bool = False
    roles: Roles = NO_ROLES
    memory: Kernel = PLAIN
    precision: Precision = FLOAT32
    broadcasts: bool = False
    windowed: bool = False
    function: Function | None = None
    device_function: Function | None = None
    refused: Callable[[ir.Node], str | None] | None = None
    upgrades: Mapping[int, Upgrade] = field(default_factory=dict, hash=False)


def written_only(view: NodeView) -> OpRule:
    """Only in the graphs of ranks: the local forms of other operators write it.

    Raises:
        ModelError: Always: an undivided graph has no such node.
    """
    raise ModelError(
        f"expected an undivided graph, got node {view.name!r}: {view.op_type} is only in "
        "the graphs of ranks"
    )


def for_ranks(op_type: str, **slots: Any) -> OpDef:
    """Returns the record of an operator of `onnxpar` that local forms write and nobody divides.

    Args:
        op_type: Name of the operator.
        **slots: What its kernels are like: slots of `OpDef`.
    """
    return OpDef(DOMAIN, op_type, 1, written_only, gradient=FOR_RANKS, **slots)


def expanded(view: NodeView) -> OpRule:
    """Replaced by its body, in operators that have rules, before anything is sharded.

    Raises:
        ModelError: Always: a node that is still there could not be replaced.
    """
    raise ModelError(
        f"{view.op_type} is sharded through its body, but node {view.name!r} lacks the "
        "constants that its body needs"
    )

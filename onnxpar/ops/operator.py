"""`OpDef`: the record of an operator, with all that is known about it."""

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
from onnxpar.ops.folding import Folding
from onnxpar.ops.function import Function
from onnxpar.ops.grad_node import Gradient
from onnxpar.ops.local_node import LocalNode, copy_node
from onnxpar.ops.node_cost import CostFn
from onnxpar.ops.old_node import Upgrade
from onnxpar.ops.parts import PartFn, TakesFn
from onnxpar.ops.sequence.known_values import SequenceFn
from onnxpar.ops.sizes.computed_sizes import ValuesFn
from onnxpar.ops.slots import (
    FLOAT32,
    NO_ROLES,
    PLAIN,
    DrawsFn,
    InferFn,
    Kernel,
    PatternFn,
    Precision,
    Roles,
    never,
)

RuleFn = Callable[[NodeView], OpRule]
LocalFn = Callable[[LocalNode], Sequence[ir.Value]]
IndicesFn = Callable[[NodeView], Iterable[tuple[int, Dim, Dim, int | None]]]


@dataclass(frozen=True)
class Missing:
    """A slot that is empty, and the reason."""

    reason: str


@dataclass(frozen=True)
class NotDifferentiable(Missing):
    """A gradient that does not exist: by its nature, the operator passes nothing back."""


@dataclass(frozen=True)
class ByBody:
    """A gradient that is the gradient of the operator's body.

    A node on a path from a parameter to the loss is replaced by its body, which is then
    differentiated. Elsewhere the operator's own rule shards the node.
    """


BY_BODY = ByBody()
UNWRITTEN = Missing("it has no gradient rule")
NOT_DIFFERENTIABLE = NotDifferentiable("not differentiable")
FOR_RANKS = NotDifferentiable("it occurs only in rank graphs")
FROM_RULE = Missing("from the rule's factors")


@dataclass(frozen=True)
class OpDef:
    """All that is known about an operator.

    Domain, name, version and rule are required. Every other slot has a default, which is correct
    for an elementwise operator without special cases, or which makes a pass take the safe course.

    Attributes:
        domain: Domain of the operator; "" is ONNX's default domain.
        op_type: Name of the operator.
        since_version: First version of the domain for which the record holds. It holds until the
            next record of the operator, and thus for the newest version.
        rule: Returns the sharding rule of a node. It raises an error (`NodeView.fail`) with the
            reason if this node must be replicated.
        local: Emits the node's local form. Default: the same node on local operands, which is
            correct if each device can compute its shard of the results from its shards of the
            operands, perhaps as a partial value.
        gradient: Emits the cotangents of a node's operands; or `BY_BODY`; or `Missing` with the
            reason. Default: `Missing`, so that training through the operator is an error that names
            it.
        cost: Returns the arithmetic operations and bytes of a device's share of a node. Default:
            they follow from the rule's factors (`node_cost.by_rule`).
        keeps_zero: Whether padding of the results is zero if padding of all operands is. Default:
            False, so that padding is set to zero where a reader needs that.
        indices: Returns the operands that are indices, as `(operand, least, greatest, ignored)`:
            the range of legal elements, and one element outside it that is legal too (None: none).
            Default: no operand is an index.
        body: Emits the operator as operators that have rules. Default: the function body in ONNX's
            schema, if it has one.
        reads_bodies: Whether rule and local form follow from the rules of the nodes in the node's
            bodies (`NodeView.bodies`). Default: False, since only control flow has bodies.
        branches: The attributes with the bodies for true and for false, if operand 0 chooses one of
            two bodies. Default: none, since only If does.
        sequence: Folds a node that makes or reads a sequence or an optional value, if the value is
            known (`onnxpar.ops.sequence.known_values`). Default: none, as for tensors.
        infer: Infers the shapes of a node's results, where `onnx-shape-inference` finds too little
            or a wrong size. Default: the library's function, which suits most operators; or
            `infer_broadcast` if `broadcasts` is set.
        values: Computes the elements of results that are sizes, from the elements of the operands
            (see `onnxpar.ops.sizes.computed_sizes`). Default: they are unknown, unless
            `onnx-shape-inference` finds them.
        folding: How a model's reader may compute the results of constant operands. Default: not at
            all, since a kernel may round differently.
        pattern: Returns what is known of the elements of result 0 (`graph.patterns.Pattern`), given
            the node, shapes, and the pattern of operand 0. Default: it has the elements of operand
            0 in their order if `memory` says that it is a view; otherwise nothing is known.
        carries_integers: Whether the integers that the operator makes stand for floats, as
            quantised ones do, so that cotangents (floats) pass through readers of these integers.
            Default: False, since integers have no gradient.
        draws: Returns whether a node draws random numbers. Copies would draw different numbers on
            each device, so its local form must draw by the element's global index. Default: no node
            does.
        host_operands: Positions of operands that the kernel of a GPU reads in host memory: sizes,
            axes, bounds, counts. If they are computed on the device, they are copied to the host
            first, and the host waits. The positions are those of onnxruntime 1.31's CUDA provider
            and of the runtime's library. Default: none.
        reads_shape_only: Whether it reads only the shape of its operands, no element. Its result
            then stays in host memory. Default: False.
        roles: The roles of its operands in a layer (weight, scale, bias, running statistic).
            Default: none, as for an operator that is not a layer.
        memory: Results that its kernel writes over operands, and memory that it needs besides.
            Default: each result has memory of its own, and nothing else is needed.
        precision: Whether mixed precision computes it in 16 bits. Default: it stays in float32,
            which costs time but no accuracy.
        broadcasts: Whether its operands are broadcast against each other as in numpy. Default:
            False.
        windowed: Whether it slides windows over dims 2 and up of its result, so that a model needs
            sizes at which these dims are not empty. Default: False.
        counts_rows: Operands of one element that is at most the number of rows of a table, another
            operand, as `(operand, table)`. Default: none.
        takes: Returns the range of operand 0 that each result is (see `onnxpar.ops.parts`).
            Default: no result is a range.
        on_part: Returns how a node computes one part of a dim alone, from this part of its
            operands. Default: unknown, so that a fused weight that it reads is not divided.
        function: For operators of the domain `onnxpar`: the function body that graphs which call it
            carry. Default: none, since onnxruntime, or the runtime's library, has its kernel.
        device_function: The operator of `onnxpar`, as a function of the same name, that replaces it
            on GPUs where only the runtime's library has a kernel. Default: none.
        refused: Returns why the CUDA provider refuses a node although it has a kernel, because of
            an attribute; None if it accepts the node. Default: it accepts every node.
        upgrades: How a node of the previous version becomes one of this version, by versions of the
            operator that changed its meaning or form. Default: none, since a node of an older
            version then means the same. The other slots hold for `OPSET` and newer.
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
    branches: tuple[str, str] | None = None
    sequence: SequenceFn | None = None
    infer: InferFn | None = None
    values: ValuesFn | None = None
    folding: Folding | None = None
    pattern: PatternFn | None = None
    carries_integers: bool = False
    draws: DrawsFn = never
    host_operands: tuple[int, ...] = ()
    reads_shape_only: bool = False
    roles: Roles = NO_ROLES
    memory: Kernel = PLAIN
    precision: Precision = FLOAT32
    broadcasts: bool = False
    windowed: bool = False
    counts_rows: tuple[tuple[int, int], ...] = ()
    takes: TakesFn | None = None
    on_part: PartFn | None = None
    function: Function | None = None
    device_function: Function | None = None
    refused: Callable[[ir.Node], str | None] | None = None
    upgrades: Mapping[int, Upgrade] = field(default_factory=dict, hash=False)


def written_only(view: NodeView) -> OpRule:
    """It occurs only in rank graphs: local forms of other operators emit it.

    Raises:
        ModelError: Always, since an undivided graph has no such node.
    """
    raise ModelError(
        f"expected an undivided graph, got node {view.name!r}: {view.op_type} occurs only in "
        "rank graphs"
    )


def for_ranks(op_type: str, **slots: Any) -> OpDef:
    """Returns the record of an operator of `onnxpar` that occurs only in rank graphs.

    Args:
        op_type: Name of the operator.
        **slots: Slots of `OpDef` about its kernels.
    """
    return OpDef(DOMAIN, op_type, 1, written_only, gradient=FOR_RANKS, **slots)


def expanded(view: NodeView) -> OpRule:
    """It is replaced by its body before the model is sharded.

    Raises:
        ModelError: Always, since a node that is still there could not be replaced.
    """
    raise ModelError(
        f"{view.op_type} is sharded through its body, but node {view.name!r} lacks the "
        "constants that its body needs"
    )

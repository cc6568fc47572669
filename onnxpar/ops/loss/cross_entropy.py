"""Cross-entropy losses, sharded by rows, by positions and by classes.

If the classes are sharded, each device handles the labels in its shard. One maximum, one sum and
one score per row are all-reduced, never all scores (Megatron-LM's parallel cross-entropy, Shoeybi
et al., 2019). A mean is the sum divided by the global weight of all labels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxpar.core.errors import NodeError
from onnxpar.core.mesh import Atoms
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN, INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.function import Function
from onnxpar.ops.local_helpers import BOOL, count_of, locate, with_padding, work_dtype
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.loss.cross_entropy_gradient import (
    LOSS_GRAD,
    log_likelihood_gradient,
    softmax_cross_entropy_gradient,
)
from onnxpar.ops.norm.softmax_layer_norm import log_softmax
from onnxpar.ops.operator import Missing, OpDef, for_ranks

CLASSES = "C"
SCORES, LABELS, WEIGHTS, COTANGENT = range(4)
REDUCTIONS = ("none", "mean", "sum")
_NO_LABEL = -1
"""The label to ignore if the loss ignores none: labels are not negative."""


def _keeps_log_prob(view: NodeView) -> bool:
    return len(view.node.outputs) > 1 and bool(view.node.outputs[1].name)


def _dims(view: NodeView) -> tuple[str, str]:
    """The texts of the scores and of the labels in a rule."""
    first, *rest = axis_names(len(view.shape(LABELS)))
    return " ".join([first, CLASSES, *rest]), " ".join([first, *rest])


def loss_rule(view: NodeView) -> OpRule:
    """`a C b, a b, C -> ; sum: a b; special: C`: rows a, positions b, classes C.

    Log-probabilities, if they are an output too, are sharded as the scores while the loss is
    partial.

    Raises:
        NodeError: The reduction is unknown.
    """
    reduction = view.attr("reduction", "mean")
    if reduction not in REDUCTIONS:
        raise view.fail(
            f"'reduction': expected one of {', '.join(REDUCTIONS)}, got {reduction!r}", NodeError
        )
    scores, rows = _dims(view)
    weights = f", {CLASSES}" if view.has(WEIGHTS) else ", -" if view.arity > 2 else ""
    plain = reduction == "none"
    outputs = [rows if plain else ""]
    outputs += [scores if _keeps_log_prob(view) else "."] * (len(view.node.outputs) - 1)
    text = f"{scores}, {rows}{weights} -> {', '.join(outputs)}; special: {CLASSES}"
    if not plain:
        text += f"; sum: {rows}"
    if view.op_type == "NegativeLogLikelihoodLoss":
        text += "; linear: sum 0"
    return parse_rule(text)


def _loss(*, softmax: bool) -> Callable[[LocalNode], Sequence[ir.Value]]:
    def local(node: LocalNode) -> Sequence[ir.Value]:
        plain = node.attr("reduction", "mean") == "none"
        if not node.plan.factors or (plain and not node.atoms(CLASSES)):
            if softmax and _keeps_log_prob(node.view) and _fuses(node):
                return _fused_loss(node)
            # Labels that are padding become class 0, which every device has.
            labels = with_padding(node, LABELS)
            return node.copy([node.input(SCORES), labels, *node.inputs[WEIGHTS:]])
        return _Loss(node, softmax).emit()

    local.__doc__ = "Each device handles the labels of its classes; a mean uses the global weight."

    return local


def _fuses(node: LocalNode) -> bool:
    """Whether one kernel can replace the node's local form in standard operators."""
    return not node.has(WEIGHTS) and not node.atoms(CLASSES)


def _fused_loss(node: LocalNode) -> Sequence[ir.Value]:
    """The same operator in one pass over the scores; training reads its second output."""
    labels = node.builder.cast(with_padding(node, LABELS), INT64)
    return node.builder.ops(
        CROSS_ENTROPY.name,
        [node.input(SCORES), labels],
        [(node.out_dtype(i), node.out_shape(i)) for i in (0, 1)],
        {
            "reduction": node.attr("reduction", "mean"),
            "ignore_index": node.attr("ignore_index", _NO_LABEL),
        },
        domain=DOMAIN,
    )


def _rows(node: LocalNode) -> tuple[str, ...]:
    return tuple(f for f in node.split_factors() if f != CLASSES)


@dataclass(frozen=True)
class _Loss:
    """Emits the local form of one loss node.

    Attributes:
        node: The node.
        softmax: Whether operand 0 holds scores; otherwise it holds log-probabilities.
    """

    node: LocalNode
    softmax: bool

    @property
    def rows(self) -> tuple[Dim, ...]:
        """Local shape of the labels."""
        return self.node.in_shape(LABELS)

    @property
    def reduction(self) -> str:
        """How the losses of the labels are combined."""
        return str(self.node.attr("reduction", "mean"))

    @property
    def wide(self) -> ir.DataType:
        """The type in which the loss is computed."""
        return work_dtype(self.node.input(SCORES).dtype)

    def emit(self) -> Sequence[ir.Value]:
        node, view = self.node, self.node.view
        atoms = node.atoms(CLASSES)
        log_prob = self._log_prob(atoms)
        labels = node.builder.cast(node.input(LABELS), INT64)
        counted = self._counted(labels)
        place, inside = locate(node, CLASSES, labels, self.rows)
        if counted is not None:
            inside = node.op("And", inside, counted, shape=self.rows)
        picked = self._picked(log_prob, place)
        zero = node.builder.const(np.array(0), self.wide)
        picked = node.op("Where", inside, picked, zero, dtype=self.wide, shape=self.rows)
        picked = node.all_reduce(picked, atoms)
        loss = node.op("Neg", picked, shape=self.rows)
        weight = self._weight(place, inside, counted, atoms)
        if weight is not None and view.has(WEIGHTS):
            loss = node.op("Mul", loss, weight, shape=self.rows)
        if self.reduction != "none":
            loss = self._total(loss)
            if self.reduction == "mean":
                loss = node.op("Div", loss, self._denominator(weight), shape=[])
        outputs = [node.builder.cast(loss, node.out_dtype())]
        if _keeps_log_prob(view):
            outputs.append(node.builder.cast(log_prob, node.out_dtype(1)))
        elif len(view.node.outputs) > 1:
            outputs.append(log_prob)
        return outputs

    def _row_atoms(self) -> Atoms:
        return tuple(a for f in _rows(self.node) for a in self.node.atoms(f))

    def _log_prob(self, atoms: Atoms) -> ir.Value:
        node = self.node
        shape = node.in_shape(SCORES)
        x = node.input(SCORES)
        if not self.softmax:
            return node.builder.cast(x, self.wide)
        if atoms:
            x = node.masked(x, SCORES, CLASSES, "lowest")
        x = node.builder.cast(x, self.wide)
        if not atoms:
            return node.op("LogSoftmax", x, shape=shape, axis=1)
        return log_softmax(node, x, 1, atoms, shape)

    def _counted(self, labels: ir.Value) -> ir.Value | None:
        """Whether each label counts, being neither ignored nor padding; None if all count."""
        node, rows = self.node, self.rows
        uneven = [f for f in _rows(node) if not node.is_even(f)]
        ignored = node.attr("ignore_index")
        if ignored is None and not uneven:
            return None
        if ignored is None:
            counted = node.op("Equal", labels, labels, dtype=BOOL, shape=rows)
        else:
            value = node.builder.const(np.array(ignored), INT64)
            same = node.op("Equal", labels, value, dtype=BOOL, shape=rows)
            counted = node.op("Not", same, shape=rows)
        for factor in uneven:
            counted = node.masked(counted, LABELS, factor, 0)
        return counted

    def _picked(self, log_prob: ir.Value, place: ir.Value) -> ir.Value:
        """The log-probability of each row's label, if it is in this device's shard."""
        node, rows = self.node, self.rows
        column = [rows[0], 1, *rows[1:]]
        index = node.builder.reshape(place, column)
        found = node.op("GatherElements", log_prob, index, shape=column, axis=1)
        return node.builder.reshape(found, rows)

    def _weight(
        self, place: ir.Value, inside: ir.Value, counted: ir.Value | None, atoms: Atoms
    ) -> ir.Value | None:
        """The weight of each row; None if all of them are 1."""
        node, rows = self.node, self.rows
        zero = node.builder.const(np.array(0), self.wide)
        if node.has(WEIGHTS):
            weights = node.builder.cast(node.input(WEIGHTS), self.wide)
            weight = node.op("Gather", weights, place, shape=rows, axis=0)
            weight = node.op("Where", inside, weight, zero, dtype=self.wide, shape=rows)
            return node.all_reduce(weight, atoms)
        if counted is None:
            return None
        return node.builder.cast(counted, self.wide)

    def _total(self, x: ir.Value) -> ir.Value:
        """The sum of a local tensor shaped as the labels, as a scalar."""
        if not self.rows:
            return x
        node = self.node
        every = node.builder.const(np.arange(len(self.rows)))
        return node.op("ReduceSum", x, every, shape=[], keepdims=0)

    def _denominator(self, weight: ir.Value | None) -> ir.Value:
        """The global weight of all labels, as a scalar."""
        node = self.node
        if weight is None or not (
            node.has(WEIGHTS) or node.view.node.attributes.get("ignore_index")
        ):
            count = count_of(node, node.view.shape(LABELS), self.wide)
            return node.builder.reshape(count, [])
        return node.all_reduce(self._total(weight), self._row_atoms())


def loss_grad_rule(view: NodeView) -> OpRule:
    """`a C b, a b, C, -> a C b; special: C`: as the loss; the last operand is its cotangent."""
    scores, rows = _dims(view)
    weights = CLASSES if view.has(WEIGHTS) else "-"
    plain = view.attr("reduction", "mean") == "none"
    special = f"{CLASSES} {rows}" if _counts_labels(view) else CLASSES
    return parse_rule(
        f"{scores}, {rows}, {weights}, {rows if plain else ''} -> {scores}; special: {special}"
    )


def _counts_labels(view: NodeView) -> bool:
    """Whether the divisor of a mean depends on the labels."""
    counted = view.has(WEIGHTS) or view.attr("ignore_index") is not None
    return counted and view.attr("reduction", "mean") == "mean"


def loss_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """(exp(log_prob) - [class is label]) · weight · cotangent; a mean divides by the global weight.

    Without `softmax` there is no exponential: the scores are log-probabilities themselves.
    """
    return _LossGrad(node, bool(node.attr("softmax", 1))).emit()


@dataclass(frozen=True)
class _LossGrad(_Loss):
    """Emits the local form of the gradient of a loss; operand 0 holds log-probabilities."""

    def emit(self) -> Sequence[ir.Value]:
        node = self.node
        shape = node.in_shape(SCORES)
        fuses = self.softmax and _fuses(node)
        result = self._fused(shape) if fuses else self._composed(shape)
        return (node.builder.cast(result, node.out_dtype()),)

    def _fused(self, shape: Sequence[Dim]) -> ir.Value:
        """One node, if classes are not sharded and every row has weight 1 or 0."""
        node = self.node
        labels = node.builder.cast(node.input(LABELS), INT64)
        weight: ir.Value | None = None
        if self.reduction == "mean" and (counted := self._counted(labels)) is not None:
            weight = node.builder.cast(counted, self.wide)
        scale = self._scale(weight)
        ignored = node.attr("ignore_index", _NO_LABEL)
        for factor in _rows(node):
            labels = node.masked(labels, LABELS, factor, ignored)
        return node.builder.ops(
            CROSS_ENTROPY_GRAD.name,
            [scale, node.builder.cast(node.input(SCORES), self.wide), labels],
            [(self.wide, shape)],
            {
                "reduction": "none" if self.reduction == "none" else "sum",
                "ignore_index": ignored,
            },
            domain=DOMAIN,
        )[0]

    def _scale(self, weight: ir.Value | None) -> ir.Value:
        """The cotangent, divided by the global weight under a mean."""
        node = self.node
        scale = node.builder.cast(node.input(COTANGENT), self.wide)
        if self.reduction != "mean":
            return scale
        return node.op("Div", scale, self._denominator(weight), shape=[])

    def _composed(self, shape: Sequence[Dim]) -> ir.Value:
        """The gradient in standard operators."""
        node, rows = self.node, self.rows
        labels = node.builder.cast(node.input(LABELS), INT64)
        counted = self._counted(labels)
        place, inside = locate(node, CLASSES, labels, rows)
        if counted is not None:
            inside = node.op("And", inside, counted, shape=rows)
        weight = self._weight(place, inside, counted, node.atoms(CLASSES))
        scale = self._scale(weight)
        if weight is not None:
            scale = node.op("Mul", weight, scale, shape=rows)
        elif self.reduction != "none":
            scale = node.op("Expand", scale, node.builder.sizes(rows), shape=rows)
        zero = node.builder.const(np.array(0), self.wide)
        there = node.op("Where", inside, scale, zero, dtype=self.wide, shape=rows)
        column = [rows[0], 1, *rows[1:]]
        there = node.builder.reshape(node.op("Neg", there, shape=rows), column)
        index = node.builder.reshape(place, column)
        spread = self._spread(scale, column, shape, counted)
        return node.op(
            "ScatterElements", spread, index, there, shape=shape, axis=1, reduction="add"
        )

    def _spread(
        self,
        scale: ir.Value,
        column: Sequence[Dim],
        shape: Sequence[Dim],
        counted: ir.Value | None,
    ) -> ir.Value:
        """The term of every class: its probability, scaled; zeros without a softmax."""
        node = self.node
        if not self.softmax:
            return node.builder.zeros(shape, self.wide)
        log_prob = node.builder.cast(node.input(SCORES), self.wide)
        part = node.op("Exp", log_prob, shape=shape)
        part = node.op("Mul", part, node.builder.reshape(scale, column), shape=shape)
        if counted is None:
            return part
        # A row that is not counted may hold anything, and zero times infinity is NaN.
        zero = node.builder.const(np.array(0), self.wide)
        kept = node.builder.reshape(counted, column)
        return node.op("Where", kept, part, zero, dtype=self.wide, shape=shape)


def label_indices(view: NodeView) -> list[tuple[int, Dim, Dim, int | None]]:
    """Labels are classes, or the label to ignore."""
    return [(LABELS, 0, view.shape(SCORES)[1] - 1, view.attr("ignore_index"))]


CROSS_ENTROPY = Function("""
    SoftmaxCrossEntropyLoss <reduction, ignore_index> (scores, labels) => (loss, log_prob) {
        loss, log_prob = SoftmaxCrossEntropyLoss<
            reduction: string = @reduction, ignore_index: int = @ignore_index>(scores, labels)
    }
""")

# For a sum ("sum", dloss has one element) and for no reduction ("none", dloss has the labels'
# shape); Expand is right for both.
CROSS_ENTROPY_GRAD = Function("""
    SoftmaxCrossEntropyLossGrad <reduction, ignore_index> (dloss, log_prob, labels) => (dx) {
        number = Constant<value = float {0.0}>()
        zero = CastLike(number, log_prob)
        none = Constant<value = int64 {0}>()
        classes = Constant<value = int64[1] {1}>()
        left_out = Constant<value_int: int = @ignore_index>()
        ignored = Equal(labels, left_out)
        rows = Shape(labels)
        each = Expand(dloss, rows)
        scale = Where(ignored, zero, each)
        place = Where(ignored, none, labels)
        column = Unsqueeze(place, classes)
        counted = Not(ignored)
        kept = Unsqueeze(counted, classes)
        scales = Unsqueeze(scale, classes)
        softmax = Exp(log_prob)
        scaled = Mul(softmax, scales)
        spread = Where(kept, scaled, zero)
        hit = Neg(scales)
        dx = ScatterElements<axis = 1, reduction = "add">(spread, column, hit)
    }
""")


DEFS = (
    OpDef(
        "",
        "SoftmaxCrossEntropyLoss",
        12,
        loss_rule,
        _loss(softmax=True),
        gradient=softmax_cross_entropy_gradient,
        indices=label_indices,
    ),
    OpDef(
        "",
        "NegativeLogLikelihoodLoss",
        12,
        loss_rule,
        _loss(softmax=False),
        gradient=log_likelihood_gradient,
        indices=label_indices,
    ),
    OpDef(
        DOMAIN,
        LOSS_GRAD,
        1,
        loss_grad_rule,
        loss_grad_local,
        gradient=Missing("it is already a gradient"),
    ),
    for_ranks(CROSS_ENTROPY.name, function=CROSS_ENTROPY),
    for_ranks(CROSS_ENTROPY_GRAD.name, function=CROSS_ENTROPY_GRAD),
)

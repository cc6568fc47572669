"""Losses appended to a normalised model, and the count of right answers for evaluation.

The loss is a mean over the complete batch, or a scalar output of the model. In a training program
it is multiplied by `onnxpar.loss_weight`, the share of the micro-batch in its step, so that losses
and gradients of the micro-batches add up to those of the step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.name_patterns import nearest
from onnxpar.core.symbols import NO_CONSTRAINTS, Dim, as_dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.graph.local_builder import LOSS_WEIGHT
from onnxpar.graph.node_view import default_opset
from onnxpar.graph.shapes import shapes
from onnxpar.ops.local_helpers import FLOAT, work_dtype

LOSS = "onnxpar.loss"
CORRECT = "onnxpar.correct"
LABELS = "labels"

_BOOL = ir.DataType.BOOL
_INT32 = ir.DataType.INT32


class LossKind(StrEnum):
    """What is minimised.

    Attributes:
        SOFTMAX_CROSS_ENTROPY: Mean over the labels of -log softmax(logits)[label], as
            `torch.nn.functional.cross_entropy`; labels equal to `ignore_index` do not count.
        MSE: Mean over all elements of (prediction - label)^2.
        MAE: Mean over all elements of abs(prediction - label).
        BCE: Mean over all elements of the binary cross-entropy of sigmoid(prediction) against a
            label between 0 and 1. The prediction is the logit, not the probability, as in
            `torch.nn.functional.binary_cross_entropy_with_logits`.
        OUTPUT: A scalar output of the model.
    """

    SOFTMAX_CROSS_ENTROPY = "softmax_cross_entropy"
    MSE = "mse"
    MAE = "mae"
    BCE = "bce"
    OUTPUT = "output"


@dataclass(frozen=True)
class LossSpec:
    """The loss that the user asks for.

    Attributes:
        kind: What is minimised.
        output: The model's output from which it is computed (logits or prediction; for OUTPUT the
            scalar itself); None for the first output.
        label_input: The model's own input that has the labels; None adds the input `labels`.
        ignore_index: Label that does not count, for softmax cross-entropy; None counts all.
    """

    kind: LossKind
    output: str | None = None
    label_input: str | None = None
    ignore_index: int | None = None


def parse_loss(
    text: str, *, label_input: str | None = None, ignore_index: int | None = None
) -> LossSpec:
    """Returns the loss for a text of the command line: a kind, or `output:NAME`.

    Other kinds may name an output too, as in `mse:prediction`; the default is the first output.

    Raises:
        ModelError: There is no such loss, or it does not have one of the options.
    """
    word, colon, output = text.partition(":")
    known = [kind.value for kind in LossKind]
    if word not in known:
        raise ModelError(f"--loss: expected one of {', '.join(known)}, got {word!r}")
    kind = LossKind(word)
    if colon and not output:
        raise ModelError(f"--loss {text}: expected the name of an output after the colon")
    if kind is LossKind.OUTPUT and not output:
        raise ModelError("--loss output: expected output:NAME, the name of a scalar output")
    spec = LossSpec(kind, output or None, label_input, ignore_index)
    _check_spec(spec)
    return spec


@dataclass(frozen=True)
class LossInfo:
    """What `append_loss` appended.

    Attributes:
        model: The model that was given, with the loss as its last output.
        spec: The loss that was asked for, with `output` filled in.
        labels: The input that has the labels; None if the loss is an output of the model.
        count: Number of terms of the mean, as an expression of the symbols, without regard to
            `ignore_index`; None if the loss is an output of the model.
    """

    model: ir.Model
    spec: LossSpec
    labels: str | None
    count: Dim | None


def append_loss(model: ir.Model, spec: LossSpec) -> LossInfo:
    """Appends the scalar `onnxpar.loss` to the model's outputs. The model given is changed.

    Softmax cross-entropy takes logits [N, C] or [batch, positions, C], and int64 labels of the same
    dims without C. C may be symbolic, as in the logits [batch, batch] of a contrastive loss. The
    other losses take labels with the shape and type of the prediction. Logits and predictions of 16
    bits are cast to float32; the loss has their type.

    Args:
        model: A normalised model (`onnxpar.frontend.load.normalise`).
        spec: The loss.

    Raises:
        ModelError: There is no such output or input, a rank, type or size does not fit, or a name
            is taken.
    """
    _check_spec(spec)
    graph = model.graph
    source = _find_output(graph, spec)
    builder = _builder(model, LOSS)
    for name in (LOSS, LOSS_WEIGHT):
        if builder.fresh(name) != name:
            raise ModelError(f"the model uses the reserved name {name!r}")
    if spec.kind is LossKind.OUTPUT:
        loss, labels, count = _own_loss(builder, source), None, None
    else:
        wanted = _labels(builder, spec, source)
        loss, count = _LOSSES[spec.kind](builder, spec, source, wanted)
        labels = wanted.name
    weight = builder.add_input(LOSS_WEIGHT, FLOAT, ())
    assert loss.dtype is not None
    loss = builder.op("Mul", loss, builder.cast(weight, loss.dtype), shape=())
    loss.name = LOSS
    graph.outputs.append(loss)
    return LossInfo(model, replace(spec, output=source.name), labels, count)


def append_metrics(info: LossInfo) -> tuple[str, ...]:
    """Appends the metrics of evaluation, and returns the names of the new outputs.

    Softmax cross-entropy has one: `onnxpar.correct` (int64 []), the number of labels that are the
    class of the greatest logit. Of equal logits the first counts, as in numpy; labels equal to
    `ignore_index` do not count. If a logit is NaN, no class is the greatest. The other losses have
    no metrics.
    """
    if info.spec.kind is not LossKind.SOFTMAX_CROSS_ENTROPY:
        return ()
    graph = info.model.graph
    builder = _builder(info.model, CORRECT)
    logits = _find_output(graph, info.spec)
    labels = builder.cast(next(v for v in graph.inputs if v.name == info.labels), INT64)
    rows = builder.shape_of(labels)
    hit = builder.op("Equal", _argmax(builder, logits), labels, shape=rows, dtype=_BOOL)
    if info.spec.ignore_index is not None:
        ignored = builder.const(info.spec.ignore_index, INT64)
        skipped = builder.op("Equal", labels, ignored, shape=rows, dtype=_BOOL)
        hit = builder.op("And", hit, builder.op("Not", skipped, shape=rows), shape=rows)
    total = builder.reduce("ReduceSum", builder.cast(hit, INT64), range(len(rows)))
    total.name = CORRECT
    graph.outputs.append(total)
    return (CORRECT,)


def _argmax(builder: GlobalBuilder, logits: ir.Value) -> ir.Value:
    """The least class with the greatest logit, int64.

    It is written as a maximum and a minimum. If the classes are sharded, both are partial, so no
    logits are gathered; an ArgMax would need all classes on one device.
    """
    # onnxruntime compares no bfloat16.
    x = builder.cast(logits, work_dtype(logits.dtype))
    shape = builder.shape_of(x)
    last = [len(shape) - 1]
    top = builder.reduce("ReduceMax", x, last, keepdims=True)
    number, none = _numbered(builder, x)
    at_top = builder.op("Equal", x, top, shape=shape, dtype=_BOOL)
    place = builder.op("Where", at_top, number, none, shape=shape, dtype=_INT32)
    return builder.cast(builder.reduce("ReduceMin", place, last), INT64)


def _numbered(builder: GlobalBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The indices of the classes in the last dim of `x`, int32 [C], and their number, int32 []."""
    *leading, classes = builder.shape_of(x)
    if isinstance(classes, int):
        return builder.const(np.arange(classes), _INT32), builder.const(classes, _INT32)
    zero, one = builder.const(0), builder.const(1)
    count = builder.op("Gather", builder.shape_value(x), builder.const(len(leading)), shape=())
    builder.contents[count.name or ""] = (classes,)
    number = builder.op("Range", zero, count, one, shape=(classes,))
    return builder.cast(number, _INT32), builder.cast(count, _INT32)


def _builder(model: ir.Model, scope: str) -> GlobalBuilder:
    builder = GlobalBuilder.over(
        model.graph, default_opset(model.opset_imports), shapes(model, NO_CONSTRAINTS)
    )
    builder.scope = scope
    return builder


# -- finding and checking operands ---------------------------------------------------------------


def _check_spec(spec: LossSpec) -> None:
    if spec.ignore_index is not None and spec.kind is not LossKind.SOFTMAX_CROSS_ENTROPY:
        raise ModelError(
            f"loss {spec.kind}: --ignore-index needs the loss {LossKind.SOFTMAX_CROSS_ENTROPY}"
        )
    if spec.kind is LossKind.OUTPUT and spec.label_input is not None:
        raise ModelError(
            f"loss {spec.kind}:{spec.output}: this loss takes no labels, got the label input "
            f"{spec.label_input!r}"
        )


def _find_output(graph: ir.Graph, spec: LossSpec) -> ir.Value:
    """The model's output from which the loss is computed.

    Raises:
        ModelError: There is no such output, or its type or shape is unknown or does not fit.
    """
    outputs = {value.name or "": value for value in graph.outputs}
    if not outputs:
        raise ModelError(f"loss {spec.kind}: the model has no output")
    name = spec.output or next(iter(outputs))
    if name not in outputs:
        raise ModelError(
            f"loss {spec.kind}: expected an output of the model, got {name!r}"
            f"{nearest(name, outputs)}"
        )
    value = outputs[name]
    what = f"loss {spec.kind}: output {name!r}"
    if value.dtype is None or not value.dtype.is_floating_point():
        got = "unknown" if value.dtype is None else value.dtype.name.lower()
        raise ModelError(f"{what}: expected a floating type, got {got}")
    if value.shape is None:
        raise ModelError(f"{what}: expected a known number of dims, got an unknown shape")
    for axis, dim in enumerate(value.shape):
        if not isinstance(dim, int) and dim.value is None:
            raise ModelError(f"{what}: the size of dim {axis} is unknown")
    if spec.kind is LossKind.SOFTMAX_CROSS_ENTROPY and len(value.shape) not in (2, 3):
        raise ModelError(
            f"{what}: expected [N, C] or [batch, positions, C] with the classes last, got "
            f"{_shape_text(value.shape)}; for other forms, compute the loss in the model (--loss "
            "output:NAME)"
        )
    return value


def _labels(builder: GlobalBuilder, spec: LossSpec, source: ir.Value) -> ir.Value:
    """The input that has the labels: the named input of the model, or a new one."""
    assert source.shape is not None and source.dtype is not None
    classes = spec.kind is LossKind.SOFTMAX_CROSS_ENTROPY
    sizes = list(source.shape)[:-1] if classes else list(source.shape)
    dtype = INT64 if classes else source.dtype
    inputs = {value.name or "": value for value in builder.graph.inputs}
    if spec.label_input is None:
        if builder.fresh(LABELS) != LABELS:
            hint = "name it with --label-input" if LABELS in inputs else "rename it in the model"
            raise ModelError(
                f"loss {spec.kind}: the new input {LABELS!r} has a name that the model already "
                f"uses; {hint}"
            )
        known = builder.shape_of(source)
        return builder.add_input(LABELS, dtype, known[:-1] if classes else known)
    if spec.label_input not in inputs:
        raise ModelError(
            f"loss {spec.kind}: expected an input of the model for the labels, got "
            f"{spec.label_input!r}{nearest(spec.label_input, inputs)}"
        )
    labels = inputs[spec.label_input]
    what = f"loss {spec.kind}: label input {spec.label_input!r}"
    allowed = (INT64, _INT32) if classes else (dtype,)
    assert labels.dtype is not None and labels.shape is not None
    if labels.dtype not in allowed:
        wanted = " or ".join(d.name.lower() for d in allowed)
        raise ModelError(f"{what}: expected {wanted}, got {labels.dtype.name.lower()}")
    got = list(labels.shape)
    differ = any(
        isinstance(a, int) and isinstance(b, int) and a != b
        for a, b in zip(got, sizes, strict=False)
    )
    if len(got) != len(sizes) or differ:
        raise ModelError(
            f"{what}: expected the shape {_shape_text(sizes)} of output {source.name!r}"
            f"{' without its classes' if classes else ''}, got {_shape_text(got)}"
        )
    return labels


def _shape_text(sizes: Iterable[int | ir.SymbolicDim]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"


def _count(shape: Sequence[Dim]) -> Dim:
    return as_dim(prod(shape))


# -- the losses ----------------------------------------------------------------------------------


def _own_loss(builder: GlobalBuilder, source: ir.Value) -> ir.Value:
    """The model's own scalar; one element of a higher rank becomes a scalar."""
    shape = builder.shape_of(source)
    if any(size != 1 for size in shape):
        raise ModelError(
            f"loss {LossKind.OUTPUT}:{source.name}: expected a scalar, got "
            f"{_shape_text(source.shape or ())}"
        )
    loss = builder.cast(source, work_dtype(source.dtype))
    if not shape:
        return loss
    return builder.op("Reshape", loss, builder.const(np.empty(0, np.int64)), shape=())


def _softmax_cross_entropy(
    builder: GlobalBuilder, spec: LossSpec, logits: ir.Value, labels: ir.Value
) -> tuple[ir.Value, Dim]:
    *leading, classes = builder.shape_of(logits)
    rows = _count(leading)
    scores = builder.cast(logits, work_dtype(logits.dtype))
    wanted = builder.cast(labels, INT64)
    if len(leading) > 1:
        # The operator wants the classes in dim 1. Merging the other dims moves no data; a Transpose
        # would move all of it.
        scores = builder.op("Flatten", scores, shape=(rows, classes), axis=len(leading))
        wanted = builder.op("Reshape", wanted, builder.const([-1]), shape=(rows,))
    options: dict[str, Any] = {"reduction": "mean"}
    if spec.ignore_index is not None:
        options["ignore_index"] = spec.ignore_index
    (loss,) = builder.ops(
        "SoftmaxCrossEntropyLoss", [scores, wanted], [(scores.dtype, ())], options
    )
    return loss, rows


@dataclass(frozen=True)
class _Pair:
    """Prediction and labels of an elementwise loss, in the type of its arithmetic."""

    builder: GlobalBuilder
    x: ir.Value
    y: ir.Value

    @property
    def shape(self) -> Sequence[Dim]:
        return self.builder.shape_of(self.x)

    def op(self, op_type: str, *operands: ir.Value) -> ir.Value:
        return self.builder.op(op_type, *operands, shape=self.shape)


def _mse(pair: _Pair) -> ir.Value:
    difference = pair.op("Sub", pair.x, pair.y)
    return pair.op("Mul", difference, difference)


def _mae(pair: _Pair) -> ir.Value:
    return pair.op("Abs", pair.op("Sub", pair.x, pair.y))


def _bce(pair: _Pair) -> ir.Value:
    """Returns y softplus(-x) + (1 - y) softplus(x).

    No exponential overflows. Nothing cancels for a confident, correct prediction, as it would in
    softplus(x) - xy. The derivative at x = 0, where a head initialised with zeros starts, is
    1/2 - y; the usual max(x, 0) - xy + log(1 + exp(-abs(x))), differentiated operator by operator,
    has another one.
    """
    absent = pair.op("Sub", pair.builder.const(1, pair.x.dtype), pair.y)
    if_true = pair.op("Mul", pair.y, pair.op("Softplus", pair.op("Neg", pair.x)))
    return pair.op("Add", if_true, pair.op("Mul", absent, pair.op("Softplus", pair.x)))


_LossFn = Callable[[GlobalBuilder, LossSpec, ir.Value, ir.Value], tuple[ir.Value, Dim]]


def _mean(terms: Callable[[_Pair], ir.Value]) -> _LossFn:
    """Returns a function that appends the mean of an elementwise loss and counts its terms."""

    def append(
        builder: GlobalBuilder, spec: LossSpec, prediction: ir.Value, labels: ir.Value
    ) -> tuple[ir.Value, Dim]:
        wide = work_dtype(prediction.dtype)
        pair = _Pair(builder, builder.cast(prediction, wide), builder.cast(labels, wide))
        shape = pair.shape
        return builder.reduce("ReduceMean", terms(pair), range(len(shape))), _count(shape)

    return append


_LOSSES: Mapping[LossKind, _LossFn] = {
    LossKind.SOFTMAX_CROSS_ENTROPY: _softmax_cross_entropy,
    LossKind.MSE: _mean(_mse),
    LossKind.MAE: _mean(_mae),
    LossKind.BCE: _mean(_bce),
}

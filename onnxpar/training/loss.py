"""Losses appended to a normalised model, and the count of right answers for evaluation.

The loss is a mean over the whole batch, or a scalar that the model has already. In a training
program it is multiplied by `onnxpar.loss_weight`, the share of the micro-batch in its step, so that
losses and gradients of the micro-batches add up to those of the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import numpy as np
import onnx_ir as ir

from onnxpar.errors import ModelError
from onnxpar.strategy.names import nearest
from onnxpar.symbols import Dim, as_dim, dim_str
from onnxpar.training.emitter import (
    FLOAT,
    INT64,
    Emitter,
    names_of,
    new_value,
    opset_of,
    work_dtype,
)

LOSS = "onnxpar.loss"
LOSS_WEIGHT = "onnxpar.loss_weight"
CORRECT = "onnxpar.correct"
LABELS = "labels"
MIN_OPSET = 13
"""Oldest opset in which every operator used here takes and gives the types that it has today."""

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
        output: The model's output that it is computed of (logits or prediction; for OUTPUT the
            scalar itself); None for the first.
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
    """Reads a loss as it is written on the command line: a kind, or `output:NAME`.

    A kind may name its output too, as in `mse:prediction`; else it takes the model's first.

    Raises:
        ModelError: No such loss, or an option that it does not have.
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
        model: The model with the loss: the one given, changed. Its own outputs are still there; the
            loss stands behind them.
        spec: What was asked for, `output` filled in.
        labels: The input that has the labels; None where the loss is an output of the model.
        count: How many terms the mean is over, as an expression of the symbols, `ignore_index` not
            considered; None where that is not known (a loss of the model's own).
    """

    model: ir.Model
    spec: LossSpec
    labels: str | None
    count: Dim | None


def append_loss(model: ir.Model, spec: LossSpec, *, weighted: bool = True) -> LossInfo:
    """Appends the scalar `onnxpar.loss` to the model's outputs. The model given is changed.

    Softmax cross-entropy takes logits [N, C], or [batch, positions, C] which it flattens, and int64
    labels of the same dims without C. The others take labels like the prediction. Logits and
    predictions of 16 bits are widened, so the loss is float32, or float64 where they are.

    Args:
        model: A normalised model (`onnxpar.passes.load.normalise`).
        spec: The loss.
        weighted: Multiply by the new input `onnxpar.loss_weight` (float32 []), for training.

    Raises:
        ModelError: No such output or input, a rank, type or size that does not fit, or a name that
            is taken.
    """
    _check_spec(spec)
    graph = model.graph
    opset = opset_of(model)
    if opset < MIN_OPSET:
        raise ModelError(
            f"loss {spec.kind}: expected a model of opset {MIN_OPSET} or newer, got {opset}; "
            "convert it first (onnx.version_converter)"
        )
    source = _find_output(graph, spec)
    taken = names_of(graph)
    for name in (LOSS, LOSS_WEIGHT) if weighted else (LOSS,):
        if name in taken:
            raise ModelError(f"the name {name!r} is reserved, but the model uses it")
    emitter = Emitter(graph, opset, LOSS)
    if spec.kind is LossKind.OUTPUT:
        loss, labels, count = _own_loss(emitter, source), None, None
    else:
        append = _LOSSES[spec.kind]
        labels_value = _labels(graph, spec, source, taken)
        loss, count = append(emitter, spec, source, labels_value)
        labels = labels_value.name
    if weighted:
        weight = new_value(LOSS_WEIGHT, FLOAT, [])
        graph.inputs.append(weight)
        assert loss.dtype is not None
        loss = emitter.op("Mul", loss, emitter.cast(weight, loss.dtype), name=LOSS)
    else:
        loss = emitter.rename(loss, LOSS)
    graph.outputs.append(loss)
    named = LossSpec(spec.kind, source.name, spec.label_input, spec.ignore_index)
    return LossInfo(model, named, labels, count)


def append_metrics(info: LossInfo) -> tuple[str, ...]:
    """Appends what evaluation reports besides the loss, and returns the names of the new outputs.

    For softmax cross-entropy that is `onnxpar.correct` (int64 []): how many labels are the class
    of the greatest logit, the first of equal ones as in numpy; labels equal to `ignore_index` do
    not count. The other losses have none.

    Where a logit is NaN no class is the greatest.
    """
    if info.spec.kind is not LossKind.SOFTMAX_CROSS_ENTROPY:
        return ()
    graph = info.model.graph
    emitter = Emitter(graph, opset_of(info.model), CORRECT)
    logits = _find_output(graph, info.spec)
    labels = next(v for v in graph.inputs if v.name == info.labels)
    hit = emitter.op("Equal", _argmax(emitter, logits), emitter.cast(labels, INT64), dtype=_BOOL)
    if info.spec.ignore_index is not None:
        ignored = emitter.constant(info.spec.ignore_index, INT64)
        counts = emitter.op(
            "Not", emitter.op("Equal", emitter.cast(labels, INT64), ignored, dtype=_BOOL)
        )
        hit = emitter.op("And", hit, counts)
    total = emitter.reduce("ReduceSum", emitter.cast(hit, INT64))
    correct = emitter.rename(total, CORRECT)
    graph.outputs.append(correct)
    return (CORRECT,)


def _argmax(emitter: Emitter, logits: ir.Value) -> ir.Value:
    """The least class whose logit is the greatest, int64.

    Written as a maximum and a minimum, both of which a split of the classes leaves pending, so that
    logits are not gathered; an ArgMax would need all classes in one place.
    """
    assert logits.shape is not None and logits.dtype is not None
    # onnxruntime compares no bfloat16.
    x = emitter.cast(logits, work_dtype(logits.dtype))
    classes, last = _classes(logits), len(logits.shape) - 1
    top = emitter.reduce("ReduceMax", x, [last], keep=True)
    number = emitter.constant(np.arange(classes), _INT32)
    none = emitter.constant(classes, _INT32)
    at_top = emitter.op("Equal", x, top, dtype=_BOOL)
    place = emitter.op("Where", at_top, number, none, dtype=_INT32)
    return emitter.cast(emitter.reduce("ReduceMin", place, [last]), INT64)


# -- finding and checking operands ---------------------------------------------------------------


def _check_spec(spec: LossSpec) -> None:
    if spec.ignore_index is not None and spec.kind is not LossKind.SOFTMAX_CROSS_ENTROPY:
        raise ModelError(
            f"loss {spec.kind}: an ignored label is only for {LossKind.SOFTMAX_CROSS_ENTROPY}"
        )
    if spec.kind is LossKind.OUTPUT and spec.label_input is not None:
        raise ModelError(
            f"loss {spec.kind}:{spec.output}: it takes no labels, got the label input "
            f"{spec.label_input!r}"
        )


def _find_output(graph: ir.Graph, spec: LossSpec) -> ir.Value:
    """The model's output that the loss is computed of.

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
        raise ModelError(f"{what}: expected a known rank, got a tensor whose shape is unknown")
    for axis, dim in enumerate(value.shape):
        if not isinstance(dim, int) and dim.value is None:
            raise ModelError(f"{what}: the size of dim {axis} is unknown")
    if spec.kind is LossKind.SOFTMAX_CROSS_ENTROPY:
        if len(value.shape) not in (2, 3):
            raise ModelError(
                f"{what}: expected [N, C] or [batch, positions, C], the classes last, got "
                f"{_shape_text(value)}; other forms can be a node of the model (--loss output:NAME)"
            )
        _classes(value)
    return value


def _classes(logits: ir.Value) -> int:
    """The number of classes.

    Raises:
        ModelError: It is not a number.
    """
    assert logits.shape is not None
    size = logits.shape[len(logits.shape) - 1]
    if not isinstance(size, int):
        raise ModelError(
            f"loss {LossKind.SOFTMAX_CROSS_ENTROPY}: output {logits.name!r}: expected a number of "
            f"classes in the last dim, got {_shape_text(logits)}"
        )
    return size


def _labels(graph: ir.Graph, spec: LossSpec, source: ir.Value, taken: set[str]) -> ir.Value:
    """The input that has the labels: the model's own that is named, or a new one."""
    assert source.shape is not None and source.dtype is not None
    classes = spec.kind is LossKind.SOFTMAX_CROSS_ENTROPY
    sizes = list(source.shape)[:-1] if classes else list(source.shape)
    dtype = INT64 if classes else source.dtype
    inputs = {value.name or "": value for value in graph.inputs}
    if spec.label_input is None:
        if LABELS in taken:
            hint = "name it with --label-input" if LABELS in inputs else "rename it in the model"
            raise ModelError(
                f"loss {spec.kind}: the new input {LABELS!r} would have a name that the model "
                f"uses already; {hint}"
            )
        labels = new_value(LABELS, dtype, sizes)
        graph.inputs.append(labels)
        return labels
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
        for a, b in zip(got, sizes)  # noqa: B905
    )
    if len(got) != len(sizes) or differ:
        raise ModelError(
            f"{what}: expected the shape {_sizes_text(sizes)} of output {source.name!r}"
            f"{' without its classes' if classes else ''}, got {_sizes_text(got)}"
        )
    return labels


def _shape_text(value: ir.Value) -> str:
    return _sizes_text(list(value.shape or ()))


def _sizes_text(sizes: list[int | ir.SymbolicDim]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"


def _count(sizes: list[int | ir.SymbolicDim]) -> Dim:
    return as_dim(prod(as_dim(d if isinstance(d, int) else d.value) for d in sizes))


# -- the losses ----------------------------------------------------------------------------------


def _own_loss(emitter: Emitter, source: ir.Value) -> ir.Value:
    """The model's own scalar; one element of a higher rank becomes a scalar."""
    assert source.shape is not None and source.dtype is not None
    if any(size != 1 for size in source.shape):
        raise ModelError(
            f"loss {LossKind.OUTPUT}:{source.name}: expected a scalar, got {_shape_text(source)}"
        )
    loss = emitter.cast(source, work_dtype(source.dtype))
    if not len(source.shape):
        return loss
    return emitter.op("Reshape", loss, emitter.constant(np.empty(0), INT64), shape=[])


def _softmax_cross_entropy(
    emitter: Emitter, spec: LossSpec, logits: ir.Value, labels: ir.Value
) -> tuple[ir.Value, Dim]:
    assert logits.shape is not None and logits.dtype is not None
    rows = _count(list(logits.shape)[:-1])
    classes = _classes(logits)
    scores = emitter.cast(logits, work_dtype(logits.dtype))
    wanted = emitter.cast(labels, INT64)
    if len(logits.shape) > 2:
        # The operator wants the classes in dim 1: merging the others moves no data, a Transpose
        # would move all of it.
        size = rows if isinstance(rows, int) else dim_str(rows)
        target = emitter.constant(np.array([-1, classes]), INT64)
        scores = emitter.op("Reshape", scores, target, shape=[size, classes])
        flat = emitter.constant(np.array([-1]), INT64)
        wanted = emitter.op("Reshape", wanted, flat, shape=[size])
    options = {} if spec.ignore_index is None else {"ignore_index": spec.ignore_index}
    loss = emitter.op(
        "SoftmaxCrossEntropyLoss",
        scores,
        wanted,
        shape=[],
        attributes={"reduction": "mean", **options},
    )
    return loss, rows


def _operands(
    emitter: Emitter, prediction: ir.Value, labels: ir.Value
) -> tuple[ir.Value, ir.Value, Dim]:
    """Prediction and labels in the working type, and how many elements they have."""
    assert prediction.shape is not None and prediction.dtype is not None
    wide = work_dtype(prediction.dtype)
    count = _count(list(prediction.shape))
    return emitter.cast(prediction, wide), emitter.cast(labels, wide), count


def _mse(
    emitter: Emitter, spec: LossSpec, prediction: ir.Value, labels: ir.Value
) -> tuple[ir.Value, Dim]:
    x, y, count = _operands(emitter, prediction, labels)
    difference = emitter.op("Sub", x, y)
    return emitter.reduce("ReduceMean", emitter.op("Mul", difference, difference)), count


def _mae(
    emitter: Emitter, spec: LossSpec, prediction: ir.Value, labels: ir.Value
) -> tuple[ir.Value, Dim]:
    x, y, count = _operands(emitter, prediction, labels)
    return emitter.reduce("ReduceMean", emitter.op("Abs", emitter.op("Sub", x, y))), count


def _bce(
    emitter: Emitter, spec: LossSpec, prediction: ir.Value, labels: ir.Value
) -> tuple[ir.Value, Dim]:
    """Mean of y softplus(-x) + (1 - y) softplus(x).

    No power overflows; nothing cancels where a sure prediction is right, as it does in
    softplus(x) - xy; and the derivative at x = 0, where a head of zeros begins, is 1/2 - y, which
    the customary max(x, 0) - xy + log(1 + exp(-abs(x))) has not operator by operator.
    """
    x, y, count = _operands(emitter, prediction, labels)
    assert x.dtype is not None
    absent = emitter.op("Sub", emitter.constant(1, x.dtype), y, shape=y.shape)
    if_true = emitter.op("Mul", y, emitter.op("Softplus", emitter.op("Neg", x)))
    if_false = emitter.op("Mul", absent, emitter.op("Softplus", x))
    return emitter.reduce("ReduceMean", emitter.op("Add", if_true, if_false)), count


_LossFn = Callable[[Emitter, LossSpec, ir.Value, ir.Value], tuple[ir.Value, Dim]]

_LOSSES: Mapping[LossKind, _LossFn] = {
    LossKind.SOFTMAX_CROSS_ENTROPY: _softmax_cross_entropy,
    LossKind.MSE: _mse,
    LossKind.MAE: _mae,
    LossKind.BCE: _bce,
}

"""Sharded losses and metrics, with all devices in one process, against numpy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.autodiff.append_loss import (
    CORRECT,
    LOSS,
    LOSS_WEIGHT,
    LossKind,
    LossSpec,
    append_loss,
    append_metrics,
)
from onnxpar.frontend.load import normalise
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.strategy import Strategy, resolve
from tests.lockstep import run_model

Array = NDArray[Any]
WIDTH, CLASSES, IGNORED = 3, 6, -100
WEIGHT = 0.25
SIZES = {"b": 5, "s": 3}


@dataclass(frozen=True)
class Case:
    """The dims of the model's output, and how its head is sharded."""

    dims: tuple[str, ...]
    mesh: dict[str, int]
    inputs: list[Any]


# The batch of 5 is uneven on two devices; classes are sharded if the head's columns are.
CASES = {
    "batch": Case(("b",), {"dp": 2}, [["dp", None], [None, None]]),
    "classes": Case(("b",), {"tp": 2}, [[None, None], [None, "tp"]]),
    "both": Case(("b",), {"dp": 2, "tp": 3}, [["dp", None], [None, "tp"]]),
    "batch of sequences": Case(("b", "s"), {"dp": 2}, [["dp", None, None], [None, None]]),
    "sequences": Case(("b", "s"), {"sp": 2}, [[None, "sp", None], [None, None]]),
    "all three": Case(("b", "s"), {"dp": 2, "sp": 2, "tp": 2}, [["dp", "sp", None], [None, "tp"]]),
}


def sharded(case: Case, kind: LossKind, w: Array) -> PartitionedModel:
    dims = ", ".join(case.dims)
    text = (
        f'<ir_version: 10, opset_import: ["": 18]>\n'
        f"g (float[{dims}, {WIDTH}] x) => (float[{dims}, {CLASSES}] y)"
        "{ [head] y = MatMul(x, w) }"
    )
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    model = normalise(ir.serde.deserialize_model(proto))
    ignored = IGNORED if kind is LossKind.SOFTMAX_CROSS_ENTROPY else None
    info = append_loss(model, LossSpec(kind, ignore_index=ignored))
    append_metrics(info)
    strategy = Strategy.from_dict(
        {"mesh": case.mesh, "dataset": "full_batch", "nodes": {"head": {"in": case.inputs}}}
    )
    analysed = analyse(info.model, {})
    return propagate_and_partition(analysed, resolve(strategy, analysed))


def expected(kind: LossKind, logits: Array, labels: Array) -> float:
    if kind is LossKind.SOFTMAX_CROSS_ENTROPY:
        rows, wanted = logits.reshape(-1, CLASSES), labels.ravel()
        kept = wanted != IGNORED
        log_prob = rows - np.log(np.sum(np.exp(rows), axis=1, keepdims=True))
        return float(-np.mean(log_prob[kept, wanted[kept]]))
    if kind is LossKind.BCE:
        return float(np.mean(np.logaddexp(0, logits) - logits * labels))
    difference = np.abs(logits - labels)
    return float(np.mean(difference if kind is LossKind.MAE else difference**2))


@pytest.mark.parametrize("kind", [k for k in LossKind if k is not LossKind.OUTPUT])
@pytest.mark.parametrize("name", CASES)
def test_sharded_losses(name: str, kind: LossKind) -> None:
    case = CASES[name]
    rng = np.random.default_rng(0)
    sizes = [SIZES[d] for d in case.dims]
    # Every logit occurs twice; if classes are sharded, on two devices. The first counts.
    w = np.tile(rng.integers(-2, 3, (WIDTH, CLASSES // 2)).astype(np.float32), 2)
    x = rng.integers(-2, 3, (*sizes, WIDTH)).astype(np.float32)
    logits = (x @ w).astype(np.float64)
    classes = kind is LossKind.SOFTMAX_CROSS_ENTROPY
    labels = rng.integers(0, CLASSES, sizes) if classes else rng.random(logits.shape)
    if classes:
        labels = np.where(rng.random(sizes) < 0.5, np.argmax(logits, -1), labels)
        labels.ravel()[:: len(labels.ravel()) - 1] = IGNORED
    labels = labels.astype(np.int64 if classes else np.float32)
    model = sharded(case, kind, w)
    feed = {"x": x, "labels": labels, LOSS_WEIGHT: np.array(WEIGHT, np.float32)}
    symbols = {d: SIZES[d] for d in case.dims}
    got = run_model(model, feed, symbols, padding=7)
    # A mean of at most 90 terms in float32.
    assert float(got[LOSS]) == pytest.approx(WEIGHT * expected(kind, logits, labels), rel=1e-6)
    if classes:
        assert int(got[CORRECT]) == (np.argmax(logits, -1) == labels).sum() > 0


def test_split_classes_are_not_gathered() -> None:
    w = np.ones((WIDTH, CLASSES), np.float32)
    model = sharded(CASES["classes"], LossKind.SOFTMAX_CROSS_ENTROPY, w)
    # The model's output stays sharded. For each row three numbers travel for the loss, two for the
    # metrics.
    assert [c.op for c in model.builder.collectives] == ["AllReduce"] * 5
    assert {str(c.bytes) for c in model.builder.collectives} == {"4*b"}

"""A linear classifier of the handwritten digits, and its training in numpy."""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

from onnxpar.cli import main
from onnxpar_runtime.training.permutation import permutation

Array = NDArray[np.float64]
PIXELS, CLASSES = 64, 10


def start() -> NDArray[np.float32]:
    """Returns the initial weight [64, 10]."""
    return np.random.default_rng(0).normal(0, 0.1, (PIXELS, CLASSES)).astype(np.float32)


def shard(folder: Path, devices: int, *more: str, optimizer: str = "sgd") -> Path:
    """Writes the model `logits = x w`, and shards it for training over data ranks."""
    node = helper.make_node("MatMul", ["x", "w"], ["logits"], "product")
    graph = helper.make_graph(
        [node],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", PIXELS])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(start(), "w")],
    )
    opset = [helper.make_opsetid("", 18)]
    model = folder / "linear.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), model)
    out = folder / f"ranks{devices}"
    arguments = ["shard", str(model), "--strategy", "dp", "--devices", str(devices), "-o", str(out)]
    arguments += ["--train", "--loss", "softmax_cross_entropy", "--optimizer", optimizer, *more]
    assert main(arguments) == 0
    return out


def digits(test: bool) -> tuple[Array, NDArray[np.int64]]:
    """Returns images [n, 64] from 0 to 1 and classes [n] of one half of the digits."""
    data = load_digits()
    chosen = (np.arange(len(data.target)) % 5 == 0) == test
    return data.images[chosen].reshape(-1, PIXELS) / 16, data.target[chosen]


def loss_of(w: Array, x: Array, classes: NDArray[np.int64]) -> tuple[float, Array, float]:
    """Returns the mean cross-entropy, its gradient, and the share of hits."""
    logits = x @ w
    shifted = logits - logits.max(1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    rows = np.arange(len(x))
    slope = np.exp(log)
    slope[rows, classes] -= 1
    hits = (logits.argmax(1) == classes).mean()
    return -float(log[rows, classes].mean()), x.T @ slope / len(x), float(hits)


def trained(
    rate: float, batch: int, epochs: int, seed: int, steps: int | None = None
) -> tuple[list[float], Array]:
    """Returns the losses and the weight of a run of SGD in float64, or of its first steps.

    The order of samples depends on seed and epoch alone.
    """
    x, classes = digits(test=False)
    w, losses = start().astype(np.float64), []
    for epoch in range(1, epochs + 1):
        order = permutation(len(x), seed, epoch)(np.arange(len(x)))
        for begin in range(0, len(x), batch):
            if len(losses) == steps:
                return losses, w
            rows = order[begin : begin + batch]
            loss, gradient, _ = loss_of(w, x[rows], classes[rows])
            losses.append(loss)
            w = w - rate * gradient
    return losses, w

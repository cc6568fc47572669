"""States that are bound as input and output at once get what the program computes without that."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import parser

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar_runtime import Trainer, custom_op_library

Array = NDArray[Any]
TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, 6] x) => (float[batch, 3] y) {
  a = MatMul(x, w1)  b = Add(a, b1)  c = Relu(b)  y = MatMul(c, w2)
}"""
HYPER = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.1,
    "momentum_first": 0.0,
    "beta1": 0.9,
    "beta1_complement": 0.1,
    "beta2": 0.99,
    "beta2_complement": 0.01,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decay": 0.99,
    "lr_corrected": 0.3,
    "correction1": 0.3,
    "correction2_sqrt": 0.2,
    "clip_norm": 0.01,
}


def model(path: Path) -> Path:
    proto = parser.parse_model(TEXT)
    rng = np.random.default_rng(3)
    for name, shape in (("w1", (6, 5)), ("b1", (5,)), ("w2", (5, 3))):
        values = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(proto, path)
    return path


def apart(directory: Path, program: str, feeds: dict[str, Array]) -> dict[str, Array]:
    """Runs a program of one device with every input and output in memory of its own."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_op_library()))
    session = onnxruntime.InferenceSession(directory / f"rank0000.{program}.onnx", options)
    names = [o.name for o in session.get_outputs()]
    wanted = {i.name for i in session.get_inputs()}
    results = session.run(names, {n: a for n, a in feeds.items() if n in wanted})
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "lamb"])
def test_updates_in_place(tmp_path: Path, optimizer: str) -> None:
    directory = tmp_path / "sharded"
    spec = TrainingSpec(parse_loss("mse"), parse_optimizer(optimizer))
    shard_model(model(tmp_path / "m.onnx"), "dp", directory, devices=1, training=spec)
    rng = np.random.default_rng(0)
    with Trainer(directory, device="cpu") as trainer:
        states = trainer.training.states
        program = trainer.manifest.program("optimizer_model")
        assert {states[o.state].kind for o in program.state_outputs} >= {"parameter"}
        scalars = {
            s.name: np.array(HYPER[s.hyperparameter], np.float64)
            for s in program.system_inputs
            if s.hyperparameter is not None
        }
        for count in (4, 3, 5):
            batch = {
                "x": rng.standard_normal((count, 6), np.float32),
                "labels": rng.standard_normal((count, 3), np.float32),
            }
            trainer.forward_backward(batch)
            before = {name: trainer.state(name) for name in states}
            expected = apart(directory, "optimizer_model", before | scalars)
            norm = trainer.step(HYPER)
            assert norm == expected["onnxpar.grad_norm"] and norm > HYPER["clip_norm"]
            for output in program.state_outputs:
                # The same nodes on the same numbers: the same bits.
                np.testing.assert_array_equal(trainer.state(output.state), expected[output.name])
                assert (trainer.state(output.state) != before[output.state]).any()

            gradients = [name for name, entry in states.items() if entry.kind == "gradient"]
            before = {name: trainer.state(name) for name in gradients}
            trainer.forward_backward(batch, accumulate=True)
            total = {name: trainer.state(name) for name in gradients}
            trainer.forward_backward(batch)
            for name in gradients:
                np.testing.assert_array_equal(total[name], before[name] + trainer.state(name))

"""The example models, sharded and run under mpirun, equal the undivided models."""

from pathlib import Path

import mlp
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import transformer
from numpy.typing import NDArray

from onnxpar.api.shard_model import shard_model
from tests.runtime.launching import run

ROOT = Path(__file__).resolve().parents[2]


def largest_difference(model: Path, feeds: dict[str, NDArray], outputs: Path) -> float:
    """Returns the largest difference of the logits, relative to their largest magnitude."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (expected,) = session.run(["logits"], feeds)
    got = np.load(outputs)["logits"]
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.full
def test_mlp_by_the_tutorials_tuples_on_eight_ranks(tmp_path: Path) -> None:
    model, directory = tmp_path / "mlp.onnx", tmp_path / "mlp8"
    ir.save(mlp.build(), model)
    shard_model(model, ROOT / "models" / "mlp.strategy.yaml", directory)
    feeds = {"x": np.random.default_rng(0).random((24, 1, 28, 28), dtype=np.float32)}
    np.savez(tmp_path / "in.npz", **feeds)
    outcome, outputs = run(8, directory, tmp_path / "in.npz")
    assert outcome.code == 0, outcome.err
    # Sums of up to 784 terms in another order: far below 1e-5 of the largest value in float32.
    assert largest_difference(model, feeds, outputs) < 1e-5


@pytest.mark.parametrize(("batch", "seq"), [(3, 7), pytest.param(1, 1, marks=pytest.mark.full)])
def test_transformer_with_uneven_batches(tmp_path: Path, batch: int, seq: int) -> None:
    model, directory = tmp_path / "gpt.onnx", tmp_path / "gpt4"
    ir.save(transformer.build(layers=2), model)
    shard_model(model, "dp=2,tp=2", directory)
    ids = np.random.default_rng(1).integers(0, 256, (batch, seq))
    np.savez(tmp_path / "in.npz", input_ids=ids)
    outcome, outputs = run(4, directory, tmp_path / "in.npz")
    assert outcome.code == 0, outcome.err
    # The tolerance of a float32 forward pass.
    assert largest_difference(model, {"input_ids": ids}, outputs) < 1e-5

"""Gradients through slices whose bounds the run decides, all ranks in one process."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar_runtime.training.group import TrainerGroup
from tests.training_cases import hyper, shard

MODEL = """<ir_version: 10, opset_import: ["": 20]>
g (float[batch, seq, 3] x) => (float[batch, half, 2] y)
<int64[1] two = {2}, int64[1] end = {9223372036854775807}, int64[1] axis = {1},
 int64[1] by = {%d}> {
    wide = MatMul (x, w)
    bent = Tanh (wide)
    size = Shape <start = 1, end = 2> (x)
    part = Div (size, two)
    from = Neg (part)
    y = Slice (bent, from, end, axis, by)
}"""


@pytest.mark.parametrize("strategy", ["dp=1", "dp=2", "tp=2"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_start_that_counts_from_the_end(tmp_path: Path, step: int, strategy: str) -> None:
    """A start of -(seq // 2), which for one element is 0: the beginning."""
    model = onnx.parser.parse_model(MODEL % step)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 2)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    ranks = shard(tmp_path / "a", ir.from_proto(model), strategy, loss="mse")
    with TrainerGroup(ranks) as group:
        for seq in (4, 5, 1):
            x = rng.standard_normal((3, seq, 3)).astype(np.float32)
            bent = np.tanh(x.astype(np.float64) @ w)
            taken = np.arange(seq)[-(seq // 2) :: step]
            labels = rng.standard_normal((3, len(taken), 2)).astype(np.float32)
            difference = bent[:, taken] - labels
            back = np.zeros_like(bent)
            back[:, taken] = 2 * difference / difference.size
            gradient = np.einsum("bsi,bso->io", x, back * (1 - bent**2))
            group.load_parameters({"w": w})
            got = group.train_step([{"x": x, "labels": labels}], hyper("sgd", 1, lr=1.0))
            # Sums of at most 30 float32 products; the weights, of up to 2, are rounded as well.
            assert got.loss == pytest.approx((difference**2).mean(), rel=1e-5)
            np.testing.assert_allclose(w - group.gather("w"), gradient, rtol=1e-5, atol=1e-6)

"""Operands whose dims are equal only if the model is right: these are replicated, not refused."""

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.strategy import Strategy, resolve
from tests.lockstep import evaluator, run_model

# That the table has enough rows cannot be proved: the slice has min(32, batch) rows.
MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[batch, 4] x, float[5, batch] z) => (float[n, m] y)
<float[32, 4] w, int64[1] zero = {{0}}> {{
    size = Shape<start = 0, end = 1>(x)
    rows = Slice(w, zero, size, zero)
    {last}
}}
"""


@pytest.mark.parametrize("strategy", ["dp", "tp"])
@pytest.mark.parametrize(
    "last", ["y = Concat<axis = 1>(rows, x)", "y = MatMul(z, rows)", "y = Gemm(z, rows)"]
)
def test_sizes_that_cannot_be_proved_equal(last: str, strategy: str) -> None:
    proto = onnx.parser.parse_model(MODEL.format(last=last))
    rng = np.random.default_rng(0)
    weight = onnx.numpy_helper.from_array(rng.standard_normal((32, 4)).astype(np.float32), "w")
    proto.graph.initializer.append(weight)
    del proto.graph.value_info[:]
    analysed = analyse(ir.from_proto(proto), {})
    assert not analysed.rules.reasons
    data = {"mesh": {strategy: 2}, "dataset": {"x": [strategy, None], "z": [None, strategy]}}
    seeds = resolve(Strategy.from_dict(data), analysed)
    partitioned = propagate_and_partition(analysed, seeds)
    for batch in (1, 4, 7):
        feeds = {
            "x": rng.standard_normal((batch, 4)).astype(np.float32),
            "z": rng.standard_normal((5, batch)).astype(np.float32),
        }
        want = evaluator(proto, reference=False)(feeds)["y"]
        got = run_model(partitioned, feeds, {"batch": batch})["y"]
        # float32, sums of at most 7 products below 3^2: 7 * 9 * 2^-24 = 4e-6.
        assert np.abs(got - want).max() < 1e-5

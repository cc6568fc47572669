"""`out` on nodes of several families: results get their layouts by the cheapest collective."""

from pathlib import Path

import onnx
import onnx.parser
import pytest

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.core.errors import StrategyError
from tests.onnxpar.strategy.annotated import saved, sharded

X = "float[8, 16] x"
SCATTER = ["ReduceScatter"]
CASES = {
    "product": (f"{X}, float[16, 8] w", "MatMul(x, w)", "[[2, 2], [2, 1]]", SCATTER),
    "gemm": (f"{X}, float[8, 16] w", "Gemm<transB = 1>(x, w)", "[[2, 2], [1, 2]]", SCATTER),
    "sum": (X, "ReduceSum<keepdims = 0>(x, axes)", "[[2, 2]]", SCATTER),
    "greatest": (X, "ReduceMax<keepdims = 0>(x, axes)", "[[2, 2]]", SCATTER),
    "elementwise": (X, "Relu(x)", "[[2, 2]]", ["AllToAll"]),
    "softmax": (X, "Softmax<axis = 1>(x)", "[[2, 1]]", []),
    "view": (X, "Transpose<perm = [1, 0]>(x)", "[[2, 2]]", ["AllToAll"]),
    "concat": (X, "Concat<axis = 1>(x, x)", "[[2, 1], [2, 1]]", []),
}


@pytest.mark.parametrize("name", CASES)
def test_the_result_lies_as_asked(tmp_path: Path, name: str) -> None:
    inputs, body, given, ops = CASES[name]
    rank = 1 if "Reduce" in body else 2
    made = "[4]" if rank == 1 else "[4, 1]"
    text = f"""
        <ir_version: 10, opset_import: ["" : 20]>
        g ({inputs}) => (float[{", ".join("MN"[:rank])}] y) <int64[1] axes = {{1}}> {{
            [node] h = {body}
            [after] y = Neg(h)
        }}
    """
    model, strategy = tmp_path / "m.onnx", tmp_path / "s.yaml"
    onnx.save(onnx.parser.parse_model(text), model)
    strategy.write_text(
        f"devices: 4\ndataset: full_batch\nnodes: {{node: {{in: {given}, out: [{made}]}}}}\n"
    )
    found = shard_model(model, strategy, tmp_path / "out").partitioned
    wanted = found.plan.nodes["after"].inputs[0]
    assert wanted is not None and wanted.strategy(found.plan.mesh)[0] == 4
    assert [c.op for c in found.builder.collectives] == ops
    for case in runtime.verify(tmp_path / "out", model):
        assert case.ok, case


CHOSEN = """
    <ir_version: 11, opset_import: ["" : 20]>
    g (float[N, 4] x, bool[N] which) => (float[M, 4] y) {
        [node] y = Compress<axis = 0>(x, which)
    }
"""


@pytest.mark.parametrize("annotated", [False, True], ids=["strategy", "annotation"])
def test_a_size_that_depends_on_data_is_not_split(tmp_path: Path, annotated: bool) -> None:
    model, target = onnx.parser.parse_model(CHOSEN), tmp_path / "out"
    if annotated:
        model.configuration.add(name="any", num_devices=2)
        sharded(model, "node", "y", [0, 1], {0: [2]})
    path, strategy = saved(tmp_path, model), tmp_path / "s.yaml"
    strategy.write_text("mesh: {a: 2}\nnodes: {node: {out: [[a, ~]]}}\n")
    with pytest.raises(StrategyError, match=r"'y'.*dim 0: expected 1 shard.*data, got 2"):
        shard_model(path, None if annotated else strategy, target)
    assert not target.exists()
    # The other dim can be.
    strategy.write_text("mesh: {a: 2}\nnodes: {node: {out: [[~, a]]}}\n")
    shard_model(path, strategy, target)
    for case in runtime.verify(target, path):
        assert case.ok, case

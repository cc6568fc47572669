"""Gemm whose first operand is transposed: it is copied on a CPU if the product is large."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.group import ThreadsGroup

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[rows, M] a, float[rows, N] b, float[N] c) => (float[M, N] y) {
  y = Gemm <transA = 1, alpha = 0.5, beta = 2.0> (a, b, c)
}"""


def kinds(path: Path) -> list[tuple[str, int]]:
    """The operators of a file, with whether a product transposes its first operand."""
    found = []
    for node in onnx.load(path).graph.node:
        given = {a.name: a.i for a in node.attribute}
        found.append((node.op_type, given.get("transA", 0)))
    return found


SIZES = [(256, 256, True), (513, 256, False), (8, 64, False)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("m", "n", "copied"), SIZES)
def test_the_copy(tmp_path: Path, m: int, n: int, copied: bool, ranks: int) -> None:
    proto = parser.parse_model(TEXT.replace("M", str(m)).replace("N", str(n)))
    onnx.save(proto, tmp_path / "m.onnx")
    shard_model(tmp_path / "m.onnx", f"dp={ranks}", tmp_path / "out")
    graphs = [tmp_path / "out" / "rank0000.model.onnx"]
    options = {}
    if ranks == 1:  # the ranks would all write the same file
        graphs.append(tmp_path / "optimized.onnx")
        options["optimized_model_filepath"] = str(graphs[1])
    rng = np.random.default_rng(1)
    with ThreadsGroup(tmp_path / "out", ort_options=options) as group:
        for rows in (1, 6, 37):
            a, b = (rng.standard_normal((rows, k)).astype(np.float32) for k in (m, n))
            c = rng.standard_normal(n).astype(np.float32)
            y = group.run_global({"a": a, "b": b, "c": c})["y"]
            wanted = 0.5 * (a.astype(np.float64).T @ b) + 2.0 * c
            # Sums of at most 37 products of about 1, each rounded by 6e-8 of its size.
            np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    for path in graphs:
        seen = kinds(path)
        assert (("Transpose", 0) in seen) == copied, path
        assert ("Gemm", 0 if copied else 1) in seen, path

"""Separated projections compute what the packed ones did; others are left as they are."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxpar.api.shard_model import analyse

BODY = """
    p = com.microsoft.MatMulNBits<K=32, N=128, bits=4, block_size=16>(x, w, s, z)
    q = Add(c, p)
    y, k, v = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(
        q, "", "", "", "", n, t)
"""
PLAIN = BODY.replace("com.microsoft.MatMulNBits<K=32, N=128, bits=4, block_size=16>", "MatMul")


def model(body: str, outputs: str = "y, k, v") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.integers(0, 256, (128, 2, 8)).astype(np.uint8),
        # Flat, as in older models.
        "s": rng.uniform(0.01, 0.1, 256).astype(np.float32),
        "z": rng.integers(0, 256, 128).astype(np.uint8),
        "c": rng.standard_normal(128).astype(np.float32),
        "t": np.array(3, np.int32),
    }
    if "MatMulNBits" not in body:
        weights["w"] = rng.standard_normal((32, 128)).astype(np.float32) / 5
        body = body.replace("(x, w, s, z)", "(x, w)")
        del weights["s"], weights["z"]
    results = ", ".join(f"float {o}" for o in outputs.split(", "))
    graph = onnx.parser.parse_graph(f"g (float[N,3,32] x, int32[N] n) => ({results}) {{ {body} }}")
    graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights.items())
    return onnx.helper.make_model(
        graph,
        opset_imports=[
            onnx.helper.make_opsetid("", 21),
            onnx.helper.make_opsetid("com.microsoft", 1),
        ],
        ir_version=10,
    )


def run(proto: onnx.ModelProto) -> list[np.ndarray]:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((2, 3, 32)).astype(np.float32)
    return list(session.run(None, {"x": x, "n": np.array([2, 1], np.int32)}))


@pytest.mark.parametrize("body", [BODY, PLAIN], ids=["4 bits", "floats"])
def test_a_packed_projection_is_separated(body: str) -> None:
    proto = model(body)
    made = analyse(ir.from_proto(proto), {}).model
    product = body.split("p = ")[1].split("(")[0].split("<")[0].split(".")[-1]
    counts = Counter(n.op_type for n in made.graph)
    assert counts == {product: 3, "Add": 3, "Identity": 3, "GroupQueryAttention": 1}
    assert "w" not in made.graph.initializers
    for got, want in zip(run(ir.to_proto(made)), run(proto), strict=True):
        # Each row of the weight meets x in the same order; kernels may take rows in other blocks.
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_a_projection_that_is_read_elsewhere_stays() -> None:
    proto = model(PLAIN, "y, k, v, q")
    made = analyse(ir.from_proto(proto), {}).model
    assert [n.op_type for n in made.graph] == ["MatMul", "Add", "Split", "GroupQueryAttention"]
    for got, want in zip(run(ir.to_proto(made)), run(proto), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())

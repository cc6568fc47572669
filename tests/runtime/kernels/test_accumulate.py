"""Accumulate: gradients of micro-batches are added up in the memory of states."""

import ml_dtypes
import numpy as np
import onnx.parser
import onnxruntime
import pytest

from onnxpar_runtime.library import custom_op_library
from onnxpar_runtime.tensors import to_ort
from onnxpar_runtime.wanted_operators import want_operators

SHAPES = [(2, 3), (16384 * 2 + 5,), (0,), ()]
TYPES = {
    np.float32: "float",
    np.float64: "double",
    np.float16: "float16",
    ml_dtypes.bfloat16: "bfloat16",
}


def session_of(graph: str) -> onnxruntime.InferenceSession:
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 21, "onnxpar": 1]> {graph}'
    )
    options = onnxruntime.SessionOptions()
    want_operators(options, model)
    options.register_custom_ops_library(str(custom_op_library()))
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)


@pytest.mark.parametrize("dtype", TYPES, ids=TYPES.get)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_micro_batches_are_added_in_order(dtype: type, count: int) -> None:
    name = TYPES[dtype]
    ports = [
        ", ".join(f"{name}[{','.join(map(str, s))}] {p}{i}" for i, s in enumerate(SHAPES))
        for p in "xgs"
    ]
    body = " ".join(f"g{i} = Identity(x{i})" for i in range(len(SHAPES)))
    pairs = ", ".join(f"{p}{i}" for p in "gs" for i in range(len(SHAPES)))
    text = (
        f" g ({ports[0]}, {ports[2]}, int64[1] mode, uint8[1] t) => ({ports[1]}, uint8[1] done)"
        f" {{ {body} done = onnxpar.Accumulate(t, mode, {pairs}) }}"
    )
    session = session_of(text)
    gradients = [np.zeros(shape, dtype) for shape in SHAPES]
    sums = [np.full(shape, np.nan, dtype) for shape in SHAPES]
    rng = np.random.default_rng(count)
    expected: list[np.ndarray] = []
    for index in range(count):
        given = [rng.standard_normal(shape).astype(dtype) for shape in SHAPES]
        wide = [a.astype(np.float64 if dtype is np.float64 else np.float32) for a in given]
        expected = (
            [(a.astype(w.dtype) + w).astype(dtype) for a, w in zip(expected, wide, strict=True)]
            if index
            else given
        )
        mode = (index > 0) + 2 * (index < count - 1)
        binding = session.io_binding()
        arrays = {f"x{i}": a for i, a in enumerate(given)} | {
            f"s{i}": a for i, a in enumerate(sums)
        }
        arrays |= {"mode": np.array([mode]), "t": np.zeros(1, np.uint8)}
        for key, array in arrays.items():
            binding.bind_ortvalue_input(key, to_ort(array))
        for i, array in enumerate(gradients):
            binding.bind_ortvalue_output(f"g{i}", to_ort(array))
        binding.bind_output("done")
        session.run_with_iobinding(binding)
    for got, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_another_shape_is_refused() -> None:
    text = (
        " g (float[2] g, float[3] s, int64[1] mode, uint8[1] t) => (uint8[1] done)"
        " { done = onnxpar.Accumulate(t, mode, g, s) }"
    )
    session = session_of(text)
    feeds = {
        "g": np.zeros(2, np.float32),
        "s": np.zeros(3, np.float32),
        "mode": np.ones(1, np.int64),
        "t": np.zeros(1, np.uint8),
    }
    with pytest.raises(Exception, match=r"its sum .*\[3\].*\[2\]"):
        session.run(None, feeds)

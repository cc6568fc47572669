"""Operations a second of a large matrix product in onnxruntime: `gpu_gemm.py DEVICE TYPE SIZE`.

A chain of square products on the device, timed together: the most that a step of matrix products
could reach. Several rounds; the fastest counts. Used by tools/bench/gpu.py.
"""

import sys
import time
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
from started_script import expect_driver

from onnxpar_format.dtypes import DTYPES
from onnxpar_runtime.cuda import Queue
from onnxpar_runtime.devices import CUDA
from onnxpar_runtime.options import CPU, cuda_options
from onnxpar_runtime.tensors import to_ort

LINKS = 16
ROUNDS = 5


def rate(device: str, dtype: str, size: int) -> float:
    """Returns operations a second."""
    name = {"float32": "float"}.get(dtype, dtype)
    nodes = " ".join(f"a{i + 1} = MatMul(a{i}, b)" for i in range(LINKS))
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g ({name}[n, n] a0, {name}[n, n] b) => ({name}[n, n] a{LINKS}) {{ {nodes} }}"""
    queue = Queue(0) if device == "cuda" else None
    options = onnxruntime.SessionOptions()
    providers: list[Any] = [CPU]
    if queue is not None:
        providers = [cuda_options(0, queue.stream.value or 0, {}), CPU]
    model = onnx.parser.parse_model(text).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=providers)
    if queue is not None and CUDA not in session.get_providers():
        raise SystemExit("onnxruntime could not create its CUDA provider")
    rng = np.random.default_rng(0)
    # Products of a matrix whose rows have the norm 1 stay of the same size.
    arrays = [rng.normal(size=(size, size)) / np.sqrt(size) for _ in range(2)]
    values = [to_ort(array.astype(DTYPES[dtype].dtype), device) for array in arrays]
    binding = session.io_binding()
    binding.bind_ortvalue_input("a0", values[0])
    binding.bind_ortvalue_input("b", values[1])
    binding.bind_output(f"a{LINKS}", device)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 * LINKS / best


if __name__ == "__main__":
    expect_driver("tools/bench/gpu.py", 3)
    print(rate(sys.argv[1], sys.argv[2], int(sys.argv[3])))

"""onnxruntime's CUDA provider on the stand-in libraries."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnx
import pytest
from onnx import parser

HERE = Path(__file__).parent
TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[b, 6] x, float[6, 3] w, string[b] s) => (float[b, 3] y, string[c] t, int64[3] k)
  <float[3] bias = {1, 2, 3}, int64[1] three = {3}> {
  [multiply] a = MatMul(x, w)
  [add] y = Add(a, bias)
  [sizes] n = Shape(y)
  [count] k = Concat<axis = 0>(n, three)
  [unique] t = StringNormalizer(s)
}"""
RUN = """
import sys
import numpy as np
import onnxruntime
device = onnxruntime.OrtValue.ortvalue_from_numpy(np.arange(6, dtype=np.float32), "cuda", 0)
assert device.device_name() == "cuda", device.device_name()
assert device.numpy().tolist() == [0, 1, 2, 3, 4, 5]
if len(sys.argv) > 1:
    import ctypes
    print(ctypes.cast(device.data_ptr(), ctypes.POINTER(ctypes.c_float))[3], flush=True)
"""
Run = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def python(standin_cuda: Mapping[str, str]) -> Run:
    """Runs Python with arguments and more environment on the stand-ins."""

    def run(
        arguments: Sequence[str], more: Mapping[str, str]
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *arguments],
            env={**standin_cuda, **more},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_nodes_are_where_the_provider_has_kernels(python: Run, tmp_path: Path) -> None:
    onnx.save(parser.parse_model(TEXT), tmp_path / "m.onnx")
    done = python([str(HERE / "placement.py"), str(tmp_path / "m.onnx")], {})
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout).values()
    assert ["StringNormalizer", "unique"] in found["cpu"]
    assert ["Concat", "count"] in found["cpu"]  # shapes are computed on the host
    assert {op for op, _ in found["cuda"]} == {"Gemm", "Shape"}
    assert found["copies"] == []


def test_device_memory_cannot_be_touched_from_the_host_when_guarded(python: Run) -> None:
    assert python(["-c", RUN], {"STANDIN_GUARD": "1"}).returncode == 0
    assert python(["-c", RUN, "touch"], {}).stdout == "3.0\n"
    assert python(["-c", RUN, "touch"], {"STANDIN_GUARD": "1"}).returncode == -signal.SIGSEGV


def test_the_log_tells_copies(python: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert python(["-c", RUN], {"STANDIN_LOG": str(log)}).returncode == 0
    copies = [line.split("\t") for line in log.read_text().splitlines() if "memcpy" in line]
    assert [(line[1], line[2]) for line in copies] == [("HtoD", "24"), ("DtoH", "24")]

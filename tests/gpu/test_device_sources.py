"""The sources of the kernels for GPUs, and what is said where their compiler is missing."""

import ctypes
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from onnxpar_runtime.library import custom_op_library
from tests.tiers import FULL

# Ampere, Hopper, Blackwell: one of each way in which code for the GPUs of today differs.
CAPABILITIES = (80, 90, 100) if FULL else (90,)
COMPILE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.onnxpar_error.restype = ctypes.c_char_p
for capability in map(int, sys.argv[2:]):
    if library.onnxpar_compile_kernels(capability) != 0:
        print(library.onnxpar_error().decode())
        sys.exit(1)
"""


def compiler() -> str | None:
    """Returns where NVRTC is: where ONNXPAR_NVRTC says, in NVIDIA's wheel, or on the system."""
    named = os.environ.get("ONNXPAR_NVRTC")
    if named:
        return named
    for package, file in (("cu13", "lib/libnvrtc.so.13"), ("cuda_nvrtc", "lib/libnvrtc.so.12")):
        spec = importlib.util.find_spec("nvidia")
        for place in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(place) / package / file
            if path.is_file():
                return str(path)
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def compile_all(
    environment: Mapping[str, str], *capabilities: int
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", COMPILE, str(custom_op_library()), *map(str, capabilities)],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=380,
    )


@pytest.mark.timeout(400)  # 25 programs, each of some seconds
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(capability: int) -> None:
    path = compiler()
    if path is None:
        pytest.skip("no NVRTC here: pip install 'onnxpar[cuda]', or set ONNXPAR_NVRTC to its path")
    done = compile_all({**os.environ, "ONNXPAR_NVRTC": path}, capability)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(400)
@pytest.mark.full
def test_a_gpu_newer_than_the_compiler_gets_code_that_the_driver_translates() -> None:
    path = compiler()
    if path is None:
        pytest.skip("no NVRTC here: pip install 'onnxpar[cuda]', or set ONNXPAR_NVRTC to its path")
    environment = {**os.environ, "ONNXPAR_NVRTC": path}
    assert compile_all(environment, 999).returncode == 0
    old = compile_all(environment, 10)
    assert old.returncode == 1
    assert "the GPU has compute capability 1.0" in old.stdout


def relu_grad(environment: Mapping[str, str], log: Path) -> object:
    """Runs a kernel on the stand-in's device; returns its output or what is said instead."""
    log.unlink(missing_ok=True)
    x = np.arange(-2, 3, dtype=np.float32)
    node = {"op": "ReluGrad", "inputs": [x, x], "attributes": {}, "outputs": [True]}
    asked = {**node, "runs": 1, "last": None, "changed": ()}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("node_worker.py"))],
        input=pickle.dumps(asked),
        env={**environment, "STANDIN_LOG": str(log)},
        capture_output=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr.decode()
    _, cuda = pickle.loads(done.stdout)
    return cuda if isinstance(cuda, str) else cuda[0][0].tolist()


@pytest.mark.parametrize(
    ("capability", "code"),
    [
        ("90", "sm_90"),
        ("121", "compute_100"),
        pytest.param("103", "compute_100", marks=pytest.mark.full),
        pytest.param("86", "compute_80", marks=pytest.mark.full),
    ],
)
def test_what_a_gpu_is_given(
    standin_cuda: Mapping[str, str], tmp_path: Path, capability: str, code: str
) -> None:
    log = tmp_path / "log"
    found = relu_grad({**standin_cuda, "STANDIN_CC": capability}, log)
    assert found == [0, 0, 0, 1, 2]
    modules = [line.split("\t")[1] for line in log.read_text().splitlines() if "module" in line]
    assert modules == [code]


def test_a_driver_that_cannot_translate_is_reported(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    environment = {**standin_cuda, "STANDIN_CC": "121", "STANDIN_OLD_DRIVER": "1"}
    message = relu_grad(environment, tmp_path / "log")
    assert isinstance(message, str)
    assert (
        "ReluGrad 'node': cuModuleLoadData of pointwise.cu: the provided PTX was compiled with an "
        "unsupported toolchain. It is PTX for compute capability 10.0, the newest that this NVRTC "
        "knows for the GPU's 12.1; a newer one makes machine code"
    ) in message
    assert "pip install --upgrade nvidia-cuda-nvrtc" in message


def test_a_missing_compiler_is_reported() -> None:
    done = compile_all({**os.environ, "ONNXPAR_NVRTC": "/nowhere/libnvrtc.so.13"}, 90)
    assert done.returncode == 1
    assert done.stdout.startswith("ONNXPAR_NVRTC: /nowhere/libnvrtc.so.13")
    if compiler() is None:
        done = compile_all(os.environ, 90)
        assert done.returncode == 1
        assert "NVRTC, which compiles this operator for the GPU, cannot be opened" in done.stdout
        assert "pip install 'onnxpar[cuda]'" in done.stdout

"""onnxruntime's CUDA provider on the stand-in libraries."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


# -- with STANDIN_ASYNC: time passes on the device -------------------------------------------------


def direct(python: Run, case: str, seed: int | None, **more: str) -> dict[str, Any]:
    """Returns what a case of `direct.py` found."""
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", **more}
    if seed is not None:
        settings["STANDIN_ASYNC"] = str(seed)
    done = python([str(HERE / "direct.py"), case], settings)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("waits", {"held": (7, None), "free": (7, 0)}),
        ("legacy", {"blocking": (7, None), "others": (7, 0)}),
        ("sources", {"pageable": (7, None), "pinned": (7, 9)}),
        ("freed", {"before": (7, None), "behind": (255, None), "pinned": (7, 255)}),
        ("events", {"new": (0, None), "waited": (0, None), "recorded": (0, 600)}),
    ],
)
def test_what_nothing_keeps_in_order_shows(
    python: Run, case: str, wanted: Mapping[str, tuple[int, int | None]]
) -> None:
    """What is right, or never else; and what comes of it where time passes, for some seed."""
    at_once = direct(python, case, None)
    assert {name: set(seen) for name, seen in at_once.items()} == {
        name: {right} for name, (right, _) in wanted.items()
    }
    seeds = [direct(python, case, seed) for seed in range(3)]
    for name, (right, wrong) in wanted.items():
        others = {value for found in seeds for value in found[name]} - {right}
        assert others == ({wrong} - {None}), name


@pytest.mark.parametrize("seed", [None, 0])
def test_graphs_are_replayed_and_captures_broken(python: Run, seed: int | None) -> None:
    found = direct(python, "capture", seed)
    assert found == {
        "joined": 0,
        "captured": 0,  # nothing was done yet
        "launched": 7,
        "unjoined": 904,  # cudaErrorStreamCaptureUnjoined
        "legacy": [906, 901],  # …Implicit; …Invalidated
        "malloc": [900, 901],  # …Unsupported; …Invalidated
        "event": [0, 907],  # cudaErrorCapturedEvent
    }


@pytest.mark.parametrize(("queues", "ended"), [(1, False), (2, True), (32, True)])
def test_kernels_that_wait_hold_up_their_queue(python: Run, queues: int, ended: bool) -> None:
    """Two communicators in different orders: with a queue for both no rank comes to an end."""
    more = {"STANDIN_DEVICES": "2", "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
    assert direct(python, "crossed", 1, **more) == {"ended": ended}

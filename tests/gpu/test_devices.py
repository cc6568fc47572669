"""The probe and the queue of a rank, with the stand-in CUDA libraries: no GPU is needed."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from onnxpar_runtime.launch import find_mpirun
from tests.tiers import FULL

Run = Callable[..., "subprocess.CompletedProcess[str]"]
MACHINE = """
from onnxpar_runtime.devices import describe, machine
print("\\n".join(describe(machine())))
"""
PLACED = """
import logging
from onnxpar_runtime import init
logging.basicConfig(format="%(message)s")
rank = init()
print(rank.index, rank.placement.device.value, rank.placement.index, flush=True)
rank.world.close()
"""
QUEUE = """
import gc
import numpy as np
import onnxruntime
from onnxpar_runtime.cuda import Queue
from onnxpar_runtime.tensors import to_host, to_ort
import ml_dtypes

queue = Queue(0)
rng = np.random.default_rng(0)
target = to_ort(np.zeros((40, 30), np.float32), "cuda", 0)
slots = set()
for step in range(20):
    array = rng.normal(size=(40, 30)).astype(np.float32)
    wanted = array.copy()
    staged, ahead = queue.stage(array), queue.stage(-array)
    array[...] = 9  # what was staged is a copy
    slots |= {staged._slot.host.value, ahead._slot.host.value}
    assert (staged.shape, staged.nbytes) == ((40, 30), 4800)
    staged.put(target.data_ptr())
    np.testing.assert_array_equal(to_host(target), wanted)
    ahead.put(target.data_ptr())
    np.testing.assert_array_equal(to_host(target), -wanted)
    del staged, ahead
assert len(slots) == 2, slots  # memory is used again
# It may be collected in the midst of anything, as of what the queue does itself.
ring = [queue.stage(array)]
ring.append(ring)
del ring
with queue._lock:
    gc.collect()
assert queue.stage(array)._slot.host.value in slots
scalar = to_ort(np.zeros((), np.float64), "cuda", 0)
queue.stage(np.array(2.5)).put(scalar.data_ptr())
assert to_host(scalar).shape == () and to_host(scalar) == 2.5
empty = queue.stage(np.zeros((0, 3), np.int64))
assert empty.shape == (0, 3)
small = np.arange(-4, 5).astype(ml_dtypes.bfloat16)
value = to_ort(small, "cuda", 0)
assert value.data_type() == "tensor(bfloat16)" and value.device_name() == "cuda"
np.testing.assert_array_equal(to_host(value), small)
into = queue.pinned((9,), small.dtype)
queue.read(value.data_ptr(), into)
queue.before_writing()
queue.finish_reading()
np.testing.assert_array_equal(into, small)
queue.close()
del empty
gc.collect()
np.testing.assert_array_equal(into, small)  # lives on by itself
"""
CRASH = "__attribute__((constructor)) static void load(void) { __builtin_trap(); }"


@pytest.fixture
def python(standin_cuda: Mapping[str, str]) -> Run:
    """Runs a program of Python on the stand-ins, guarded."""

    def run(
        program: str, before: Sequence[str] = (), **more: str
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*before, sys.executable, "-c", program],
            env={**standin_cuda, "STANDIN_GUARD": "1", **more},
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run


def test_a_machine_whose_libraries_load(python: Run) -> None:
    done = python(MACHINE, STANDIN_DEVICES="2")
    assert done.returncode == 0, done.stderr
    assert "GPUs           Stand-in device 0, Stand-in device 1\n" in done.stdout
    assert done.stdout.endswith("CUDA           can be used\n")


def test_libraries_are_looked_for_without_a_driver(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    """As on the machine on which an image for others is made."""
    (tmp_path / "libcuda.so.1").touch()  # no library, and what is found first
    places = f"{tmp_path}:{standin_cuda['LD_LIBRARY_PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "onnxpar_runtime"],
        env={**standin_cuda, "LD_LIBRARY_PATH": places},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 3, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert lines[1:] == [
        ["driver", "none"],
        ["GPUs", "none"],
        ["libraries", "all load"],
        ["NCCL", "2.32.3"],
        ["CUDA", f"no NVIDIA driver: {tmp_path}/libcuda.so.1: file too short"],
    ]


def test_a_library_that_is_missing_is_named(
    python: Run, standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    (folder,) = (Path(p) for p in standin_cuda["LD_LIBRARY_PATH"].split(":")[:1])
    for file in folder.glob("*.so*"):
        if file.name != "libcublasLt.so.13":
            (tmp_path / file.name).symlink_to(file)
    done = python(MACHINE, LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout.endswith(
        "CUDA           libcublasLt.so.13 cannot be loaded: pip install 'onnxpar[cuda]'\n"
    ), done.stderr


def test_a_library_that_ends_the_process_ends_the_probe_only(
    python: Run, standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    source = tmp_path / "crash.c"
    source.write_text(CRASH)
    library = str(tmp_path / "libcurand.so.10")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(source)], check=True)
    places = f"{tmp_path}:{standin_cuda['LD_LIBRARY_PATH']}"
    done = python(MACHINE, LD_LIBRARY_PATH=places)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("CUDA           the probe failed: the process was killed by signal ")
    assert last.endswith("while loading CUDA's libraries")


@pytest.mark.parametrize(
    ("devices", "lines"),
    [
        ("2", ["0 cuda 0", "1 cuda 1", "2 cuda 0"]),
        ("3", ["0 cuda 0", "1 cuda 1", "2 cuda 2"]),
        ("1", ["0 cuda 0", "1 cuda 0", "2 cuda 0"]),
    ][: 3 if FULL else 1],
)
def test_ranks_of_mpirun_take_the_gpus_in_turn(
    python: Run, devices: str, lines: Sequence[str]
) -> None:
    mpirun = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "3"]
    names = ["LD_LIBRARY_PATH", "STANDIN_DEVICES", "STANDIN_GUARD", "PYTHONPATH"]
    exported = [word for name in names for word in ("-x", name)]
    done = python(PLACED, [*mpirun, *exported], STANDIN_DEVICES=devices)
    assert sorted(done.stdout.split("\n")[:-1]) == lines, done.stderr
    times = done.stderr.count(f"3 ranks share {devices} GPU")
    assert times == (1 if devices != "3" else 0), done.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "NCCL allows that only with NCCL_MULTI_RANK_GPU_ENABLE=1"),
        pytest.param(
            {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "STANDIN_NCCL_VERSION": "22907"},
            "NCCL allows that since 2.30.0, and this is 2.29.7",
            marks=pytest.mark.full,
        ),
    ],
    ids=["not allowed", "too old"],
)
def test_ranks_that_cannot_share_a_gpu_by_nccl(
    python: Run, more: Mapping[str, str], message: str
) -> None:
    start = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    shared = "rank 0 shares its GPU with another rank"
    done = python(PLACED, start, **more)
    assert sorted(done.stdout.split("\n")[:-1]) == ["0 cuda 0", "1 cuda 0"], done.stderr
    unused = "tensors are copied through the host, because NCCL is not used"
    assert f"{unused}: {shared}; {message}" in done.stderr
    done = python(PLACED.replace("init()", "init('nccl')"), start, **more)
    assert done.returncode != 0
    assert f"LaunchError: transport nccl: {shared}; {message}" in done.stderr


def test_ranks_share_a_gpu_by_nccl_where_it_is_allowed(python: Run) -> None:
    start = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    program = PLACED.replace("init()", "init('nccl')").replace(
        "placement.index", "placement.transport"
    )
    done = python(program, start, NCCL_MULTI_RANK_GPU_ENABLE="1")
    assert sorted(done.stdout.split("\n")[:-1]) == ["0 cuda nccl", "1 cuda nccl"], done.stderr


def test_arrays_go_to_the_gpu_and_back(python: Run) -> None:
    done = python(QUEUE)
    assert done.returncode == 0, done.stderr

"""Rows of states on a GPU are copied there, as on the CPU; nothing goes through the host.

Kernels of the stand-ins that a decoder needs compute nothing, so `test_on_gpu` compares tokens.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.gpu.requests_worker import directory

SCRIPT = """
import numpy as np
from onnxpar_format.entries import CarriedEntry, DimComponent, TensorEntry
from onnxpar_runtime.cuda import Queue, copy_in, copy_out
from onnxpar_runtime.generation.buffers import repeat_rows
from onnxpar_runtime.generation.states import State
from onnxpar_runtime.tensors import to_host, to_ort

queue = Queue(0)
rng = np.random.default_rng(0)
sizes = (4, 3, 10, 5)
spec = TensorEntry("past", "float32", sizes, tuple((DimComponent(n, ()),) for n in sizes))
first = rng.normal(size=sizes).astype("f4")
second = rng.normal(size=(2, 3, 7, 5)).astype("f4")

def filled(place, appends, values):
    entry = CarriedEntry("past", "present", 2, appends)
    length = values.shape[2]
    state = State(entry, spec, (len(values), 3, 0, 5), *place, length)
    if not appends:
        state.lengthen(length)
    memory = state._read
    if place[0] == "cpu":
        memory.owner[: values.nbytes] = np.frombuffer(values.tobytes(), np.uint8)
    else:
        copy_in(memory.pointer, values)
    return state

def held(state, shape):
    found = np.empty(shape, "f4")
    if state._read.gpu is None:
        return np.frombuffer(state._read.owner[: found.nbytes].tobytes(), "f4").reshape(shape)
    copy_out(state._read.pointer, found)
    return found

print("COPIES", flush=True)
for appends in (False, True):
    found = []
    for place in (("cpu", 0), ("cuda", 0)):
        state, other = filled(place, appends, first), filled(place, appends, second)
        state.permute(np.array([2, 0, 0, 3]), 6)
        state.copy(1, 4, other, 1, 2, 3)
        found.append(held(state, sizes))
    want = first.copy()
    used = slice(0, 6) if appends else slice(None)
    want[:, :, used] = first[[2, 0, 0, 3]][:, :, used]
    want[1, :, 4:7] = second[1, :, 2:5]
    for one in found:
        np.testing.assert_array_equal(one, want)
for place in (("cpu", 0), ("cuda", 0)):
    made = repeat_rows(to_ort(second, *place), 3, place)
    np.testing.assert_array_equal(to_host(made), np.repeat(second, 3, 0))
queue.close()
"""


def test_rows_are_permuted_and_copied_on_the_device(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**standin_cuda, "STANDIN_GUARD": "1", "STANDIN_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    copies = [line[1] for line in lines if line[0] == "memcpy"]
    # Three results are read. On the device, 4 rows and 1 part are copied, then 3 rows there and
    # back and 1 part, then 6 rows. What is written are zeros and values of new memory.
    assert copies.count("DtoH") == 3 and copies.count("same") == 5 + 7 + 6


def test_requests_in_a_cache_that_grows_stay_on_the_device(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    """The caches of requests that join are copied, and only logits go to the host."""
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.requests_worker", str(directory(tmp_path)), "cuda"],
        env={**standin_cuda, "STANDIN_GUARD": "1", "STANDIN_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    began, ended, runs = map(int, done.stdout.split())
    copies = [line.split("\t")[1] for line in log.read_text().splitlines()[began:ended]]
    assert copies.count("DtoH") == runs
    # Five requests have the keys and values of two layers, each in four lines.
    assert copies.count("same") >= 5 * 4

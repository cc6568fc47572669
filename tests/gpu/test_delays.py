"""Programs on a device that takes its time: the stand-ins with STANDIN_ASYNC (`standin/README.md`).

What they compute must not depend on when: an event that nobody waits for, memory that is used too
early, and kernels that wait for one another in a circle show for some seed. All that these programs
compute is real on the stand-ins, but for some losses.
"""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlp
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from onnxpar.strategy import Strategy
from onnxpar_runtime.launch import find_mpirun, mpirun_environment
from tests.cli import linear
from tests.tiers import FULL
from tests.training_cases import shard

SEEDS = [1, 2, 3, 4] if FULL else [1]
SUITE = Path(__file__).parents[1] / "runtime" / "collectives"
WORKER = Path(__file__).parent / "stage_worker.py"
STEPS, ROWS = 12, 100
GRAPHS = ["--ort", "cuda.enable_cuda_graph=1"]
LIMIT = {"ONNXPAR_TIMEOUT": "30"}


def run(environment: Mapping[str, str], ranks: int, arguments: Sequence[str], **more: str) -> str:
    """Returns what Python prints on so many ranks."""
    command = [sys.executable, *arguments]
    if ranks > 1:
        command = [find_mpirun(), "--oversubscribe", "-n", str(ranks), *command]
    done = subprocess.run(
        command,
        env={**mpirun_environment(environment), "STANDIN_DEVICES": str(ranks), **LIMIT, **more},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def settings(seed: int) -> dict[str, str]:
    """Those of a seed; for every other one, taking memory waits for the device."""
    return {"STANDIN_ASYNC": str(seed), **({"STANDIN_ALLOCATION_WAITS": "1"} if seed % 2 else {})}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, ["--log-every", "5"], marks=pytest.mark.full),
        pytest.param(1, GRAPHS, marks=pytest.mark.full),
        pytest.param(2, ["--transport", "nccl"], marks=pytest.mark.full),
        (2, ["--transport", "nccl", *GRAPHS]),
        pytest.param(2, ["--transport", "mpi", "--log-every", "5"], marks=pytest.mark.full),
    ],
    ids=["one rank", "one rank, graphs", "nccl", "nccl, graphs", "staged"],
)
def test_training(
    standin_cuda: Mapping[str, str], tmp_path: Path, ranks: int, options: list[str], seed: int
) -> None:
    """Batches come ahead, parameters are copied out beside the next step, graphs are replayed."""
    out = linear.shard(tmp_path, ranks, "--symbol", "batch:divisor=2")
    arguments = ["-m", "onnxpar.cli", "train", str(out), "--data", "digits", "--lr", "1"]
    arguments += ["--batch-size", str(ROWS), "--steps", str(STEPS), "--seed", "0", *options]
    # The last two checkpoints stay.
    arguments += ["--checkpoint", str(tmp_path / "ck"), "--every", str(STEPS - 1)]
    run(standin_cuda, ranks, [*arguments, "--device", "cuda"], **settings(seed))
    for step in (STEPS - 1, STEPS):
        file = tmp_path / "ck" / f"step-{step:08}" / "rank0000.safetensors"
        _, wanted = linear.trained(1, ROWS, 1, 0, steps=step)
        # Sums of 100 products in float32, a few times 2^-24 each, over 12 steps.
        np.testing.assert_allclose(load_file(file)["w"], wanted, rtol=0, atol=1e-5)


READS = """
from ctypes import c_int, c_size_t
import numpy as np
from onnxpar_runtime.cuda import Queue
SIZE = 4096
for queue in [Queue(0) for _ in range(8)]:
    memory = queue.runtime.handle("cudaMalloc", c_size_t(SIZE))
    into = queue.pinned((SIZE,), np.dtype(np.uint8))

    def fill(value):
        size = c_size_t(SIZE)
        queue.runtime.call("cudaMemsetAsync", memory, c_int(value), size, queue.stream)

    for value in range(1, 9):
        fill(value)
        queue.read(memory.value, into)
        queue.before_writing()
        fill(0)
        queue.finish_reading()
        assert (into == value).all(), (value, into)
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_read_is_not_overwritten(standin_cuda: Mapping[str, str], seed: int) -> None:
    """By streams of every pace, which have queues of their own."""
    run(standin_cuda, 1, ["-c", READS], CUDA_DEVICE_MAX_CONNECTIONS="32", **settings(seed))


PIPELINES = {
    "1f1b": {"devices": 2, "pipeline": {"stages": 2, "micro_batches": 4}},
    "interleaved": {
        "devices": 2,
        "pipeline": {"stages": 2, "micro_batches": 4, "schedule": "interleaved", "chunks": 2},
    },
    "zb-h1": {"devices": 2, "pipeline": {"stages": 2, "micro_batches": 4, "schedule": "zb-h1"}},
    "1f1b, dp": {
        "mesh": {"dp": 2},
        "devices": 4,
        "pipeline": {"stages": 2, "micro_batches": 4},
    },
    "1f1b, tp": {
        "mesh": {"tp": 2},
        "devices": 4,
        "parameters": {"fc1.weight": [None, "tp"], "fc2.weight": ["tp", None]},
        "pipeline": {"stages": 2, "micro_batches": 2},
    },
    "dp, tp, sharded": {
        "mesh": {"dp": 2, "tp": 2},
        "devices": 4,
        "optimizer_parallel": {"level": 2, "threshold": "1B"},
    },
}


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PIPELINES if FULL else ["1f1b"])
def test_stages(standin_cuda: Mapping[str, str], tmp_path: Path, name: str, seed: int) -> None:
    """Ranks that hand on values, and sum gradients, come to an end, with what one CPU computes."""

    def trained(which: str, strategy: Mapping[str, object], *options: str) -> NDArray[np.float32]:
        ranks = strategy["devices"]
        assert isinstance(ranks, int)
        symbols = {"batch": {"divisor": 16}}
        model = mlp.build(image=8, hidden=(32, 24, 16))
        out = shard(tmp_path / which, model, Strategy.from_dict({**strategy, "symbols": symbols}))
        arguments = ["-m", "onnxpar.cli", "train", str(out), "--data", "digits", "--lr", "0.1"]
        arguments += ["--batch-size", "96", "--steps", "6", "--seed", "0", *options]
        saved, merged = tmp_path / f"{which}.ck", tmp_path / f"{which}.merged"
        run(standin_cuda, ranks, [*arguments, "--checkpoint", str(saved)], **settings(seed))
        run(standin_cuda, 1, ["-m", "onnxpar.cli", "checkpoint", "merge", str(saved), str(merged)])
        (file,) = merged.rglob("*.safetensors")
        merged_tensors = load_file(file)
        return np.concatenate([merged_tensors[key].ravel() for key in sorted(merged_tensors)])

    wanted = trained("one", {"devices": 1}, "--device", "cpu")
    found = trained("more", PIPELINES[name], "--device", "cuda", "--transport", "nccl")
    # As above, with 96 products and 6 steps, through four layers.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_values_arrive_as_they_were_made(standin_cuda: Mapping[str, str], seed: int) -> None:
    run(standin_cuda, 2, [str(WORKER), "nccl", "mpi"], **settings(seed))
    if FULL:
        run(standin_cuda, 2, [str(WORKER), "staged", "mpi"], **settings(seed))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("transport", ["nccl", "staged"] if FULL else ["nccl"])
def test_collectives(standin_cuda: Mapping[str, str], transport: str, seed: int) -> None:
    """All of the suite in the full tier; else Start and Wait, and what packs, on two ranks."""
    arguments = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
    if FULL:
        arguments.append(str(SUITE))
    else:
        chosen = "start_and_wait_equal or every_axis or from_run_to_run"
        arguments += [*map(str, SUITE.glob("test_[sv]*.py")), "-k", chosen]
    more = {
        **settings(seed),
        "STANDIN_DEVICES": "4",
        "ONNXPAR_TEST_DEVICE": transport,
        "ONNXPAR_TEST_STANDIN": "1",
        "ONNXPAR_TEST_SIZES": "2 4" if FULL else "2",
    }
    said = run(standin_cuda, 1, arguments, **more)
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 10, said

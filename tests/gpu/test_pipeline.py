"""What the stages of a pipeline hand on stays on GPUs; read from the stand-ins' log."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlp
import pytest

from onnxpar.strategy import Strategy
from onnxpar_runtime.launch import find_mpirun, mpirun_environment
from tests.tiers import FULL
from tests.training_cases import shard

WORKER = Path(__file__).parent / "stage_worker.py"
STEPS, ROWS, MICRO_BATCHES, WIDTH = 3, 24, 4, 37
# Of a micro-batch: no other tensor of the model is as large.
BORDER_BYTES = ROWS // MICRO_BATCHES * WIDTH * 4


def on_ranks(
    ranks: int, arguments: Sequence[str], environment: Mapping[str, str], fails: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Runs Python on so many ranks of mpirun, or without it where there are none."""
    command = [sys.executable, *arguments]
    if ranks:
        command = [find_mpirun(), "--oversubscribe", "-n", str(ranks), *command]
    done = subprocess.run(
        command,
        env={**mpirun_environment(), **environment},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=90,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("transport", ["nccl", "staged"])
@pytest.mark.parametrize("where", ["threads", "mpi"])
def test_values_arrive_as_they_were_made(
    standin_cuda: Mapping[str, str], transport: str, where: str
) -> None:
    """Of several types and shapes, some unknown to the receiver, by several schedules."""
    if not FULL and where == "mpi":
        pytest.skip("in the full tier; test_delays.py has NCCL's")
    environment = {**standin_cuda, "STANDIN_GUARD": "1", "ONNXPAR_TIMEOUT": "30"}
    ranks = 2 if where == "mpi" else 0
    done = on_ranks(ranks, [str(WORKER), transport, where], environment)
    computed = re.findall(r"rank (\d) computed (\d+)", done.stdout)
    assert sorted(rank for rank, _ in computed) == ["0", "1"]
    assert min(int(count) for _, count in computed) > 100


@pytest.mark.parametrize("where", ["threads", "mpi"])
def test_a_stage_that_fails_ends_all(standin_cuda: Mapping[str, str], where: str) -> None:
    environment = {**standin_cuda, "ONNXPAR_TIMEOUT": "30"}
    ranks = 2 if where == "mpi" else 0
    done = on_ranks(ranks, [str(WORKER), "nccl", where, "fails"], environment, fails=True)
    message = "r1 | RuntimeError('it broke')" if ranks else "first failure: rank 1: RuntimeError("
    assert message in done.stderr and "computed" not in done.stdout, done.stderr


def train(
    folder: Path, transport: str, environment: Mapping[str, str], *more: str
) -> list[list[str]]:
    """Returns what was called in a training of two stages, a line a call."""
    pipeline = {"stages": 2, "micro_batches": MICRO_BATCHES}
    strategy = Strategy.from_dict(
        {"devices": 2, "pipeline": {**pipeline, "assign": {"/fc1/*": 0, "/fc2/*": 1}}}
    )
    model = mlp.build(image=8, hidden=(WIDTH,))
    out = shard(folder / transport, model, strategy, optimizer="sgd")
    log = folder / f"{transport}.log"
    arguments = ["train", str(out), "--data", "digits", "--batch-size", str(ROWS), "--lr", "0.1"]
    arguments += ["--steps", str(STEPS), "--device", "cuda", "--transport", transport, *more]
    settings = {"STANDIN_GUARD": "1", "STANDIN_DEVICES": "2", "STANDIN_LOG": str(log)}
    on_ranks(2, ["-m", "onnxpar.cli", *arguments], {**environment, **settings})
    return [line.split("\t") for line in log.read_text().splitlines()]


def test_nothing_handed_on_passes_through_the_host(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    lines = train(tmp_path, "nccl", standin_cuda, "--ort", "cuda.enable_cuda_graph=1")
    # Values come in at any time, for which CUDA is asked for memory: so no stage is captured.
    assert not any(line[0] in ("capture", "graph") for line in lines)
    messages = STEPS * MICRO_BATCHES * 2  # there and back
    copies = Counter(
        line[1] for line in lines if line[0] == "memcpy" and int(line[2]) == BORDER_BYTES
    )
    # One each, into what is sent.
    assert copies == {"same": messages}, copies
    calls = Counter(line[1] for line in lines if line[0] == "nccl" and line[1] in ("Send", "Recv"))
    assert calls == {"Send": messages, "Recv": messages}
    sizes = {int(line[4].split()[0]) for line in lines if line[:2] == ["nccl", "Send"]}
    assert sizes == {BORDER_BYTES}, sizes


@pytest.mark.full
def test_without_nccl_it_is_pinned(standin_cuda: Mapping[str, str], tmp_path: Path) -> None:
    lines = train(tmp_path, "mpi", standin_cuda)
    messages = STEPS * MICRO_BATCHES * 2
    copies = Counter(
        (line[1], line[4]) for line in lines if line[0] == "memcpy" and int(line[2]) == BORDER_BYTES
    )
    assert copies == {("DtoH", "async"): messages, ("HtoD", "async"): messages}, copies
    assert not any(line[:2] == ["nccl", "Send"] for line in lines)

"""Programs on a device that takes its time: the stand-ins with STANDIN_ASYNC (`standin/README.md`).

What they compute must not depend on when: an event that nobody waits for, memory that is used too
early, and kernels that wait for one another in a circle show for some seed.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import linear
import numpy as np
import pytest
from safetensors.numpy import load_file

from onnxpar_runtime.launch import find_mpirun, mpirun_environment

FULL = bool(os.environ.get("ONNXPAR_FULL"))
SEEDS = ["0", "1", "2", "3", "4"] if FULL else ["1"]
STEPS, ROWS = 12, 100
GRAPHS = ["--ort", "cuda.enable_cuda_graph=1"]


def run(environment: Mapping[str, str], ranks: int, arguments: list[str], **more: str) -> str:
    """Returns what the command line prints on so many ranks."""
    command = [sys.executable, "-m", "onnxpar.cli", *arguments]
    if ranks > 1:
        command = [find_mpirun(), "--oversubscribe", "-n", str(ranks), *command]
    settings = {"STANDIN_DEVICES": str(ranks), "ONNXPAR_TIMEOUT": "20", **more}
    done = subprocess.run(
        command,
        env={**mpirun_environment(environment), **settings},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ["--log-every", "5"]),
        (1, GRAPHS),
        (2, ["--transport", "nccl"]),
        (2, ["--transport", "nccl", *GRAPHS]),
        (2, ["--transport", "mpi", "--log-every", "5"]),
    ],
    ids=["one rank", "one rank, graphs", "nccl", "nccl, graphs", "staged"],
)
def test_training(
    standin_cuda: Mapping[str, str], tmp_path: Path, ranks: int, options: list[str], seed: str
) -> None:
    """All that is computed in it is real: the parameters are those of numpy."""
    out = linear.cut(tmp_path, ranks, "--symbol", "batch:divisor=2")
    arguments = ["train", str(out), "--data", "digits", "--batch-size", str(ROWS), "--lr", "1"]
    arguments += ["--steps", str(STEPS), "--seed", "0", "--device", "cuda", *options]
    # Parameters are copied out beside the next step. The last two checkpoints stay.
    arguments += ["--checkpoint", str(tmp_path / "ck"), "--every", str(STEPS - 1)]
    run(standin_cuda, ranks, arguments, STANDIN_ASYNC=seed)
    for step in (STEPS - 1, STEPS):
        file = tmp_path / "ck" / f"step-{step:08}" / "rank0000.safetensors"
        _, wanted = linear.trained(1, ROWS, 1, 0, steps=step)
        # Sums of 100 products in float32, a few times 2^-24 each, over 12 steps.
        np.testing.assert_allclose(load_file(file)["w"], wanted, rtol=0, atol=1e-5)

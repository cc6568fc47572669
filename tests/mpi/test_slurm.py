"""Ranks that Slurm starts, on a Slurm of one node that `tools/slurm` sets up."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from onnxpar.cli import main
from tests.cli import linear

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0
        or not all(map(shutil.which, ("slurmd", "slurmctld", "munged", "srun")))
        or not any(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")),
        reason="needs root, and Debian's slurmctld, slurmd, slurm-client, munge and libpmix-dev",
    ),
]


def in_slurm(script: str, folder: Path) -> str:
    """Runs the script as a job in a folder, and returns what it prints."""
    (folder / "job.sh").write_text(f"#!/bin/bash\n{script}")
    submit = ("sbatch", "--wait", "--output=out.txt", "--ntasks=4", "job.sh")
    done = subprocess.run(
        [ROOT / "tools" / "slurm", "--", *submit],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == "", done.stderr
    return (folder / "out.txt").read_text()


def test_a_job_of_four_ranks_trains_and_resumes(tmp_path: Path) -> None:
    linear.shard(tmp_path, 4)
    linear.shard(tmp_path, 1)
    run = "--data digits --batch-size 64 --lr 0.05 --print-every 0"
    start = "srun --mpi=pmix onnxpar train ranks4"
    text = in_slurm(
        f"{start} {run} --steps 4 --checkpoint points --every 2 --log first.jsonl &&\n"
        f"{start} {run} --steps 7 --resume points --log second.jsonl && echo finished\n",
        tmp_path,
    )
    assert "finished" in text and "resumed from points/step-00000004" in text, text
    alone = ["train", str(tmp_path / "ranks1"), *run.split(), "--steps", "7"]
    assert main([*alone, "--log", str(tmp_path / "alone.jsonl")]) == 0

    def losses(name: str) -> list[float]:
        return [json.loads(line)["loss"] for line in (tmp_path / name).read_text().splitlines()]

    # Sums of 64 float32 terms of about 1 in another order, and 7 steps that carry them on.
    assert losses("first.jsonl") + losses("second.jsonl") == pytest.approx(
        losses("alone.jsonl"), rel=1e-5
    )


def test_a_step_without_mpi_is_refused_once(tmp_path: Path) -> None:
    linear.shard(tmp_path, 4)
    text = in_slurm(
        "srun --mpi=none onnxpar train ranks4 --data digits --batch-size 64 --lr 1\n", tmp_path
    )
    assert text.count("onnxpar: error: srun started 4 processes, but MPI does not connect") == 1
    assert "use srun --mpi=pmix with Open MPI" in text

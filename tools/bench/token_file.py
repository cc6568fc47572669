#!/usr/bin/env python3
"""Trains on a file of tokens that is larger than memory, and on arrays in memory, in turns.

    tools/bench/token_file.py --rounds 5
    tools/bench/token_file.py --ranks 1         # on a busy machine: compare the CPU time

The model is a GPT of models/transformer.py, under mpirun with data parallel over two ranks. The
file is sparse, so it takes no place on the disk, and its pages are made when they are read. The
arrays are some of its windows, in an `npz` file. Each round runs `onnxpar train` once with each of
them. The columns are medians over the rounds: seconds of a step (itself the median of a run's
steps), the part of them in which rank 0 waited for a batch, the seconds of the run without its
steps, its CPU time, start and end included, and the memory of rank 0, in which the pages of a file
count that it has touched. Ranks that wait for one another use CPU time, too.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from step_cases import gpt

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar_runtime.launch import find_mpirun, mpirun_environment

SEQ, BATCH = 64, 32
SKIPPED = 10
"""Steps at the beginning of a run that are not counted."""
COLUMNS = ("step ms", "waiting ms", "other s", "CPU s", "memory GiB")


def cpu_of_children() -> float:
    """Returns the CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(directory: Path, source: str, ranks: int, steps: int, log: Path) -> tuple[float, ...]:
    """Runs a training, and returns a number for each column."""
    command = [
        str(find_mpirun()), "--oversubscribe", "-n", str(ranks), sys.executable, "-m",
        "onnxpar.cli", "train", str(directory), "--data", source, "--batch-size", str(BATCH),
        "--steps", str(steps), "--lr", "1e-4", "--log", str(log), "--print-every", "0",
    ]  # fmt: skip
    environment = mpirun_environment() | {"OMP_NUM_THREADS": "1"}
    begin, spent = time.perf_counter(), cpu_of_children()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - begin
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    step_s, input_s = ([line[name] for line in lines] for name in ("step_s", "input_s"))
    return (
        1e3 * median(step_s[SKIPPED:]),
        1e3 * median(input_s[SKIPPED:]),
        wall - sum(step_s),
        cpu_of_children() - spent,
        lines[-1]["memory_bytes"] / 2**30,
    )


def main() -> None:
    """Prints a line for each source."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=10, help="size of the file (default: 10)")
    parser.add_argument("--windows", type=int, default=100_000, help="of the npz (default: 100000)")
    parser.add_argument("--steps", type=int, default=200, help="of a run (default: 200)")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = gpt(2, 128, 4, SEQ, BATCH, 1024)
        model.export(scratch / "gpt.onnx")
        spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"))
        directory = scratch / "ranks"
        shard_model(scratch / "gpt.onnx", "dp", directory, devices=options.ranks, training=spec)
        with (scratch / "text.tokens").open("wb") as stream:
            stream.truncate(int(options.gib * 2**30))
        windows = np.zeros((options.windows, SEQ), np.int64)
        np.savez(
            scratch / "part.npz", allow_pickle=False, **{model.input: windows, "labels": windows}
        )
        sources = {
            "tokens": f"tokens:{scratch / 'text.tokens'},seq={SEQ}",
            "npz": f"npz:{scratch / 'part.npz'}",
        }
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in sources}
        for number in range(options.rounds):
            # Neither of them is always the first.
            for name in sorted(sources, reverse=bool(number % 2)):
                log = scratch / "log.jsonl"
                found[name].append(
                    measured(directory, sources[name], options.ranks, options.steps, log)
                )
    print(f"{options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print(f"{'source':8}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name, runs in found.items():
        middle = [median(column) for column in zip(*runs, strict=True)]
        print(f"{name:8}" + "".join(f"{value:12.2f}" for value in middle))
        steps = " ".join(f"{run[0]:.1f}" for run in runs)
        print(f"        step ms of each round: {steps}")
    for column in (0, 3):
        pairs = zip(found["tokens"], found["npz"], strict=True)
        ratios = sorted(tokens[column] / npz[column] for tokens, npz in pairs)
        print(f"tokens / npz, {COLUMNS[column]}: {' '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()

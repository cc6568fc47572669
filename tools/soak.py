"""Trains for many steps, and checks that the ranks take no more of the machine than at the start.

    python tools/soak.py [--steps 20000] [--data MODULE:FUNCTION]

`onnxpar train` runs on 4 ranks under mpirun (dp=2, tp=2; a tiny network). Each step has another
number of samples, ten steps are an epoch with an evaluation behind it, and each hundredth step
writes a checkpoint. So 20,000 steps are 2,000 evaluations and 200 checkpoints. Once a second the
script reads from /proc what each rank has. After a twentieth of the steps (1,000), this must not
grow: its memory, its shared memory, and how many files it has open, threads and mappings.

The script prints the numbers, and a line for each that grew; the exit code is then 1. `--data` is
for data of your own with 64 numbers and a class for each sample. It uses the Python on the PATH.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from onnxpar_runtime.launch import find_mpirun, mpirun_environment

ROOT = Path(__file__).parents[1]
RANKS, EPOCH, EVERY = 4, 10, 100
WARM = 1 / 20
"""The share of the steps after which nothing may grow."""
EVERY_S = 1.0
ALLOWED_BYTES = 1 << 20
"""What memory may grow by: in 20,000 steps 50 bytes a step. The allocator's own is 0.2 MiB."""
DATA = f"""
import numpy as np
def batches(epoch, seed, train):
    rng = np.random.default_rng([seed, epoch, train])
    for _ in range({EPOCH} if train else 1):
        count = rng.integers(1, 13)
        x = rng.random((count, 1, 8, 8), np.float32)
        yield {{"x": x, "labels": rng.integers(0, 10, count)}}
"""


@dataclass(frozen=True)
class Sample:
    """What a rank has.

    Attributes:
        memory: Bytes of its own.
        shared: Bytes that it shares with other ranks, as far as it has used them.
        descriptors: Open files and sockets.
        threads: Threads.
        mappings: Parts of its address space.
    """

    memory: int
    shared: int
    descriptors: int
    threads: int
    mappings: int


Samples = dict[int, list[tuple[int, Sample]]]
"""Of each rank: the steps that were done, and what it had then."""


def sample(pid: int) -> Sample:
    """Returns what a process has."""
    folder = Path("/proc", str(pid))
    lines = (line.split() for line in (folder / "status").read_text().splitlines())
    status = {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
    return Sample(
        memory=status["RssAnon:"] << 10,
        shared=status["RssShmem:"] << 10,
        descriptors=len(list((folder / "fd").iterdir())),
        threads=status["Threads:"],
        mappings=(folder / "maps").read_bytes().count(b"\n"),
    )


def grown(samples: Samples, steps: int) -> list[str]:
    """Returns what has grown after the first steps.

    Memory is compared by the median of the samples in a twentieth of the steps, since it changes
    with the size of a batch; all else by its least number there, since a rank that writes a
    checkpoint has more for a moment.
    """
    found = []
    for rank, series in sorted(samples.items()):
        first, last = within(series, WARM, 2 * WARM, steps), within(series, 1 - WARM, 1, steps)
        if not first or not last:
            found.append(f"rank {rank}: no samples to compare; try more steps")
            continue
        for field in fields(Sample):
            before, after = ([getattr(s, field.name) for s in part] for part in (first, last))
            if field.name == "memory":
                more, allowed = statistics.median(after) - statistics.median(before), ALLOWED_BYTES
            else:
                more, allowed = min(after) - min(before), 0
            if more > allowed:
                found.append(f"rank {rank}: {field.name} grew by {more:,.0f}")
    return found


def within(
    series: Sequence[tuple[int, Sample]], start: float, stop: float, steps: int
) -> list[Sample]:
    """Returns the samples between two shares of the steps.

    Those after the last step are left out: a rank that ends has less.
    """
    return [s for step, s in series if start * steps <= step < stop * steps]


def table(samples: Samples, steps: int) -> Iterator[str]:
    """Returns lines with what each rank had at times."""
    names = [field.name for field in fields(Sample)]
    yield f"{'rank':>4} {'step':>6} " + " ".join(f"{name:>11}" for name in names)
    for rank, series in sorted(samples.items()):
        running = [entry for entry in series if entry[0] < steps]
        for share in (WARM, 0.25, 0.5, 0.75, 1.0) if running else ():
            step, had = min(running, key=lambda entry: abs(entry[0] - share * steps))
            yield f"{rank:>4} {step:>6} " + " ".join(f"{n:>11,}" for n in astuple(had))


def prepare(folder: Path) -> Path:
    """Writes the network's training program to `folder`, and returns its directory."""
    model, made = folder / "mlp.onnx", folder / "made"
    sizes = ["--image", "8", "--hidden", "16"]
    train = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "adamw"]
    shard = ["shard", str(model), "--strategy", "dp=2,tp=2", *train, "-o", str(made)]
    write = [str(ROOT / "models" / "mlp.py"), "-o", str(model), *sizes]
    for line in (write, ["-m", "onnxpar.cli", *shard]):
        subprocess.run([sys.executable, *line], check=True, stdout=subprocess.DEVNULL)
    return made


def soak(folder: Path, steps: int, data: str | None = None) -> tuple[Samples, int]:
    """Trains in `folder`; returns the samples, and the number of evaluations.

    Raises:
        SystemExit: The training failed.
    """
    made, log, printed = prepare(folder), folder / "log.jsonl", folder / "printed"
    (folder / "soak_data.py").write_text(DATA)
    line = [find_mpirun(), "--oversubscribe", "-n", str(RANKS), sys.executable, "-m", "onnxpar.cli"]
    line += ["train", str(made), "--data", data or "soak_data:batches", "--lr", "1e-4", "--steps"]
    line += [str(steps), "--eval-data", data or "soak_data:batches", "--print-every", "0", "--log"]
    line += [str(log), "--checkpoint", str(folder / "points"), "--every", str(EVERY)]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**mpirun_environment(folder=folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    samples: Samples = {}
    with printed.open("w") as stream:
        process = subprocess.Popen(line, env=environment, stdout=stream)
        try:
            while process.poll() is None:
                time.sleep(EVERY_S)
                done = log.read_bytes().count(b'"step": ') if log.exists() else 0
                for rank, pid in enumerate(ranks_of(process.pid)):
                    # A rank that is ending has no memory any more, or no entry in /proc.
                    with suppress(OSError, KeyError):
                        samples.setdefault(rank, []).append((done, sample(pid)))
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        sys.exit(f"the training ended with code {process.returncode}")
    return samples, printed.read_text().count("evaluated")


def ranks_of(mpirun: int) -> list[int]:
    """Returns the processes that mpirun has started, once all have been."""
    texts = [path.read_text() for path in Path(f"/proc/{mpirun}/task").glob("*/children")]
    found = sorted(int(word) for text in texts for word in text.split())
    return found if len(found) == RANKS else []


def main() -> int:
    """Trains, prints what the ranks had and what grew; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=20_000, help="default 20000")
    parser.add_argument("--data", metavar="MODULE:FUNCTION", help="default: random data")
    options = parser.parse_args()
    # By an exception, which ends mpirun.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    start = time.monotonic()
    with TemporaryDirectory(prefix="onnxpar-soak-") as name:
        samples, evaluations = soak(Path(name), options.steps, options.data)
    seconds = time.monotonic() - start
    print(*table(samples, options.steps), sep="\n")
    checkpoints = options.steps // EVERY
    print(
        f"{options.steps:,} steps, {evaluations:,} evaluations and {checkpoints} checkpoints on "
        f"{RANKS} ranks in {seconds:.0f} s"
    )
    found = grown(samples, options.steps)
    print(*found or [f"nothing grew after {WARM:.0%} of the steps"], sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Kills commands at random times, and checks what they leave.

    python tools/kills.py [--count 100] [--seed 0] [COMMAND …]

Commands are `train` (two MPI ranks with checkpoints), `merge` and `reshard` (of a checkpoint) and
`shard`; by default each kill draws one. Of a training, one rank, mpirun or everything is killed by
SIGKILL. After each kill, this must hold:

- no process of the command is left after some seconds, and no file in /dev/shm that none uses (but
  Open MPI's own: if mpirun is killed, it cannot remove them; they are counted and removed);
- what the command writes (the target, or each checkpoint) is complete or absent: a target has the
  bytes of a run that was not killed, a checkpoint its files;
- the command succeeds when it is repeated. A training continues from its newest checkpoint. Each
  step that either run logged has exactly the loss of the run that was not killed.

It prints a line for each kill that leaves something else; the exit code is then 1. It uses the
Python on the PATH.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from onnxpar_runtime.launch import find_mpirun, mpirun_environment

ROOT = Path(__file__).parents[1]
MARK = "ONNXPAR_KILLS"
"""In the environment of every process of a command."""
STEPS, EVERY = 60, 5
ENDS_S = 20.0
"""Within this time all ranks have ended. They notice the end of mpirun, or of another rank."""
SHARED = Path("/dev/shm")
WHOM = ("rank", "mpirun", "everything")
OPEN_MPI = "sm_segment."
Step = tuple[int, int]
"""Epoch and step."""


@dataclass(frozen=True)
class Prepared:
    """What the commands read, and what they must write.

    Attributes:
        folder: A folder with all of it.
        seconds: How long each command takes if nobody kills it.
        losses: The loss of each step, by epoch and step.
    """

    folder: Path
    seconds: dict[str, float]
    losses: dict[Step, float]


def onnxpar(*arguments: object) -> list[str]:
    """Returns a command line of onnxpar."""
    return [sys.executable, "-m", "onnxpar.cli", *map(str, arguments)]


def train(directory: Path, points: Path, log: Path, *more: object) -> list[str]:
    """Returns the command line of a training on two ranks."""
    options = ["--data", "digits", "--batch-size", 64, "--steps", STEPS, "--lr", "1e-3"]
    options += ["--checkpoint", points, "--every", EVERY, "--keep", STEPS, "--log", log, *more]
    return [find_mpirun(), "-n", "2", "--oversubscribe", *onnxpar("train", directory, *options)]


def line_of(command: str, folder: Path, target: Path) -> list[str]:
    """Returns the command line of `command`, which writes `target`."""
    point = folder / "points" / f"step-{STEPS:08d}"
    if command == "merge":
        return onnxpar("checkpoint", "merge", point, target)
    if command == "reshard":
        return onnxpar("checkpoint", "reshard", point, target, "--to", folder / "other")
    if command == "shard":
        return shard(folder, "dp=2", target)
    return train(folder / "train", target, target.with_suffix(".jsonl"))


def shard(folder: Path, strategy: str, target: Path) -> list[str]:
    """Returns the command line that shards the model for training."""
    options = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "adam"]
    options += ["--symbol", "batch:divisor=2", "--strategy", strategy]
    return onnxpar("shard", folder / "mlp.onnx", *options, "-o", target)


def environment(mark: str = "", folder: Path | None = None) -> dict[str, str]:
    """Returns the environment of a command; its mpirun keeps its session directory in `folder`."""
    return {**mpirun_environment(folder=folder), "OMP_NUM_THREADS": "1", MARK: mark}


def finish(line: Sequence[str], *, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Runs a command to its end."""
    done = subprocess.run(
        line, env=environment(), capture_output=True, text=True, errors="replace", check=False
    )
    if check and done.returncode:
        sys.exit(f"{' '.join(line)} failed with code {done.returncode}:\n{done.stderr}")
    return done


def prepare(folder: Path) -> Prepared:
    """Runs every command once, without a kill."""
    finish([sys.executable, str(ROOT / "models" / "mlp.py"), "-o", str(folder / "mlp.onnx")])
    finish(shard(folder, "dp=2", folder / "train"))
    finish(shard(folder, "tp=2", folder / "other"))
    seconds = {}
    for command, name in (
        ("train", "points"), ("merge", "merge"), ("reshard", "reshard"), ("shard", "shard"),
    ):  # fmt: skip
        start = time.monotonic()
        finish(line_of(command, folder, folder / name))
        seconds[command] = time.monotonic() - start
    return Prepared(folder, seconds, losses_of(folder / "points.jsonl"))


def losses_of(log: Path) -> dict[Step, float]:
    """Returns the loss of each step in a log; the last line may have been cut by the kill."""
    found = {}
    lines = log.read_text(encoding="utf-8").split("\n") if log.exists() else []
    for line in lines[:-1]:
        entry = json.loads(line)
        found[int(entry["epoch"]), int(entry["step"])] = float(entry["loss"])
    return found


def content(path: Path) -> dict[str, bytes]:
    """Returns the files of a file or a folder."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def marked(mark: str) -> list[int]:
    """Returns the processes with this mark that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if ours and state not in "ZX":
            found.append(int(folder.name))
    return found


def unused() -> set[str]:
    """Returns the files in /dev/shm that no process has open or mapped."""
    used = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            used |= {
                line.split()[-1]
                for line in (folder / "maps").read_text().splitlines()
                if "/" in line
            }
            used |= {os.readlink(link) for link in (folder / "fd").iterdir()}
        except OSError:
            continue
    return {str(path) for path in SHARED.iterdir() if str(path) not in used}


def kill(mark: str, process: "subprocess.Popen[bytes]", whom: str, draw: random.Random) -> None:
    """Kills a part of a command."""
    others = [pid for pid in marked(mark) if pid != process.pid]
    pids = {"rank": [draw.choice(others)] if others else [], "mpirun": [process.pid]}
    for pid in pids.get(whom, [process.pid, *others]) or [process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def attempt(
    made: Prepared,
    command: str,
    whom: str,
    draw: random.Random,
    target: Path,
    counts: Counter[str],
) -> tuple[str, list[str]]:
    """Kills a command once; returns what was killed and when, and what was wrong then."""
    before, mark = unused(), secrets.token_hex(8)
    after = draw.uniform(0.0, 1.05 * made.seconds[command])
    process = subprocess.Popen(
        line_of(command, made.folder, target),
        env=environment(mark, target.parent),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(after)
    kill(mark, process, whom, draw)
    process.wait()
    end = time.monotonic() + ENDS_S
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.1)
    wrong = [f"process {pid} is left" for pid in marked(mark)]
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    shared = sorted(unused() - before)
    wrong += [f"{path} is left" for path in shared if not Path(path).name.startswith(OPEN_MPI)]
    for path in shared:
        if Path(path).name.startswith(OPEN_MPI):
            Path(path).unlink(missing_ok=True)
            counts[OPEN_MPI] += 1
    wrong += left_points(made, target) if command == "train" else left(made, command, target)
    done = finish(again(made, command, target), check=False)
    if done.returncode:
        wrong.append(f"repeated, it ends with code {done.returncode}: {done.stderr.strip()[-300:]}")
    elif command == "train":
        wrong += compared(made, target)
    else:
        wrong += left(made, command, target, absent=False)
    return f"{command}, {whom} after {after:.2f} s", wrong


def again(made: Prepared, command: str, target: Path) -> list[str]:
    """Returns the command line that completes what was killed."""
    if command != "train":
        if target.exists():  # the kill came too late
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        return line_of(command, made.folder, target)
    log = target.with_suffix(".resumed.jsonl")
    more = ["--resume", target] if points_of(target) else []
    return train(made.folder / "train", target, log, *more)


def points_of(target: Path) -> list[Path]:
    """Returns the checkpoints of a training, oldest first."""
    return sorted(target.glob("step-*")) if target.is_dir() else []


def left(made: Prepared, command: str, target: Path, *, absent: bool = True) -> list[str]:
    """Returns what is wrong with the target of a command."""
    if absent and not target.exists():
        return []
    same = content(target) == content(made.folder / command)
    return [] if same else [f"{target.name} is neither complete nor absent"]


def left_points(made: Prepared, target: Path) -> list[str]:
    """Returns what is wrong with the checkpoints of a training that was killed."""
    return [
        f"checkpoint {point.name} is not complete"
        for point in points_of(target)
        if content(point).keys() != content(made.folder / "points" / point.name).keys()
    ]


def compared(made: Prepared, target: Path) -> list[str]:
    """Returns what is wrong with the losses of a training that was killed and continued."""
    first = losses_of(target.with_suffix(".jsonl"))
    second = losses_of(target.with_suffix(".resumed.jsonl"))
    wrong = [
        f"step {step} of the {which} run: expected loss {made.losses[step]!r}, got {loss!r}"
        for which, found in (("killed", first), ("continued", second))
        for step, loss in found.items()
        if loss != made.losses[step]
    ]
    newest = points_of(target)[-1:]
    # All steps had been done, if the kill came in the end.
    if not newest or newest[0].name != f"step-{STEPS:08d}":
        wrong.append(f"the continued run has the steps {sorted(second)}")
    return wrong


def main() -> int:
    """Kills as often as asked; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    commands = ("train", "merge", "reshard", "shard")
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=", ".join(commands))
    parser.add_argument("--count", type=int, default=100, help="kills; default 100")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    options = parser.parse_args()
    unknown = [name for name in options.commands if name not in commands]
    if unknown:
        parser.error(f"expected commands among {', '.join(commands)}, got {unknown[0]}")
    draw, counts = random.Random(options.seed), Counter[str]()
    with TemporaryDirectory(prefix="onnxpar-kills-") as name:
        made = prepare(Path(name))
        for number in range(options.count):
            # A training takes longer than the others, and more can happen in it.
            command = draw.choice(options.commands or ("train", "train", *commands[1:]))
            folder = Path(name, f"kill{number}")
            folder.mkdir()
            whom = draw.choice(WHOM) if command == "train" else "everything"
            what, wrong = attempt(made, command, whom, draw, folder / "target", counts)
            counts[command] += 1
            counts["wrong"] += bool(wrong)
            for text in wrong:
                print(f"kill {number} ({what}): {text}", flush=True)
            shutil.rmtree(folder)
    kinds = ", ".join(f"{counts[c]} of {c}" for c in commands)
    print(f"{options.count} kills ({kinds}): {counts['wrong']} left something that they should not")
    print(f"files of Open MPI that were left in {SHARED}: {counts[OPEN_MPI]}")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

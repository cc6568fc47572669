#!/usr/bin/env python3
"""Compares a training step of onnxpar with one of PyTorch, interleaved in one run.

    tools/bench/step.py                       # MLP and GPT, SGD and AdamW
    tools/bench/step.py --model mlp --torch-parallel
    tools/bench/step.py --model gpt --profile
    tools/bench/step.py --quick               # tiny models: do both sides still run, and agree?

The models are the MLP of models/mlp.py at batch 128, and a GPT of models/transformer.py (4 layers,
d 512, 8 heads, seq 128, batch 8, vocabulary 8192 not tied: 21 M parameters). The sides are PyTorch
in one process with 2 threads; onnxpar on 1 device with 2 threads; onnxpar under mpirun with data
parallel and with tensor parallel over 2 ranks, each with 1 thread; and with --torch-parallel also
PyTorch's DDP and tensor parallel over gloo. All begin with the same weights and take the same
batches.

Each side has processes of its own, which wait on a socket while other sides have their turn. First
each takes 20 steps, and its losses must equal PyTorch's to 5 decimals. Then come rounds: in each,
every side takes a turn of several steps. A side's ratio is the median, over the rounds, of its time
divided by that of PyTorch's single process in the same round. So other work on the machine slows
both. This does not help if more threads want to run than there are cores: threads that wait
actively for one another, as PyTorch's do, then take many times as long. In that case, look at the
CPU time of a step (cpu ms: that of all threads and ranks, including active waiting), or let
PyTorch's threads sleep with OMP_WAIT_POLICY=passive. A step is all that a user waits for: from
global arrays in memory to the loss as a number.

Goals: 1 device takes at most 1.05 times as long as PyTorch. dp and tp take no longer than PyTorch's
own dp and tp, measured in the same run, or else in an earlier one. With --check, the exit code is 1
if a goal is missed.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from step_cases import BATCHES, INTERFACE, LARGE, MODELS, OPTIMIZERS, QUICK, Job, Side

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar_runtime.launch import find_mpirun, mpirun_environment

HERE = Path(__file__).resolve().parent
TWO_NODES = HERE.parent / "two-nodes"
_NUMBERS = count()
WAYS = {"one": "dp", "forward": "dp"}
"""The mesh axis of a side that is not named after it."""
BASE = Side("torch", "one", 1, 2)
OURS = (Side("onnxpar", "one", 1, 2), Side("onnxpar", "dp", 2, 1), Side("onnxpar", "tp", 2, 1))
THEIRS = (Side("torch", "dp", 2, 1), Side("torch", "tp", 2, 1))
ONE_GOAL = 1.05
MEASURED = {
    ("mlp", "dp"): {"sgd": 2.45, "adamw": 2.24},
    ("gpt", "dp"): {"sgd": 1.07, "adamw": 1.10},
    ("mlp", "tp"): {"sgd": 1.58, "adamw": 1.15},
    ("gpt", "tp"): {"sgd": 1.18, "adamw": 1.20},
}
"""PyTorch 2.13's own ratios, 2 ranks of 1 thread, measured on a quiet machine of 2 cores."""
DECIMALS = 1e-5
PAUSE = 0.02  # seconds between turns: threads that spin for work have gone to sleep by then
PATIENCE = 5.0  # seconds for a side that has failed to end
LIMIT = 600.0  # seconds after which a side that has not answered is taken to hang
PROFILED = 10  # steps under the profiler
SHOWN = 16  # operators of a profile


class SideError(RuntimeError):
    """A side could not be started, or ended before its time."""


@dataclass(frozen=True)
class Turn:
    """What some steps of a side took.

    Attributes:
        seconds: Of the slowest rank.
        processor: Seconds of processor time of all ranks together.
        losses: Loss of each step.
        parts: Seconds of parts of the steps, mean of the ranks.
        sent: Bytes that a rank has sent over the link, mean of the ranks.
    """

    seconds: float
    processor: float
    losses: list[float]
    parts: Mapping[str, float]
    sent: float


class Running:
    """A side's processes, and the lines to its ranks.

    Args:
        side: The side.
        scratch: A folder for it alone.

    Attributes:
        side: The side.
        scratch: The folder.
    """

    def __init__(self, side: Side, scratch: Path) -> None:
        """Opens the socket; the processes come by `start`."""
        self.side = side
        self.scratch = scratch
        self.address = str(scratch / "socket")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Connection] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen(side.ranks)
        self._server.settimeout(0.5)

    def start(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        """Starts the processes; what they print goes to a file."""
        with (self.scratch / "log").open("wb") as log:
            for command in commands:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
                self._processes.append(process)

    def connect(self) -> None:
        """Waits until all ranks are ready.

        Raises:
            SideError: A process has ended, or they take too long.
        """
        lines: dict[int, Connection] = {}
        deadline = time.monotonic() + LIMIT
        while len(lines) < self.side.ranks:
            if any(p.poll() is not None for p in self._processes) or time.monotonic() > deadline:
                raise self._failed()
            try:
                line, _ = self._server.accept()
            except TimeoutError:
                continue
            line.setblocking(True)
            connection = Connection(line.detach())
            lines[self._receive(connection)] = connection
        self._lines = [lines[rank] for rank in sorted(lines)]

    def steps(self, count: int) -> "Turn":
        """Lets all ranks do steps.

        Raises:
            SideError: A process has ended, or they take too long.
        """
        try:
            for line in self._lines:
                line.send(count)
        except OSError:
            raise self._failed() from None
        answers = [self._receive(line) for line in self._lines]
        seconds, processor, losses, parts, sent = zip(*answers, strict=True)
        means = {part: statistics.mean(p[part] for p in parts) for part in parts[0]}
        return Turn(max(seconds), sum(processor), losses[0], means, statistics.mean(sent))

    def _receive(self, line: Connection) -> Any:
        try:
            if line.poll(LIMIT):
                return line.recv()
        except (EOFError, OSError):
            raise self._failed() from None
        raise self._failed()

    def _failed(self) -> SideError:
        with suppress(subprocess.TimeoutExpired):
            self._processes[0].wait(timeout=PATIENCE)  # mpirun passes on what its ranks wrote
        text = (self.scratch / "log").read_text(encoding="utf-8", errors="replace")
        return SideError(f"{self.side.label} failed; the end of what it wrote:\n{text[-3000:]}")

    def close(self) -> None:
        """Ends the processes: those that wait for work in order, others at once."""
        for line in self._lines:
            # A rank that has ended already is waited for below.
            with suppress(OSError):
                line.send(0)
        for process in self._processes:
            try:
                process.wait(timeout=30 if self._lines else 0)
            except subprocess.TimeoutExpired:
                # With what it started: mpirun under tools/two-nodes.
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        for line in self._lines:
            line.close()
        self._server.close()


def two_nodes(rate: str, ranks: int, environment: dict[str, str]) -> list[str]:
    """The command to which a program is appended that two nodes run, with half of the ranks each.

    Args:
        rate: Of their link.
        ranks: Their number.
        environment: Of the command, which gets what it needs.
    """
    scripts = Path(find_mpirun()).parent
    environment["PATH"] = f"{scripts}{os.pathsep}{environment.get('PATH', os.defpath)}"
    environment["GLOO_SOCKET_IFNAME"] = INTERFACE
    name = f"step{os.getpid()}-{next(_NUMBERS)}"
    nodes = [str(TWO_NODES), "--rate", rate, "--slots", str(ranks // 2), "--name", name]
    return [*nodes, "--", "--bind-to", "none", "-n", str(ranks)]


@contextmanager
def start(side: Side, job: Job, folder: Path) -> Iterator[Running]:
    """Starts a side, whose ranks load then; ends it on leaving."""
    running = Running(side, Path(tempfile.mkdtemp(prefix=f"{side.system}-", dir=folder)))
    job = replace(
        job,
        address=running.address,
        scratch=str(running.scratch),
        way=side.way,
        ranks=side.ranks,
        threads=side.threads,
        device=side.device,
        compute=side.compute,
        transport=side.transport,
        link=side.link,
        overlap=side.overlap,
    )
    command = [sys.executable, str(HERE / f"step_{side.system}.py"), job.text]
    environment = mpirun_environment()
    if side.link:
        # Each side has nodes and a link of its own, where nobody else sends.
        nodes = two_nodes(side.link, side.ranks, environment)
        commands = [[*nodes, *command]]
    elif side.system == "torch":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        commands = [[*command, str(rank)] for rank in range(side.ranks)]
    elif side.ranks == 1:
        commands = [command]
    else:
        launcher = [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(side.ranks)]
        commands = [[*launcher, *command]]
    try:
        running.start(commands, environment)
        yield running
    finally:
        running.close()


class PreparedModels:
    """The models as ONNX and the directories of their ranks, each written when first asked for.

    Args:
        folder: Where to write.
        quick: Whether of the small models.
    """

    def __init__(self, folder: Path, quick: bool) -> None:
        """Writes nothing yet."""
        self.folder = folder
        self._models = QUICK if quick else MODELS | LARGE

    def files(self, side: Side, model: str, optimizer: str) -> Path:
        """What a side reads: the ONNX file, or the directory that onnxpar made."""
        path = self.folder / f"{model}.onnx"
        if not path.exists():
            self._models[model].export(path)
        if side.system != "onnxpar":
            return path
        axis = WAYS.get(side.way, side.way)
        name = f"{model}-{optimizer}-{axis}{side.ranks}{side.compute}-{side.level}"
        out = self.folder / name
        if not out.exists():
            spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer(optimizer))
            spec = replace(spec, compute=side.compute or None)
            mesh = f"{axis}={side.ranks}"
            shard_model(path, mesh, out, training=spec, optimizer_parallel=side.level)
        return out


@dataclass(frozen=True)
class Row:
    """What one side of a case took.

    Attributes:
        model: Name of the model.
        optimizer: Name of the optimizer.
        side: The side.
        seconds: Of one step, by round.
        processor: Seconds of processor time of one step, all ranks together, by round.
        ratios: To PyTorch's single process, by round.
        difference: Largest difference of a loss from that of PyTorch's single process.
        least: The smallest of the latter's losses.
        parts: Seconds of parts of one step, by part and round.
        sent: Bytes that a rank sends over the link in one step, by round.
    """

    model: str
    optimizer: str
    side: Side
    seconds: tuple[float, ...]
    processor: tuple[float, ...]
    ratios: tuple[float, ...]
    difference: float
    least: float
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sent: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    def missed(self, goal: float | None) -> list[str]:
        """Which goals do not hold."""
        what = f"{self.model} {self.optimizer} {self.side.label}"
        missed = []
        if not self.difference <= DECIMALS:  # not a number, too
            missed.append(f"{what}: losses differ by {self.difference:.2g}")
        if goal is not None and self.ratio > goal:
            missed.append(f"{what}: {self.ratio:.3f} times PyTorch, at most {goal:.3f} is wanted")
        return missed


def goals(rows: Sequence[Row]) -> dict[Side, float]:
    """The largest ratio that each of onnxpar's sides of one case may have."""
    theirs = {row.side.way: row.ratio for row in rows if row.side in THEIRS}
    found = {}
    for row in rows:
        if row.side.system == "onnxpar":
            way = row.side.way
            measured = MEASURED.get((row.model, way), {}).get(row.optimizer, ONE_GOAL)
            found[row.side] = theirs.get(way, measured)
    return found


def measure(
    sides: Sequence[Side],
    job: Job,
    prepared: PreparedModels,
    rounds: int,
    turn: float,
    compared: int = BATCHES,
) -> list[Row]:
    """Lets the sides take turns on one case.

    Args:
        sides: The sides; the first is what the others are compared with.
        job: The case.
        prepared: The models and directories.
        rounds: Turns of each side.
        turn: Seconds of a turn of the first side, about; it is one step at least.
        compared: Steps at the beginning, whose losses are compared.
    """
    with ExitStack() as stack:
        running = []
        for side in sides:
            files = prepared.files(side, job.model, job.optimizer)
            mine = replace(job, files=str(files))
            running.append(stack.enter_context(start(side, mine, prepared.folder)))
        for ranks in running:
            ranks.connect()
        first = [ranks.steps(compared) for ranks in running]
        each = max(1, round(turn * compared / first[0].seconds))
        turns: list[list[Turn]] = [[] for _ in running]
        for number in range(rounds):
            for k in range(len(running)):
                # Nobody always comes after the same one, nor first.
                index = (number + (k if number % 2 else -k)) % len(running)
                time.sleep(PAUSE)
                turns[index].append(running[index].steps(each))
    rows = []
    for side, taken, begun in zip(sides, turns, first, strict=True):
        pairs = zip(begun.losses, first[0].losses, strict=True)
        rows.append(
            Row(
                model=job.model,
                optimizer=job.optimizer,
                side=side,
                seconds=tuple(t.seconds / each for t in taken),
                processor=tuple(t.processor / each for t in taken),
                ratios=tuple(a.seconds / b.seconds for a, b in zip(taken, turns[0], strict=True)),
                difference=max(abs(a - b) for a, b in pairs),
                least=min(abs(loss) for loss in first[0].losses),
                parts={p: tuple(t.parts[p] / each for t in taken) for p in taken[0].parts},
                sent=tuple(t.sent / each for t in taken),
            )
        )
    return rows


def by_operator(files: Sequence[Path]) -> dict[str, tuple[float, int]]:
    """Seconds and calls of each operator in onnxruntime's profiles, and of `run`."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for file in files:
        for event in json.loads(file.read_text(encoding="utf-8")):
            name = event.get("name", "")
            if event.get("cat") == "Node" and name.endswith("_kernel_time"):
                operator = event["args"]["op_name"]
            elif event.get("cat") == "Session" and name == "model_run":
                operator = "run"
            else:
                continue
            seconds, calls = found[operator]
            found[operator] = seconds + event["dur"] / 1e6, calls + 1
    return dict(found)


def profile(side: Side, job: Job, prepared: PreparedModels) -> None:
    """Prints where a step's time goes, by operator, a mean over steps and ranks."""
    files = str(prepared.files(side, job.model, job.optimizer))
    with start(side, replace(job, files=files, profile=True), prepared.folder) as running:
        running.connect()
        seconds = running.steps(PROFILED).seconds
    found = by_operator(sorted(running.scratch.glob("profile-*")))
    share = 1e3 / PROFILED / side.ranks
    runs, _ = found.pop("run", (0.0, 0))
    kernels = sum(s for s, _ in found.values())
    print(
        f"{job.model} {job.optimizer} {side.label}, under the profiler: a step "
        f"{seconds / PROFILED * 1e3:.2f} ms, runs {runs * share:.2f} ms, operators "
        f"{kernels * share:.2f} ms"
    )
    for operator, (spent, calls) in sorted(found.items(), key=lambda item: -item[1][0])[:SHOWN]:
        each = calls / PROFILED / side.ranks
        print(f"  {operator:32s} {spent * share:9.3f} ms {each:6.1f} calls {spent / kernels:6.1%}")


def tell(rows: Sequence[Row]) -> list[str]:
    """Prints a case's lines of the table; returns which goals do not hold."""
    wanted = goals(rows)
    missed = []
    for row in rows:
        goal = wanted.get(row.side)
        took = [statistics.median(found) * 1e3 for found in (row.seconds, row.processor)]
        numbers = (row.ratio, min(row.ratios), max(row.ratios))
        if row.side.system == "onnxpar":
            missed += row.missed(goal)
        print(
            f"{row.model:5s}{row.optimizer:6s} {row.side.label:12s}"
            f"{' '.join(f'{x:9.2f}' for x in took)} {' '.join(f'{x:7.3f}' for x in numbers)} "
            f"{'' if goal is None else format(goal, '.3f'):>7s} {row.difference:10.1e}",
            flush=True,
        )
    return missed


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options that several measurements have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, few rounds")
    return parser


def conditions() -> str:
    """What the times of a run depend on besides what runs: processors and load."""
    return f"{os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f} before the start"


def add_results(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `report_results` reads."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the times of all turns to this file"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")


def report_results(
    options: argparse.Namespace, rows: Sequence[Mapping[str, object]], missed: Sequence[str]
) -> int:
    """Writes the rows as JSON if asked for, prints what is missed; returns the exit code."""
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for line in missed:
        print(f"missed: {line}")
    return 1 if options.check and missed else 0


def with_rounds(
    parser: argparse.ArgumentParser, turn: float, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Reads a command line that also has the rounds, and the seconds of a turn."""
    parser.add_argument("--rounds", type=int, default=15, help="number of turns of each side")
    parser.add_argument("--turn", type=float, default=turn, help="seconds of the first side's turn")
    found = parser.parse_args(arguments)
    if found.rounds < 1 or found.turn <= 0:
        parser.error("--rounds and --turn: positive numbers are needed")
    if found.quick:
        found.rounds, found.turn = min(found.rounds, 3), min(found.turn, 0.05)
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    ways = [side.way for side in OURS]
    parser.add_argument(
        "--way", nargs="+", choices=ways, default=ways, help="which sides of onnxpar run"
    )
    parser.add_argument(
        "--torch-parallel", action="store_true", help="also measure PyTorch's dp and tp"
    )
    parser.add_argument("--ort", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--profile", action="store_true", help="also print onnxruntime's profiles")
    add_results(parser)
    return with_rounds(parser, 0.5, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked for."""
    options = parse(arguments)
    sides = [BASE, *(s for s in OURS if s.way in options.way)]
    if options.torch_parallel:
        sides += THEIRS
    print(
        f"{conditions()}; ratio: median of {options.rounds} rounds, then the least and the "
        f"largest\n"
        f"{'model':5s}{'optim.':6s} {'side':12s}{'ms/step':>9s} {'cpu ms':>9s} {'ratio':>7s} "
        f"{'from':>7s} {'to':>7s} {'goal':>7s} {'loss diff.':>10s}",
        flush=True,
    )
    every: list[Row] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="onnxpar-bench-") as name:
        prepared = PreparedModels(Path(name), options.quick)
        for model in options.model:
            for optimizer in options.optimizer:
                job = Job(model=model, optimizer=optimizer, quick=options.quick)
                job = replace(job, options=tuple(options.ort))
                rows = measure(sides, job, prepared, options.rounds, options.turn)
                missed += tell(rows)
                every += rows
                for side in OURS if options.profile else ():
                    if side.way in options.way:
                        profile(side, job, prepared)
    return report_results(options, [asdict(row) | {"ratio": row.ratio} for row in every], missed)


if __name__ == "__main__":
    sys.exit(main())

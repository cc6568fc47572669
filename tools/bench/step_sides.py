"""Runs the sides of tools/bench/step.py: starts their processes, and lets them take turns."""

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from step_cases import BATCHES, INTERFACE, LARGE, MODELS, QUICK, Job, Side

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.strategy import Strategy
from onnxpar_runtime.launch import find_mpirun, mpirun_environment

HERE = Path(__file__).resolve().parent
TWO_NODES = HERE.parent / "two-nodes"
_NUMBERS = count()
WAYS = {"one": "dp", "forward": "dp"}
"""The axis in the preset of a side that is not named after it."""
DECIMALS = 1e-5
PAUSE = 0.02  # seconds between turns: threads that spin for work have gone to sleep by then
PATIENCE = 5.0  # seconds for a side that has failed to end
LIMIT = 600.0  # seconds after which a side that has not answered is taken to hang


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
        resident: The most bytes that a rank's process has had in memory, of the largest rank.
    """

    seconds: float
    processor: float
    losses: list[float]
    parts: Mapping[str, float]
    sent: float
    resident: int


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
        seconds, processor, losses, parts, sent, resident = zip(*answers, strict=True)
        means = {part: statistics.mean(p[part] for p in parts) for part in parts[0]}
        return Turn(
            max(seconds), sum(processor), losses[0], means, statistics.mean(sent), max(resident)
        )

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
        level=side.level,
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
            mesh: str | Strategy = f"{axis}={side.ranks}"
            if axis == "pp":
                stages = {"stages": side.ranks, "schedule": "zb-h1"}
                mesh = Strategy.from_dict({"mesh": {"dp": 1}, "pipeline": stages})
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
        resident: As `Turn.resident`.
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
    resident: int = 0

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
                resident=taken[-1].resident,
            )
        )
    return rows

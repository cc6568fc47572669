"""Compares how long the ranks of a pipeline wait with what the schedules promise.

Stages that take equal times, which they sleep through, are played by the runtime's own player with
real messages between the ranks: threads of this process, or processes under mpirun:

    python tools/bench/pipeline.py [--stages P] [--micro-batches M] [--seconds T] [--check]
    mpirun -n P python tools/bench/pipeline.py …

The bubble is the share of a step's time, from the first beginning to the last end, in which ranks
compute nothing. With `--check` the exit code is 1 if it is not within 5 % of the formula.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from onnxpar_format.place import find_place
from onnxpar_format.trace import STEP
from onnxpar_format.trace_times import times
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.pipeline.carriers import Array, Expected, HostCarrier, Leaving
from onnxpar_runtime.pipeline.inbox import Inbox
from onnxpar_runtime.pipeline.player import Place, plan, play
from onnxpar_runtime.pipeline.schedule import Action, Kind, Message, PlayedSchedule
from onnxpar_runtime.pipeline.schedule_kinds import make
from onnxpar_runtime.pipeline.simulate import even_bubble
from onnxpar_runtime.pipeline.transfers import chain
from onnxpar_runtime.tracing.recording import Recording

TOLERANCE = 0.05
"""How far the measured bubble may be off, relative to the formula."""
UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}
"""Times of the computations of a stage with one chunk, in units of a forward."""
SHAPE = (64, 64)


class Sleeper:
    """A stage that computes nothing, and takes its time; as `player.Work`."""

    def __init__(self, seconds: float) -> None:
        """Takes so long for a forward of one chunk."""
        self._seconds = seconds

    def compute(self, action: Action) -> None:
        """Sleeps."""
        time.sleep(self._seconds * UNITS[action.kind])

    def leaving(self, message: Message) -> Sequence[Leaving]:
        """Returns an array that tells which message it is."""
        return [Leaving("mark", np.full(SHAPE, _mark(message)), False)]

    def expected(self, message: Message) -> Sequence[Expected]:
        """Returns what all messages have."""
        return [Expected("mark", np.dtype(np.float64), SHAPE)]

    def arrived(self, message: Message, arrays: Sequence[Array]) -> None:
        """Checks that it is the right one."""
        if not (arrays[0] == _mark(message)).all():
            raise AssertionError(f"another message came in place of {message}")


def _mark(message: Message) -> float:
    return 1e4 * message.source + 1e2 * message.target + message.micro_batch


def formula(name: str, stages: int, micro_batches: int, chunks: int) -> str:
    """Returns the bubble's formula as a text."""
    p, m, v = stages, micro_batches, chunks
    if name == "zb-h1":
        return "(p-1)/(3m+p-1)"
    return f"({p - 1}/{v})/({m}+{p - 1}/{v})" if v > 1 else f"{p - 1}/({m}+{p - 1})"


def measure(rank: Rank, program: PlayedSchedule, seconds: float, rounds: int) -> float | None:
    """Plays a program some times; returns the bubble on rank 0."""
    inbox = Inbox(rank)
    recording = Recording(rank)
    work = Sleeper(seconds / program.schedule.chunks)
    for _ in range(rounds):
        rank.all_reduce(np.zeros(1))
        with rank.timeline.span(STEP, "step"):
            play(HostCarrier(rank), Place(rank.index, 0, 1), program, work, inbox, rank.timeline)
    trace = recording.finish("pipeline", 1)
    inbox.close()
    return None if trace is None else times(trace).idle


def on_all(stages: int, program: PlayedSchedule, seconds: float, rounds: int) -> float | None:
    """Measures on threads of this process, or on the ranks of mpirun."""
    if find_place() is not None:
        with World.mpi() as world:
            return measure(world.rank(world.local_ranks[0]), program, seconds, rounds)
    with World.threads(stages) as world, ThreadPoolExecutor(stages) as pool:
        tasks = [pool.submit(measure, world.rank(r), program, seconds, rounds)
                 for r in range(stages)]  # fmt: skip
        results = [task.result() for task in tasks]
    return results[0]


def main(arguments: Sequence[str]) -> int:
    """Measures all schedules; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.15, help="seconds of a forward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    p, m = options.stages, options.micro_batches
    failed = False
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
        schedule = make(name, p, m, chunks)
        program = plan(name, p, m, chunks, chain(schedule))
        expected = even_bubble(program)
        found = on_all(p, program, options.seconds, options.rounds)
        if found is None:
            continue
        off = found / expected - 1
        failed |= abs(off) > TOLERANCE
        sys.stdout.write(
            f"{name:12} p={p} m={m} v={chunks}: bubble {found:.4f}, formula {expected:.4f} = "
            f"{formula(name, p, m, chunks)}, {off:+.1%}\n"
        )
        sys.stdout.flush()
    return int(options.check and failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Plays a schedule whose stages compute nothing and whose messages are on GPUs, for a test.

A process of its own, since the CUDA libraries that a process has once looked for are not checked
again; under mpirun one for each rank. Its arguments are the transport, `threads` or `mpi`, and
whether rank 1 `fails`.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnxruntime

from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.cuda import Queue
from onnxpar_runtime.errors import RankError
from onnxpar_runtime.pipeline.carriers import DeviceCarrier, Expected, Leaving
from onnxpar_runtime.pipeline.inbox import Inbox
from onnxpar_runtime.pipeline.player import Place, plan, play
from onnxpar_runtime.pipeline.schedule import Action, Kind, Message, Payload
from onnxpar_runtime.pipeline.schedule_kinds import make
from onnxpar_runtime.pipeline.transfers import chain
from onnxpar_runtime.tensors import to_host, to_ort
from tests.runtime.pipeline.test_player import StandIn, shape_of

STAGES, STEPS = 2, 3
SCHEDULES = [("interleaved", 5, 2), ("zb-h1", 4, 1), ("gpipe", 7, 1)]
TYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.int64), np.dtype(np.float32)]


def contents(message: Message, step: int, which: int) -> np.ndarray:
    """Any bytes, others in each value; among them those of numbers that are none."""
    forward = message.payload is Payload.ACTIVATION
    seed = [message.source, message.target, message.micro_batch, forward, step, which]
    dtype, shape = TYPES[(message.micro_batch + which) % len(TYPES)], shape_of(message)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(size), dtype).reshape(shape)


@dataclass
class OnGpu(StandIn):
    """Stages whose values are on the GPU; a received value is compared when it is released."""

    step: int = 0
    wrong: list[str] = field(default_factory=list)

    def leaving(self, message: Message) -> Sequence[Leaving]:
        # Nobody keeps the values, and the second one's shape goes with it.
        made = [contents(message, self.step, which) for which in range(2)]
        first, second = (to_ort(array, "cuda", 0) for array in made)
        return [Leaving("first", first, False), Leaving("second", second, True)]

    def expected(self, message: Message) -> Sequence[Expected]:
        first, second = (contents(message, self.step, which) for which in range(2))
        return [Expected("first", first.dtype, first.shape), Expected("second", second.dtype, None)]

    def arrived(self, message: Message, values: Sequence[onnxruntime.OrtValue]) -> None:
        for which, value in enumerate(values):
            assert value.device_name() == "cuda"
            found, wanted = to_host(value), contents(message, self.step, which)
            if found.shape != wanted.shape or found.tobytes() != wanted.tobytes():
                self.wrong.append(f"{message}: value {which}")
        self.read.add((message.payload, message.source, message.target, message.micro_batch))


def act(rank: Rank, transport: str, fails: Action | None) -> list[Action]:
    """Plays all schedules, several times each, on one rank."""
    rank.open_device(0, transport)
    queue = Queue(0)
    carrier, inbox = DeviceCarrier(rank, queue), Inbox(rank)
    done: list[Action] = []
    for name, count, chunks in SCHEDULES:
        edges = chain(make(name, STAGES, count, chunks))
        program = plan(name, STAGES, count, chunks, edges)
        for step in range(STEPS):
            work = OnGpu(STAGES, rank.index, edges, fails if rank.index == 1 else None, step=step)
            play(carrier, Place(rank.index, 0, 1), program, work, inbox, rank.timeline)
            assert not work.wrong, work.wrong
            done += work.done
    try:
        carrier.post(Expected("huge", np.dtype(np.int8), (1 << 40,)), 1 - rank.index, "receive")
    except RankError as error:
        message = f"r{rank.index} | receive: GPU 0 is out of memory for int8 of shape [{1 << 40}]: "
        assert str(error).startswith(message), error
    else:
        raise AssertionError("there is memory for anything")
    inbox.close()
    # All have been received before anyone closes the world.
    rank.all_reduce(np.zeros(1))
    rank.check_device()
    queue.close()
    return done


def main() -> None:
    """Runs the ranks of this process."""
    transport, where, *more = sys.argv[1:]
    fails = Action(Kind.BACKWARD, 0, 2) if more == ["fails"] else None
    world = World.mpi() if where == "mpi" else World.threads(STAGES)

    def guarded(r: int) -> int:
        try:
            return len(act(world.rank(r), transport, fails))
        except BaseException as error:
            world.abort(r, repr(error))
            raise

    with ThreadPoolExecutor(len(world.local_ranks)) as pool:
        for r, done in zip(world.local_ranks, pool.map(guarded, world.local_ranks), strict=True):
            print(f"rank {r} computed {done}")
    world.close()


if __name__ == "__main__":
    main()

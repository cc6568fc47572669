#!/usr/bin/env python
"""Compares collectives between two machines with a socket's rate on the same link.

    tools/bench/wire.py [--rate 1gbit] [--slots 1] [--rounds 4] [--check] [COLLECTIVE ...]

The script starts two nodes on this machine with `tools/two-nodes`: network namespaces that act as
machines, joined at the given rate, with --slots ranks on each. Each collective runs in a session of
onnxruntime on float32 tensors from 1 KiB to 64 MiB (the size of the input, or of the result of
AllGather). Up to 64 KiB, the table has microseconds for a call. Above that, it has the share of the
socket's rate: the bytes that a node must send, divided by the time. The socket sends in both
directions at once, in the same run. The fastest round counts, because other work on the machine
disturbed it least. A round has many calls, because the link sends 256 kB at once after a pause.

With --check, the exit code is 0 only if AllReduce, ReduceScatter and AllGather have a share of at
least 0.9 for 1 MiB and more.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from collectives import INSIDE, name, session_of
from step_socket import exchange

from onnxpar_runtime.collectives import Rank, World

SIZES = [1 << n for n in range(10, 27, 2)]
TIMED = 1 << 16  # up to this size the table has times, above it rates
ROUND_BYTES = 16 << 20  # in one round, in calls of less
SOCKET_BYTES = 32 << 20
WANTED = {"AllReduce": 0.9, "ReduceScatter": 0.9, "AllGather": 0.9}
"""The least share of the socket's rate from 1 MiB, with --check."""


@dataclass(frozen=True)
class Collective:
    """A collective of all ranks.

    Attributes:
        attributes: Of its node.
        inputs: Elements of the input for each element of the larger of input and result.
        outputs: Elements of the result.
        sent: Bytes that a node must send, for each byte of the larger one.
    """

    attributes: str
    inputs: float
    outputs: float
    sent: float


def collectives(slots: int) -> dict[str, Collective]:
    """The collectives between two nodes with `slots` ranks each."""
    ranks = 2 * slots
    pairs = ", ".join(f"{r}, {(r + slots) % ranks}" for r in range(ranks))
    return {
        "AllReduce": Collective("", 1, 1, 1),
        "ReduceScatter": Collective("<axis=0>", 1, 1 / ranks, 1 / 2),
        "AllGather": Collective("<axis=0>", 1 / ranks, 1, 1 / 2),
        "AllToAll": Collective("<split_axis=0, concat_axis=0>", 1, 1, slots / 2),
        "Broadcast": Collective("<root=0>", 1, 1, 1),
        "Permute": Collective(f"<pairs=[{pairs}]>", 1, 1, slots),
    }


def pause(comm: Any) -> None:
    """Waits for all ranks, and leaves them the cores."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-4)


def socket_rate(comm: Any, slots: int) -> float:
    """Bytes per second of a socket between the nodes, each way, in both directions at once."""
    best = float("inf")
    if comm.rank == 0:
        with socket.create_server((socket.gethostbyname(socket.gethostname()), 0)) as server:
            comm.send(server.getsockname(), slots)
            connection = server.accept()[0]
    elif comm.rank == slots:
        connection = socket.create_connection(comm.recv(source=0))
    else:
        pause(comm)
        return best
    received = memoryview(bytearray(SOCKET_BYTES))
    with connection:
        for _ in range(3):
            connection.sendall(b"x")
            connection.recv(1)
            begin = time.perf_counter()
            exchange(connection, received)
            best = min(best, time.perf_counter() - begin)
    pause(comm)
    return SOCKET_BYTES / best


def seconds(
    rank: Rank, comm: Any, op: str, collective: Collective, size: int, rounds: int
) -> float:
    """The time of one call, in the best round."""
    from mpi4py import MPI

    node = f"onnxpar.{op} {collective.attributes}"
    session = session_of(rank, f"g (float[n] x) => (float[m] y) {{ y, t = {node} (x) }}")
    x = np.ones(round(size // 4 * collective.inputs), np.float32)
    y = np.empty(round(size // 4 * collective.outputs), np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    calls = max(1, min(50, ROUND_BYTES // size))
    best = float("inf")
    for _ in range(rounds + 1):  # the first makes buffers
        pause(comm)
        begin = time.perf_counter()
        for _ in range(calls):
            session.run_with_iobinding(binding)
        passed = time.perf_counter() - begin
        pause(comm)
        best = min(best, comm.allreduce(passed, MPI.MAX) / calls)
    return best


def be_rank(slots: int, rounds: int, chosen: list[str]) -> list[str]:
    """Measures as one of the ranks; rank 0 prints. Returns which goals do not hold."""
    from mpi4py import MPI  # importing it starts MPI, which only the ranks may do

    comm = MPI.COMM_WORLD.Dup()
    world = World.mpi()
    rank = world.rank(world.local_ranks[0])
    rate = socket_rate(comm, slots)
    table = {op: c for op, c in collectives(slots).items() if not chosen or op in chosen}
    if comm.rank == 0:
        print(f"socket, both directions at once: {rate / 1e6:.1f} MB/s each way")
        print(f"{'size':>8}" + "".join(f"{op:>15}" for op in table), flush=True)
    missed = []
    for size in SIZES:
        cells = []
        for op, collective in table.items():
            time_s = seconds(rank, comm, op, collective, size, rounds)
            share = size * collective.sent / time_s / rate
            cells.append(f"{time_s * 1e6:.0f} us" if size <= TIMED else f"{share:.2f}")
            if size >= 1 << 20 and share < WANTED.get(op, 0):
                missed.append(f"{op} of {name(size)}: {share:.2f}, at least {WANTED[op]} is wanted")
        if comm.rank == 0:
            print(f"{name(size):>8}" + "".join(f"{cell:>15}" for cell in cells), flush=True)
    world.close()
    return missed if comm.rank == 0 else []


def main() -> int:
    """Starts the ranks, or is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("collectives", nargs="*", metavar="COLLECTIVE", help="all if none is given")
    parser.add_argument(
        "--rate", default="1gbit", help="rate of the link, in the form of tc, such as 1gbit"
    )
    parser.add_argument("--slots", type=int, default=1, help="ranks on each node")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    arguments = parser.parse_args()
    if INSIDE in os.environ:
        missed = be_rank(arguments.slots, arguments.rounds, arguments.collectives)
        for line in missed:
            print(f"missed: {line}", flush=True)
        return 1 if arguments.check and missed else 0
    if unknown := set(arguments.collectives) - set(collectives(1)):
        parser.error(f"expected names of {', '.join(collectives(1))}, got {', '.join(unknown)}")
    if arguments.slots < 1 or arguments.rounds < 1:
        parser.error(
            f"--slots {arguments.slots} --rounds {arguments.rounds}: expected 1 or more of each"
        )
    print(
        f"float32, 2 nodes of {arguments.slots} ranks at {arguments.rate}, {os.cpu_count()} cores, "
        f"load average {os.getloadavg()[0]:.1f} before the start, best of {arguments.rounds} "
        "rounds",
        flush=True,
    )
    command = [str(Path(__file__).parents[1] / "two-nodes"), "--rate", arguments.rate]
    command += ["--slots", str(arguments.slots), "--", "-n", str(2 * arguments.slots)]
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        INSIDE: "1",
    }
    return subprocess.run([*command, sys.executable, *sys.argv], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())

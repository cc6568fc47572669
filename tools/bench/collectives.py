#!/usr/bin/env python
"""Compares AllReduce inside an onnxruntime session with plain MPI_Allreduce, in one job.

    tools/bench/collectives.py [--ranks 2] [--seconds 4] [--limit 30] [--check]

The script starts mpirun itself; do not start it under mpirun. For each size, it times the two
alternately, many calls at a time. It prints the fastest round of each size as soon as the size is
done: microseconds for one call, on rank 0. The fastest round is the one that other work on the
machine disturbed least. The session is a chain of AllReduce nodes with tokens, as rank graphs have
them. The time of a call includes what onnxruntime adds for a node; what it adds for a run is spread
over the chain. Plain MPI is a loop in C over one call on a buffer of the same size, in place like
the chain.

A size takes --seconds, or longer if that is too short for 3 rounds. No round begins that would end
after --limit if it took as long as the round before. A size with fewer than 3 rounds is "not
measured".

With --check, the exit code is 0 only if a session adds at most 1 us at 1 KiB and at most 10 % for
64 KiB and more, and takes at most half the time of one plain call at 64 MiB. A goal that was not
measured is not met.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime

from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.library import MPI_SIGNATURES, mpi_library
from onnxpar_runtime.options import CPU

SIZES = [1 << n for n in (10, 12, 14, 16, 18, 20, 22, 24, 26)]
GOALS = {size for size in SIZES if size == 1 << 10 or size >= 1 << 16}
FEWEST = 3  # rounds; the least of fewer says little
WARM = 2  # rounds not counted: the first make buffers and communicators
INSIDE = "ONNXPAR_BENCH_INSIDE"
# What Open MPI, PMIx and PMI launchers give each process they start.
LAUNCHED = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Row:
    """The rounds of one size: microseconds of one call, plain and in a session."""

    size: int
    plain: tuple[float, ...]
    session: tuple[float, ...]

    @property
    def measured(self) -> bool:
        """Whether there were rounds enough to say something."""
        return len(self.plain) >= FEWEST


def session_of(rank: Rank, graph: str, *providers: Any) -> onnxruntime.InferenceSession:
    """A session of the graph in ONNX's text form; on the CPU without `providers`."""
    text = f'<ir_version: 10, opset_import: ["": 21, "onnxpar": 1]> {graph}'
    options = onnxruntime.SessionOptions()
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.intra_op_num_threads = 1
    rank.register(options)
    model = onnx.parser.parse_model(text).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=[*providers, CPU])


def chain(rank: Rank, links: int, *providers: Any) -> onnxruntime.InferenceSession:
    """A session of `links` AllReduce nodes, one after another; on the CPU without `providers`."""
    nodes = "a1, t1 = onnxpar.AllReduce (a0) " + " ".join(
        f"a{i + 1}, t{i + 1} = onnxpar.AllReduce (a{i}, t{i})" for i in range(1, links)
    )
    return session_of(rank, f"g (float[n] a0) => (float[n] a{links}) {{ {nodes} }}", *providers)


def measure(seconds: float, limit: float) -> Iterator[Row]:
    """Yields the rounds of each size once they are done, on every rank.

    Args:
        seconds: What a size takes if it has `FEWEST` rounds by then.
        limit: Seconds after which a size has no further round.
    """
    from mpi4py import MPI  # importing it starts MPI, which only the ranks may do

    function = ctypes.CDLL(str(mpi_library())).onnxpar_mpi_time_all_reduce
    function.restype, function.argtypes = MPI_SIGNATURES["onnxpar_mpi_time_all_reduce"]
    comm = MPI.COMM_WORLD.Dup()
    world = World.mpi()
    rank = world.rank(world.local_ranks[0])
    for size in SIZES:
        start = time.monotonic()
        # The first and the last link are not in place: they read the input, write the output.
        links = max(16, min(200, (1 << 24) // size))
        session = chain(rank, links)
        binding = session.io_binding()
        x = np.zeros(size // 4, np.float32)
        result = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros_like(x))
        binding.bind_cpu_input("a0", x)
        binding.bind_ortvalue_output(f"a{links}", result)
        buffer = np.zeros_like(x)
        plain: list[float] = []
        chained: list[float] = []
        last = 0.0

        def wanted(done: int, last: float, start: float = start) -> bool:
            passed = time.monotonic() - start
            return passed + last < limit and (done < FEWEST + WARM or passed < seconds)

        # Rank 0's clock decides for all.
        while comm.bcast(wanted(len(plain), last)):
            comm.Barrier()
            round_start = time.monotonic()
            one = function(MPI._addressof(comm), buffer.ctypes.data, buffer.size, links)
            comm.Barrier()
            begin = time.perf_counter()
            session.run_with_iobinding(binding)
            other = time.perf_counter() - begin
            plain.append(one / links * 1e6)
            chained.append(other / links * 1e6)
            last = time.monotonic() - round_start
        yield Row(size, tuple(plain[WARM:]), tuple(chained[WARM:]))
    world.close()


def name(size: int) -> str:
    """The size for people."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def report(row: Row) -> list[str]:
    """Prints a line of the table and returns which of the size's goals do not hold."""
    label = name(row.size)
    if not row.measured:
        why = f"not measured: {len(row.plain)} of {FEWEST} rounds after {WARM} to warm up"
        print(f"{label:>8} {why}", flush=True)
        return [f"{label}: not measured"] if row.size in GOALS else []
    plain, session = min(row.plain), min(row.session)
    added, ratio = session - plain, session / plain
    print(
        f"{label:>8} {plain:10.2f} {session:11.2f} {added:9.2f} {ratio:6.2f} {len(row.plain):6d}",
        flush=True,
    )
    missed = []
    if row.size == 1 << 10 and added > 1.0:
        missed.append(f"{label}: adds {added:.2f} us, at most 1 is wanted")
    if row.size >= 1 << 16 and ratio > 1.1:
        missed.append(f"{label}: {ratio:.2f} times plain MPI, at most 1.1 is wanted")
    if row.size == 1 << 26 and ratio > 0.5:
        missed.append(f"{label}: {1 / ratio:.2f} times as fast, at least 2 is wanted")
    return missed


def be_rank(seconds: float, limit: float) -> list[str]:
    """Measures as one of the ranks; rank 0 prints, and returns which goals do not hold."""
    from mpi4py import MPI

    missed: list[str] = []
    for row in measure(seconds, limit):
        if MPI.COMM_WORLD.Get_rank() == 0:
            missed += report(row)
    for line in missed:
        print(f"missed: {line}", flush=True)
    return missed


def main() -> int:
    """Starts the ranks, or is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds for one size")
    parser.add_argument("--limit", type=float, default=30.0, help="the most seconds for one size")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    arguments = parser.parse_args()
    if INSIDE in os.environ:
        missed = be_rank(arguments.seconds, arguments.limit)
        return 1 if arguments.check and missed else 0
    if under := [variable for variable in LAUNCHED if variable in os.environ]:
        parser.error(
            f"this starts mpirun itself and was started under it ({under[0]} is set): run it "
            "without mpirun and give the number of ranks with --ranks"
        )
    if arguments.ranks < 2:
        parser.error(f"--ranks {arguments.ranks}: an AllReduce is between 2 ranks or more")
    # An MPI from a wheel is next to the interpreter, and is the one that mpi4py then uses.
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    mpirun = shutil.which("mpirun", path=places)
    if mpirun is None:
        parser.error("there is no mpirun next to this Python nor in PATH: install an MPI")
    cores = os.cpu_count() or 1
    print(
        f"AllReduce of float32, {arguments.ranks} ranks, {cores} cores, load average "
        f"{os.getloadavg()[0]:.1f} before the start; least of the rounds\n"
        f"{'size':>8} {'MPI us':>10} {'session us':>11} {'added us':>9} {'ratio':>6} {'rounds':>6}",
        flush=True,
    )
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", INSIDE: "1"}
    command = [mpirun, "-n", str(arguments.ranks), sys.executable]
    if arguments.ranks > cores:
        command.insert(1, "--oversubscribe")
    return subprocess.run([*command, *sys.argv], env=os.environ | allowed).returncode


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""AllReduce inside an onnxruntime session against plain MPI_Allreduce, in one job.

    tools/bench/collectives.py [--ranks 2] [--seconds 4] [--check]

Starts itself under mpirun. For each size the two are timed in turns, many calls at a time, and the
least of the rounds is printed, which other work on the machine has disturbed least: microseconds
for one call, on rank 0. The session is a chain of
AllReduce nodes with tokens, as rank graphs have them; what onnxruntime adds for a node is in its
time, what it adds for a run is spread over the chain. Plain MPI is a loop in C over one call on a
buffer of the same size, in place like the chain.

With --check the exit code is 1 unless a session adds at most 1 us at 1 KiB, at most 10 % from
64 KiB, and halves the time of one plain call at 64 MiB.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime

from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.library import mpi_library

SIZES = [1 << n for n in (10, 12, 14, 16, 18, 20, 22, 24, 26)]
INSIDE = "ONNXPAR_BENCH_INSIDE"


def chain(rank: Rank, links: int) -> onnxruntime.InferenceSession:
    """A session of `links` AllReduce nodes, one after another."""
    nodes = "a1, t1 = onnxpar.AllReduce (a0) " + " ".join(
        f"a{i + 1}, t{i + 1} = onnxpar.AllReduce (a{i}, t{i})" for i in range(1, links)
    )
    text = f"""<ir_version: 10, opset_import: ["": 21, "onnxpar": 1]>
        g (float[n] a0) => (float[n] a{links}) {{ {nodes} }}"""
    options = onnxruntime.SessionOptions()
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.intra_op_num_threads = 1
    rank.register(options)
    model = onnx.parser.parse_model(text).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def measure(seconds: float) -> list[tuple[int, float, float]]:
    """Returns (bytes, microseconds of plain MPI, microseconds in a session) for each size."""
    from mpi4py import MPI  # importing it starts MPI, which only the ranks may do

    plain = ctypes.CDLL(str(mpi_library(MPI.Get_library_version()))).onnxpar_mpi_time_all_reduce
    plain.restype = ctypes.c_double
    plain.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    comm = MPI.COMM_WORLD.Dup()
    world = World.mpi(debug=False)
    rank = world.rank(world.local_ranks[0])
    rows = []
    for size in SIZES:
        # The first and the last link are not in place: they read the input, write the output.
        links = max(16, min(200, (1 << 24) // size))
        session = chain(rank, links)
        binding = session.io_binding()
        x = np.zeros(size // 4, np.float32)
        result = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros_like(x))
        binding.bind_cpu_input("a0", x)
        binding.bind_ortvalue_output(f"a{links}", result)
        buffer = np.zeros_like(x)
        times: tuple[list[float], list[float]] = ([], [])
        warm = 2  # the first rounds make buffers and communicators
        end = time.monotonic() + seconds
        while comm.bcast(len(times[0]) < 3 or time.monotonic() < end):
            comm.Barrier()
            one = plain(MPI._addressof(comm), buffer.ctypes.data, buffer.size, links)
            comm.Barrier()
            begin = time.perf_counter()
            session.run_with_iobinding(binding)
            other = time.perf_counter() - begin
            if warm > 0:
                warm -= 1
                continue
            times[0].append(one / links * 1e6)
            times[1].append(other / links * 1e6)
        rows.append((size, min(times[0]), min(times[1])))
    world.close()
    return rows if rank.index == 0 else []


def name(size: int) -> str:
    """The size for people."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def report(rows: list[tuple[int, float, float]]) -> list[str]:
    """Prints the table and returns which goals do not hold."""
    print(f"{'size':>8} {'MPI us':>10} {'session us':>11} {'added us':>9} {'ratio':>6}")
    missed = []
    for size, plain, session in rows:
        added, ratio = session - plain, session / plain
        print(f"{name(size):>8} {plain:10.2f} {session:11.2f} {added:9.2f} {ratio:6.2f}")
        if size == 1 << 10 and added > 1.0:
            missed.append(f"{name(size)}: adds {added:.2f} us, at most 1 is wanted")
        if size >= 1 << 16 and ratio > 1.1:
            missed.append(f"{name(size)}: {ratio:.2f} times plain MPI, at most 1.1 is wanted")
        if size == 1 << 26 and ratio > 0.5:
            missed.append(f"{name(size)}: {1 / ratio:.2f} times as fast, at least 2 is wanted")
    return missed


def main() -> int:
    """Starts the ranks, or is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="for one size")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if INSIDE in os.environ:
        missed = report(rows) if (rows := measure(arguments.seconds)) else []
        for line in missed:
            print(f"missed: {line}")
        return 1 if arguments.check and missed else 0
    mpirun = Path(sys.executable).parent / "mpirun"
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", INSIDE: "1"}
    command = [str(mpirun), "-n", str(arguments.ranks), sys.executable]
    if arguments.ranks > (os.cpu_count() or 1):
        command.insert(1, "--oversubscribe")
    return subprocess.run([*command, *sys.argv], env=os.environ | allowed).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Compares AllReduce of GPU tensors in onnxruntime's sessions with ncclAllReduce, under mpirun.

    mpirun -n 2 python tools/bench/gpu_collectives.py [--quick]

tools/bench/gpu.py uses this script. For each size, it prints the microseconds of one call: in a
chain of AllReduce nodes over the rank's NCCL transport, in the same chain staged through the host,
and in a loop over ncclAllReduce on a communicator of the benchmark's own. They are medians over
rounds, which alternate between the three, of the slowest rank. Ranks that share a GPU need
NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from collectives import chain
from mpi4py import MPI

from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.cuda import Queue
from onnxpar_runtime.devices import Device, gather
from onnxpar_runtime.launch import guarded
from onnxpar_runtime.library import nccl_library
from onnxpar_runtime.options import cuda_options
from onnxpar_runtime.tensors import to_ort

SIZES = [1 << n for n in (10, 14, 18, 22, 24, 26, 28)]
QUICK = SIZES[:3]
LINKS, WARM = 16, 2
ROUNDS, QUICK_ROUNDS = 9, 3
UNIQUE_ID_BYTES = 128  # ncclUniqueId
FLOAT32, SUM = 7, 0  # ncclDataType_t, ncclRedOp_t


class UniqueId(ctypes.Structure):
    """NCCL's name of a communicator."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


def in_session(rank: Rank, queue: Queue, index: int, size: int) -> Callable[[], None]:
    """Returns what runs a chain on `size` bytes, to its end."""
    session = chain(rank, LINKS, cuda_options(index, queue.stream.value or 0, {}))
    binding = session.io_binding()
    binding.bind_ortvalue_input("a0", to_ort(np.zeros(size // 4, np.float32), "cuda", index))
    binding.bind_output(f"a{LINKS}", "cuda", index)

    def run() -> None:
        session.run_with_iobinding(binding)
        queue.synchronize()

    return run


class Raw:
    """NCCL by itself.

    Args:
        queue: The rank's GPU.
        index: Its number.
    """

    def __init__(self, queue: Queue, index: int) -> None:
        """Makes a communicator of all ranks."""
        self._library = ctypes.CDLL(nccl_library()[0])
        comm, self._queue, self._index = MPI.COMM_WORLD, queue, index
        name = UniqueId()
        if comm.Get_rank() == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(name)))
        name = UniqueId.from_buffer_copy(comm.bcast(bytes(name)))
        self._comm = ctypes.c_void_p()
        init = self._library.ncclCommInitRank
        init.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        queue.runtime.call("cudaSetDevice", ctypes.c_int(index))
        self._check(init(ctypes.byref(self._comm), comm.Get_size(), name, comm.Get_rank()))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"NCCL returned {status}")

    def on(self, size: int) -> Callable[[], None]:
        """Returns what calls ncclAllReduce on `size` bytes as often as a chain has links."""
        value = to_ort(np.zeros(size // 4, np.float32), "cuda", self._index)
        count = ctypes.c_size_t(size // 4)

        def run() -> None:
            address = ctypes.c_void_p(value.data_ptr())  # the memory lives as long as what runs
            for _ in range(LINKS):
                self._check(
                    self._library.ncclAllReduce(
                        address, address, count, FLOAT32, SUM, self._comm, self._queue.stream
                    )
                )
            self._queue.synchronize()

        return run

    def close(self) -> None:
        """Ends the communicator."""
        self._check(self._library.ncclCommDestroy(self._comm))


def measure(quick: bool) -> None:
    """Prints the table on rank 0."""
    comm = MPI.COMM_WORLD
    worlds = {way: World.mpi() for way in ("nccl", "staged")}
    ranks = {way: world.rank(world.local_ranks[0]) for way, world in worlds.items()}
    placement = gather(ranks["nccl"], "cuda")
    assert placement.device is Device.CUDA
    index = placement.index
    queue = Queue(index)
    for way, rank in ranks.items():
        rank.open_device(index, way)
    raw = Raw(queue, index)
    first = comm.Get_rank() == 0
    rounds = QUICK_ROUNDS if quick else ROUNDS
    if first:
        print(f"AllReduce of {comm.Get_size()} ranks, us a call, {rounds} rounds")
        print(f"{'bytes':>10s} {'NCCL':>10s} {'session':>10s} {'ratio':>6s} {'staged':>10s}")
    for size in QUICK if quick else SIZES:
        ways = {"raw": raw.on(size)}
        ways |= {way: in_session(rank, queue, index, size) for way, rank in ranks.items()}
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(WARM + rounds):
            for way, run in ways.items():
                comm.Barrier()
                start = time.perf_counter()
                run()
                slowest = comm.allreduce(time.perf_counter() - start, MPI.MAX)
                took[way].append(slowest / LINKS * 1e6)
        plain, session, staged = (
            statistics.median(took[way][WARM:]) for way in ("raw", "nccl", "staged")
        )
        if first:
            numbers = f"{plain:10.1f} {session:10.1f} {session / plain:6.2f} {staged:10.1f}"
            print(f"{size:10d} {numbers}", flush=True)
    raw.close()
    queue.close()
    for world in worlds.values():
        world.close()


def main() -> int:
    """Measures; an error on one rank ends all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, fewer rounds")
    quick: bool = parser.parse_args().quick
    world = World.mpi()

    def body() -> int:
        measure(quick)
        return 0

    return guarded(world.rank(world.local_ranks[0]), body)


if __name__ == "__main__":
    sys.exit(main())

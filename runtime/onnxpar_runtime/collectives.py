"""Sets of ranks, and the library with the collective operators of the domain `onnxpar`.

A `World` is a set of ranks: all in this process, one thread each (`World.threads`), or one per
process under `mpirun` (`World.mpi`). A rank registers the operators in the session options of
onnxruntime; the kernels of sessions made with them act as that rank. A process may have any number
of worlds.

`runtime/csrc/collective/collective.h` describes the operators, their reductions and the formulas of
the byte counters; `runtime/csrc/transport/transport.h` describes how the transports keep results
deterministic and limit how long ranks wait.
"""

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.calls import COLUMNS
from onnxpar_format.dtypes import onnx_code
from onnxpar_format.place import find_place
from onnxpar_runtime.closing import Closing
from onnxpar_runtime.devices import Device, Placement
from onnxpar_runtime.errors import LaunchError, RankError
from onnxpar_runtime.installed import INSTALL_MPI, check_launcher, check_one_mpi
from onnxpar_runtime.library import (
    custom_op_library,
    last_error,
    load_library,
    mpi_library,
    mpi_version,
    nccl_library,
)
from onnxpar_runtime.op_counter import OpCounter
from onnxpar_runtime.time_limit import limited_start, timeout
from onnxpar_runtime.tracing.timeline import Timeline

__all__ = ["OpCounter", "Rank", "World", "custom_op_library"]

DEVICE_TRANSPORTS = ("nccl", "staged")
"""How tensors on GPUs travel between ranks: by NCCL, or through the host."""
_REDUCTIONS = ("sum", "max", "min", "prod")


class World(Closing):
    """One set of ranks. Made by `threads` or `mpi`; a context manager that closes it.

    Attributes:
        size: Number of ranks.
        local_ranks: The ranks in this process.
        comm: For MPI the mpi4py communicator it was made from, else None.
        timeout_s: How long one call waits for other ranks before all ranks end, in seconds; 0 means
            without a limit.
        placements: The devices of ranks of this process, as far as they are decided.
        timelines: What ranks of this process do, by rank.
    """

    def __init__(self, handle: int, size: int, local_ranks: range, comm: Any = None) -> None:
        """Wraps a handle of the library; use `threads` or `mpi`."""
        self._handle = ctypes.c_void_p(handle)
        self._library = load_library()
        self.size = size
        self.local_ranks = local_ranks
        self.comm = comm
        self.timeout_s = timeout()
        self.placements: dict[int, Placement] = {}
        self.timelines = {
            rank: Timeline(partial(self._library.onnxpar_foreground_ns, self._handle, rank))
            for rank in local_ranks
        }
        self._closed = False

    @staticmethod
    def threads(size: int, *, debug: bool = True) -> "World":
        """Returns a world whose ranks are threads of this process.

        Args:
            size: Number of ranks.
            debug: Compare operator, type, shape and attributes of a group's calls before data
                moves. Otherwise only operator and size are compared.

        Raises:
            ValueError: `size` is not positive.
        """
        library = load_library()
        handle = library.onnxpar_threads(size, debug, timeout())
        if not handle:
            raise ValueError(last_error(library))
        return World(handle, size, range(size))

    @staticmethod
    def mpi(comm: Any = None) -> "World":
        """Returns a world with one rank per process of an MPI communicator.

        Every rank of the communicator must call it. MPI is initialised unless it already is. Groups
        on one machine share memory, other groups send messages. If the environment has
        ONNXPAR_SHARED_MEMORY=0, all groups send messages. Every call is compared on all members of
        its group.

        Args:
            comm: An mpi4py intra-communicator; `MPI.COMM_WORLD` if None.

        Raises:
            LaunchError: MPI cannot be loaded, there is no library for its ABI, or it does not
                connect the processes that the launcher started.
        """
        # A rank that never starts would make the others wait in MPI for ever.
        with limited_start():
            check_one_mpi()
            check_launcher(os.environ)
            # Open MPI sleeps a second when it closes this component, which no machine without such
            # a network can use. It is for one-sided communication, of which we have none.
            os.environ.setdefault("OMPI_MCA_btl", "^ofi")
            try:
                from mpi4py import MPI  # importing it initialises MPI
            except (ImportError, RuntimeError) as error:
                raise LaunchError(f"MPI cannot be used: {error}; {INSTALL_MPI}") from None
            if comm is None:
                comm, place = MPI.COMM_WORLD, find_place()
                if place is not None and comm.Get_size() == 1 < place.size:
                    raise LaunchError(
                        f"{place.launcher} started {place.size} processes, but MPI does not "
                        f"connect them; mpi4py uses {mpi_version()}: {place.cure}"
                    )
            path = mpi_library()
            library = load_library()
            rank, size = comm.Get_rank(), comm.Get_size()
            address = ctypes.c_void_p(MPI._addressof(comm))
            handle = library.onnxpar_mpi(str(path).encode(), address, rank, size, True, timeout())
        if not handle:
            raise LaunchError(f"MPI cannot be used: {last_error(library)}")
        return World(handle, size, range(rank, rank + 1), comm)

    def rank(self, r: int) -> "Rank":
        """Returns rank `r`, which must be in this process.

        Raises:
            ValueError: It is not.
        """
        if r not in self.local_ranks:
            raise ValueError(
                f"rank {r} is not in this process, which runs the ranks "
                f"{list(self.local_ranks)} of {self.size}"
            )
        return Rank(self, r)

    def abort(self, rank: int, message: str, code: int = 1) -> None:
        """Ends all communication of the world because `rank` cannot go on.

        With threads, every rank that waits in a collective, or calls one later, fails with the
        message. With MPI, it prints `r<rank> | message` to stderr and ends all processes by
        MPI_Abort, with the exit code `code`.
        """
        if self.comm is not None:
            print(f"r{rank} | {message}", file=sys.stderr, flush=True)
            self.rank(rank).write_calls(message, fails=True)
            self.comm.Abort(code)
            os._exit(code)  # MPICH's MPI_Abort returns before it ends the process.
        self._check(self._library.onnxpar_abort(self._handle, f"rank {rank}: {message}".encode()))

    def close(self) -> None:
        """Frees the world's resources. Kernels that run afterwards fail with an error.

        Under MPI, all ranks of the communicator must call it before MPI is finalised, or none.
        """
        if not self._closed:
            self._closed = True
            self._check(self._library.onnxpar_close(self._handle))

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(last_error(self._library))


class Rank:
    """One rank of a world, in this process.

    Attributes:
        index: Its number.
        world: The world.
    """

    def __init__(self, world: World, index: int) -> None:
        """Use `World.rank`."""
        self.index = index
        self.world = world

    @property
    def placement(self) -> Placement | None:
        """The rank's device, once `place` has decided it."""
        return self.world.placements.get(self.index)

    @property
    def timeline(self) -> Timeline:
        """What the rank does, once a recording has begun."""
        return self.world.timelines[self.index]

    def place(self, placement: Placement) -> None:
        """Decides the rank's device, before its sessions are made.

        Args:
            placement: The device. The rank keeps a GPU until the world is closed.

        Raises:
            LaunchError: As `open_device`.
        """
        if placement.device is Device.CUDA:
            self.open_device(placement.index, placement.transport)
        self.world.placements[self.index] = placement

    def open_device(self, device: int, transport: str) -> None:
        """Gives the rank a GPU, before sessions on it are made. A second call changes nothing.

        Sessions that are registered later have kernels for both of onnxruntime's providers, so that
        collectives take tensors in host and GPU memory. Tensors in host memory keep their
        transport.

        Args:
            device: The GPU's number.
            transport: How tensors on GPUs travel: `nccl`, or `staged` through the host. All ranks
                of a world must choose the same.

        Raises:
            LaunchError: The driver, the GPU or NCCL cannot be used, or the rank has another.
            ValueError: There is no such transport.
        """
        if transport not in DEVICE_TRANSPORTS:
            raise ValueError(
                f"transport: expected one of {', '.join(DEVICE_TRANSPORTS)}, got {transport!r}"
            )
        file = None
        if transport == "nccl":
            file = nccl_library()[0].encode()
            # NCCL's kernels wait for other ranks, on their own streams. CUDA distributes streams
            # over this number of queues (8 by default, at most 32); in a queue, kernels of other
            # streams may wait behind them.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        library = self.world._library
        if library.onnxpar_open_device(
            self.world._handle, self.index, device, file, self.world.timeout_s
        ):
            raise LaunchError(f"device cuda:{device}: {last_error(library)}")

    def check_device(self, stream: ctypes.c_void_p | None = None) -> None:
        """Raises RankError if work on the rank's GPU is known to have failed.

        Calls on a GPU return before they are carried out. If ranks were aborted, their kernels have
        ended too, with undefined results. So call this before results are used.

        Args:
            stream: A stream that has been waited for: also check for labels and indices out of
                range that its kernels found since the last call.

        Raises:
            RankError: All ranks were aborted, or a value on the stream was out of range.
        """
        library = self.world._library
        self._call(library.onnxpar_check_device(self.world._handle, self.index))
        if stream is not None:
            self._call(library.onnxpar_check_computed(stream))

    def register(self, options: Any, dialect: str | None = None) -> None:
        """Registers the operators in `onnxruntime.SessionOptions`, bound to this rank.

        Also those of a dialect of `shard --dialect`, if it is given.

        Raises:
            Exception: onnxruntime cannot load the library.
        """
        library = self.world._library
        self.world._check(library.onnxpar_bind(self.world._handle, self.index))
        self.world._check(library.onnxpar_add_dialect(dialect and dialect.encode()))
        try:
            options.register_custom_ops_library(str(custom_op_library()))
        finally:
            library.onnxpar_bind(None, 0)

    def counters(self) -> dict[str, OpCounter]:
        """Returns calls and bytes of every operator that ran since the last reset.

        A Start counts as its collective; Wait and Barrier send nothing and are not counted.
        """
        library = self.world._library
        counters = {}
        for op in range(library.onnxpar_ops()):
            calls, sent = ctypes.c_int64(), ctypes.c_int64()
            self.world._check(
                library.onnxpar_counter(
                    self.world._handle, self.index, op, ctypes.byref(calls), ctypes.byref(sent)
                )
            )
            if calls.value:
                name = library.onnxpar_op_name(op).decode()
                counters[name] = OpCounter(calls.value, sent.value)
        return counters

    def reset_counters(self) -> None:
        """Sets all counters to zero."""
        self.world._check(
            self.world._library.onnxpar_reset_counters(self.world._handle, self.index)
        )

    def keep_calls(self, keep: bool) -> None:
        """Keeps all calls of collectives and messages from now on, or only the last ones."""
        library = self.world._library
        self.world._check(library.onnxpar_keep_calls(self.world._handle, self.index, keep))

    def calls_file(self, path: Path) -> None:
        """Decides the file to which the last calls are written when the rank fails.

        Its folder need not exist.
        """
        library = self.world._library
        name = str(path).encode()
        self.world._check(library.onnxpar_calls_file(self.world._handle, self.index, name))

    def write_calls(self, reason: str, *, fails: bool = False) -> None:
        """Writes the last calls to the file of `calls_file`, if there is one.

        Args:
            reason: Why.
            fails: Whether the rank fails: a message on stderr names the file, and later calls write
                nothing.
        """
        library = self.world._library
        place = self.world._handle, self.index
        self.world._check(library.onnxpar_write_calls(*place, reason.encode(), fails))

    def take_calls(self) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Returns the kept calls that have ended, a row each, and forgets them.

        `tracing.calls` has the columns. The second result has the names and channels.
        """
        library, place = self.world._library, (self.world._handle, self.index)
        count = library.onnxpar_take_calls(*place)
        rows = np.empty((max(count, 0), len(COLUMNS)), np.int64)
        library.onnxpar_read_calls(rows.ctypes.data)
        tables = library.onnxpar_call_tables(*place)
        self.world._check(int(count < 0 or tables is None))
        return rows, json.loads(tables)

    def all_reduce(
        self,
        array: NDArray[Any],
        group: Sequence[int] | None = None,
        op: str = "sum",
        what: str | None = None,
    ) -> NDArray[Any]:
        """Returns the element-wise reduction of the arrays of the ranks of `group`.

        It is not counted, and needs no session. But a rank's collectives, in sessions or
        here, must come in the same order on all ranks of the group.

        Args:
            array: Of the same shape and dtype on every rank.
            group: Global ranks, this one among them; all ranks if None.
            op: sum, max, min or prod; for bool, sum and max mean "or", prod and min mean "and".
            what: Names the call in messages; a few texts in all, since they are kept.

        Raises:
            ValueError: The dtype, the reduction or the group cannot be used.
            RankError: Another rank failed, or the ranks disagree on what they call.
        """
        source = np.ascontiguousarray(array)
        try:
            code = onnx_code(source.dtype)
        except KeyError:
            raise ValueError(f"arrays of {source.dtype} cannot be reduced") from None
        if op not in _REDUCTIONS:
            raise ValueError(f"reduction: expected one of {', '.join(_REDUCTIONS)}, got {op!r}")
        members = self._members(group)
        result = np.empty_like(source)
        self._call(
            self.world._library.onnxpar_all_reduce(
                self.world._handle,
                self.index,
                members,
                len(members),
                source.ctypes.data,
                result.ctypes.data,
                source.size,
                code,
                _REDUCTIONS.index(op),
                None if what is None else what.encode(),
            )
        )
        return result.reshape(np.shape(array))

    def overlaps(self, group: Sequence[int]) -> bool:
        """Returns whether data travels between the ranks of `group` while this rank computes.

        If not (ranks that share memory), the rank's processor moves it. Every rank of the group
        must call it.

        Args:
            group: Global ranks, this one among them.

        Raises:
            ValueError: The group cannot be used.
            RankError: Another rank failed.
        """
        members = self._members(group)
        found = self.world._library.onnxpar_overlaps(
            self.world._handle, self.index, members, len(members)
        )
        self._call(int(found < 0))
        return bool(found)

    def prompt(self, peer: int) -> bool:
        """Returns whether messages from a rank arrive while neither rank communicates.

        If not, they arrive while this rank computes if it receives them in the background.

        Args:
            peer: The sender's global rank.

        Raises:
            RankError: The world has no such rank, or is closed.
        """
        found = self.world._library.onnxpar_prompt(self.world._handle, self.index, peer)
        self._call(int(found < 0))
        return bool(found)

    def allow_background(self, allowed: bool) -> None:
        """Decides whether collectives may run in the background of computation (the default).

        If not, each is carried out when it starts; results are the same. Decide the same on all
        ranks.
        """
        library = self.world._library
        self._call(library.onnxpar_allow_background(self.world._handle, self.index, allowed))

    def count_background(self, counter: ctypes.c_void_p) -> None:
        """Counts the host memory of collectives in the background: copies, and results not taken.

        Args:
            counter: The handle of a `LiveBytes`; the last one that was given counts.
        """
        library = self.world._library
        self._call(library.onnxpar_live_bytes_count(counter, self.world._handle, self.index))

    def settle(self) -> None:
        """Waits for all collectives that run in the background, so that their memory can be read.

        The nodes Wait and Finish that take the results must still run.

        Raises:
            RankError: A gather that the optimizer's program left to the next training program
                failed. Errors of other collectives are raised by the nodes that wait for them.
        """
        library = self.world._library
        self._call(library.onnxpar_settle(self.world._handle, self.index))

    @property
    def concurrent(self) -> bool:
        """Whether other threads of the rank may receive while it communicates."""
        found = self.world._library.onnxpar_concurrent(self.world._handle, self.index)
        self._call(int(found < 0))
        return bool(found)

    def send(self, array: NDArray[Any], peer: int, tag: int, what: str) -> None:
        """Sends an array's elements, without waiting for the receiver. Counted as `Send`.

        Messages of one tag from one rank to another arrive in the order in which they were sent.

        Args:
            array: The array, C-contiguous; it may be changed once this returns.
            peer: The receiver's global rank.
            tag: From 0 to 32767; the receiver must ask for the same.
            what: What it is, for messages.

        Raises:
            ValueError: The array is not contiguous, or the world has no such rank.
            RankError: Another rank failed.
        """
        address = _contiguous(array)
        self._transfer("onnxpar_send", peer, tag, address, array.nbytes, what.encode())

    def recv(
        self, array: NDArray[Any], peer: int, tag: int, what: str, *, background: bool = False
    ) -> None:
        """Receives an array's elements. Counted as `Recv`, with no bytes.

        Args:
            array: C-contiguous memory, as large as what was sent.
            peer: The sender's global rank.
            tag: As of `send`.
            what: What it is, for messages.
            background: Receive without a time limit. If the rank is `concurrent`, several of its
                threads may do so at the same time, each from another peer.

        Raises:
            ValueError: The array is not contiguous, or the world has no such rank.
            RankError: Another rank failed, or sent something of another size.
        """
        address = _contiguous(array)
        place = peer, tag, address, array.nbytes
        self._transfer("onnxpar_recv", *place, background, what.encode())

    def send_device(
        self, address: int, size: int, peer: int, tag: int, what: str, stream: ctypes.c_void_p
    ) -> None:
        """Sends memory of the rank's GPU, without waiting for the receiver. Counted as `Send`.

        It uses the transport of `open_device`. Messages of one tag from one rank's GPU to another's
        arrive in the order in which they were sent.

        Args:
            address: The GPU's address; work enqueued on the stream later may change the memory.
            size: Bytes.
            peer: The receiver's global rank.
            tag: As of `send`.
            what: What it is, for messages.
            stream: The stream that computes it.

        Raises:
            ValueError: The world has no such rank.
            RankError: Another rank failed, or the rank has no GPU.
        """
        self._transfer("onnxpar_send_device", peer, tag, address, size, stream, what.encode())

    def recv_device(
        self,
        address: int,
        size: int,
        peer: int,
        tag: int,
        what: str,
        stream: ctypes.c_void_p,
        *,
        background: bool = False,
    ) -> None:
        """Receives into memory of the rank's GPU. Counted as `Recv`, with no bytes.

        It returns once something has been sent. The memory is written after the work that is
        already on the stream, and complete for work that is enqueued on the stream later.

        Args:
            address: The GPU's address.
            size: Bytes, as many as were sent.
            peer: The sender's global rank.
            tag: As of `send`.
            what: What it is, for messages.
            stream: The stream.
            background: As of `recv`.

        Raises:
            ValueError: The world has no such rank.
            RankError: Another rank failed, or sent something of another size, or the rank has no
                GPU.
        """
        place = peer, tag, address, size
        self._transfer("onnxpar_recv_device", *place, stream, background, what.encode())

    def _transfer(self, entry: str, peer: int, *arguments: Any) -> None:
        """Calls an entry of the library that sends to, or receives from, another rank."""
        if not 0 <= peer < self.world.size:
            raise ValueError(f"rank {peer}: expected ranks below {self.world.size}")
        function = getattr(self.world._library, entry)
        self._call(function(self.world._handle, self.index, peer, *arguments))

    def _members(self, group: Sequence[int] | None) -> Any:
        members = list(range(self.world.size) if group is None else group)
        if self.index not in members or len(set(members)) != len(members):
            raise ValueError(f"group {members}: expected distinct ranks that include {self.index}")
        if min(members) < 0 or max(members) >= self.world.size:
            raise ValueError(f"group {members}: expected ranks below {self.world.size}")
        return (ctypes.c_int * len(members))(*members)

    def _call(self, status: int) -> None:
        if status != 0:
            raise RankError(self.index, last_error(self.world._library))


def _contiguous(array: NDArray[Any]) -> int:
    """Returns the address of an array's elements; raises ValueError unless it is contiguous."""
    if not array.flags.c_contiguous:
        raise ValueError(f"expected a contiguous array, got strides {array.strides}")
    # Cheaper than `ctypes.data`, which makes an object for all kinds of pointers.
    address: int = array.__array_interface__["data"][0]
    return address

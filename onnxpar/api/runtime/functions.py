"""Sharded functions: the ranks of this process, and the arrays of one call on all ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar.core.errors import CallError, OnnxparError
from onnxpar_format.boxes import SizedSharding
from onnxpar_runtime import Rank, Session, ThreadsGroup, init
from onnxpar_runtime.agree import together
from onnxpar_runtime.gather import PIECE_BYTES
from onnxpar_runtime.mpirun_place import mpirun_place
from onnxpar_runtime.symbol_checks import bind_symbols

Array = NDArray[Any]
Report = Mapping[str, Any]
_TAG = 1
_POLL_S = 0.01


def started() -> int | None:
    """Returns how many ranks mpirun started, or None if ranks are threads of this process."""
    place = mpirun_place()
    return None if place is None or place[1] == 1 else place[1]


@cache
def _own_rank() -> tuple[Rank, Any]:
    """Returns this process's rank, and a separate communicator for messages outside of graphs."""
    rank = init()
    return rank, rank.world.comm.Dup()


class Call:
    """The arrays of one call of a sharded function, as all its ranks see them.

    Every rank must make it at the same time.

    Args:
        devices: Number of ranks.
        feeds: An array for each input; for a sliced input this rank's shard, or a sequence with a
            shard for each rank if ranks are threads.
        sliced: For each input whether a rank is given a shard of it.

    Attributes:
        shapes: Global shape of each input.
        dtypes: Element type of each input.

    Raises:
        CallError: An input is not an array, or the arrays of ranks do not fit together. All ranks
            raise it.
    """

    def __init__(self, devices: int, feeds: Mapping[str, Any], sliced: Mapping[str, bool]) -> None:
        """Finds the global shapes."""
        self._size = devices
        self._first = 0
        places: Sequence[int] = range(devices)
        if started() is not None:
            rank, comm = _own_rank()
            self._first, places = rank.index, [rank.index]
        error = None
        mine: dict[str, list[Array]] = {}
        try:
            for name, given in feeds.items():
                mine[name] = _parts(name, given, len(places), sliced[name])
        except CallError as caught:
            error = caught
        seen: list[Any] = [
            str(error) if error else {n: (p[i].shape, p[i].dtype) for n, p in mine.items()}
            for i in range(len(places))
        ]
        if started() is not None:
            seen = comm.allgather(seen[0])
        for entry in seen:
            if isinstance(entry, str):
                raise CallError(entry)
        self._mine = mine
        # For each rank the shape and type of each input that it is given.
        self._seen: list[dict[str, tuple[tuple[int, ...], np.dtype[Any]]]] = seen
        self._sliced = {n: flag and len(seen[0][n][0]) > 0 for n, flag in sliced.items()}
        self.shapes = tuple(self._global_shape(name) for name in feeds)
        self.dtypes = tuple(seen[0][name][1] for name in feeds)

    def _global_shape(self, name: str) -> tuple[int, ...]:
        found = [entry[name] for entry in self._seen]
        shape, dtype = found[0]
        first = 1 if self._sliced[name] else 0
        for rank, (other, kind) in enumerate(found):
            if len(other) != len(shape) or other[first:] != shape[first:] or kind != dtype:
                raise CallError(
                    f"input {name!r}: expected the same element type and shape on all ranks"
                    f"{' after dim 0' if first else ''}, got {dtype}{list(shape)} on rank 0 and "
                    f"{kind}{list(other)} on rank {rank}"
                )
        if not first:
            return shape
        return (sum(other[0] for other, _ in found), *shape[1:])

    def local(self, name: str, sharding: SizedSharding, rank: int) -> Array:
        """Returns the shard of an input for a rank of this process, padding included.

        Raises:
            CallError: The slices are not those of the sharding. All ranks raise it.
        """
        array = self._mine[name][rank - self._first]
        if not self._sliced[name]:
            return np.asarray(sharding.take(array, rank), order="C")
        expected = [sharding.blocks(r)[0].valid for r in range(self._size)]
        got = [entry[name][0][0] for entry in self._seen]
        if got != expected:
            raise CallError(
                f"input {name!r}: expected shards of {expected} rows on the ranks, got {got}"
            )
        padding = [(0, sharding.local_shape[0] - len(array))] + [(0, 0)] * (array.ndim - 1)
        return np.pad(array, padding)


def _parts(name: str, given: Any, count: int, sliced: bool) -> list[Array]:
    """Returns an array for each rank of this process."""
    several = sliced and started() is None
    if several and (not isinstance(given, list | tuple) or len(given) != count):
        raise CallError(
            f"input {name!r}: expected a sequence of {count} shards, one for each rank, got "
            f"{type(given).__name__}{f' of {len(given)}' if hasattr(given, '__len__') else ''}"
        )
    found = []
    for item in given if several else [given]:
        array = np.asarray(item)
        if array.dtype.kind in "OUSMm":
            raise CallError(f"input {name!r}: expected an array of numbers, got {array.dtype}")
        found.append(array)
    return found if several else found * count


class _Program:
    """The ranks of this process with their graphs loaded."""

    def __init__(self, sessions: Sequence[Session], group: ThreadsGroup | None) -> None:
        self._sessions = sessions
        self._group = group

    def run(
        self, call: Call, *, sliced: bool, counters: Mapping[str, int] | None = None
    ) -> list[Any]:
        """Returns each output: complete, or if `sliced` the shards of the ranks of this process.

        Args:
            call: The arrays.
            sliced: Whether outputs are shards.
            counters: The keys of random numbers, see `Session.counters`.

        Raises:
            CallError: Slices are not those of the sharding.
            OnnxparRuntimeError: As `Session.run`.
        """
        first = self._sessions[0]
        specs = first.program.inputs
        shapes = dict(zip((spec.name for spec in specs), call.shapes, strict=True))
        values = bind_symbols(specs, shapes)
        atoms = first.manifest.atoms
        shardings = {spec.name: spec.sharding(atoms, values) for spec in specs}
        feeds = {
            session.rank.index: {
                n: call.local(n, sharding, session.rank.index) for n, sharding in shardings.items()
            }
            for session in self._sessions
        }

        def one(index: int) -> list[Array]:
            session = self._sessions[index]
            rank = session.rank.index
            session.counters |= counters or {}
            outputs = session.run(feeds[rank], values)
            return [
                np.array(spec.sharding(atoms, values, output.shape).unpadded(output, rank))
                for spec in first.program.outputs
                for output in [outputs[spec.name]]
            ]

        if self._group is not None:
            results = self._group.each(one)
            return [list(each) for each in zip(*results, strict=True)] if sliced else results[0]
        try:
            return one(0)
        except BaseException as error:
            _end_all(error, first.rank)
            raise

    def close(self) -> None:
        """Frees the sessions."""
        if self._group is not None:
            self._group.close()
        else:
            self._sessions[0].close()


def _end_all(error: BaseException, rank: Rank) -> None:
    """Ends the processes of all ranks, unless all of them raise the same error."""
    if not getattr(error, "agreed", isinstance(error, OnnxparError)):
        rank.world.abort(rank.index, f"{type(error).__name__}: {error}")


def from_first_rank(value: Any) -> Any:
    """Returns the value that rank 0 has; every rank must call it."""
    if started() is None:
        return value
    _, comm = _own_rank()
    return comm.bcast(value, root=0)


def on_all_ranks(true: bool) -> bool:
    """Whether something is true on all ranks; every rank must call it."""
    if started() is None:
        return true
    _, comm = _own_rank()
    return all(comm.allgather(true))


def share_array(array: Array) -> None:
    """Overwrites a contiguous array with that of rank 0; every rank must call it."""
    if started() is not None:
        _, comm = _own_rank()
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, PIECE_BYTES):
            comm.Bcast(flat[start : start + PIECE_BYTES], root=0)


def open_program(devices: int, make: Callable[[Path], Report]) -> tuple[_Program, Report]:
    """Returns ranks that have loaded a program, and its report; every rank must call it.

    Only rank 0 writes the program. Its temporary directory is removed as soon as all ranks have
    loaded their graphs, so nothing is left behind, however the ranks end later.

    Args:
        devices: Number of ranks.
        make: Writes a directory at the path that it is given, and returns its report.

    Raises:
        OnnxparError: What `make` raises, on all ranks.
        OnnxparRuntimeError: As `Session`.
    """
    if started() is None:
        with TemporaryDirectory(prefix="onnxpar-shard-") as folder:
            report = make(Path(folder, "program"))
            group = ThreadsGroup(Path(folder, "program"))
        return _Program(group.members, group), report
    rank, comm = _own_rank()
    try:
        if rank.index:
            # Polled, since a waiting MPI call would take the core that rank 0 computes on.
            while not comm.iprobe(source=0, tag=_TAG):
                time.sleep(_POLL_S)
            return _opened(rank, *comm.recv(source=0, tag=_TAG))
        with TemporaryDirectory(prefix="onnxpar-shard-") as folder:
            report, error = {}, None
            try:
                report = make(Path(folder, "program"))
            except OnnxparError as caught:
                error = caught
            packet = Path(folder, "program"), report, error
            for other in range(1, devices):
                comm.send(packet, dest=other, tag=_TAG)
            return _opened(rank, *packet)
    except BaseException as error:
        _end_all(error, rank)
        raise


def _opened(
    rank: Rank, directory: Path, report: Report, error: OnnxparError | None
) -> tuple[_Program, Report]:
    if error is not None:
        raise error
    session = together(rank, lambda: Session(directory, rank=rank))
    return _Program([session], None), report

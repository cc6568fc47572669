"""Sharded functions: the ranks of this process, and the arrays of one call on all ranks."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxpar.core.errors import CallError, OnnxparError
from onnxpar_format.boxes import SizedSharding
from onnxpar_format.place import find_place
from onnxpar_format.texts import naming_arguments
from onnxpar_runtime import Rank, Session, ThreadsGroup, init
from onnxpar_runtime.agree import together
from onnxpar_runtime.gather import PIECE_BYTES
from onnxpar_runtime.symbol_checks import bind_symbols

Array = NDArray[Any]
Report = Mapping[str, Any]
T = TypeVar("T")
_TAG = 1
_POLL_S = 0.01
_DIGEST_BYTES = 7
"""As much as an integer of 64 bits with a sign holds."""


def started() -> int | None:
    """Returns how many ranks mpirun started, or None if ranks are threads of this process."""
    place = find_place()
    return None if place is None or place.size == 1 else place.size


@cache
def _own_rank() -> tuple[Rank, Any]:
    """Returns this process's rank, and a separate communicator for messages outside of graphs."""
    rank = init()
    return rank, rank.world.comm.Dup()


def same_call(what: str, prepare: Callable[[], tuple[Mapping[str, str], T]]) -> T:
    """Returns what a call needs, once all ranks are known to make the same one.

    Every rank must call it, before it waits for others. It costs one small reduction. A rank that
    calls nothing is waited for as long as `ONNXPAR_TIMEOUT` says.

    Args:
        what: Names what is called, for messages; a few texts in all.
        prepare: Returns what must be equal on all ranks, by what it is, and the result. A fact may
            be a list, with an item on each line.

    Raises:
        CallError: Ranks make different calls.
        OnnxparError: That of `prepare` on the first rank where it raises one. All ranks raise it.
    """
    if started() is None:
        return prepare()[1]
    rank, comm = _own_rank()
    facts: dict[str, str] = {"call": what}
    error, result = None, None
    try:
        found, result = prepare()
        facts |= found
    except OnnxparError as caught:
        error = caught
    text = "\0".join(f"{key}\0{fact}" for key, fact in facts.items())
    digest = int.from_bytes(blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest())
    own = np.array([digest, -digest, error is not None], np.int64)
    most, least, failed = rank.all_reduce(own, op="max", what=f"{what}, on all ranks")
    if most == -least and not failed:
        return result  # type: ignore[return-value]  # no rank has an error
    seen: list[tuple[Mapping[str, str], OnnxparError | None]] = comm.allgather((facts, error))
    for number, (_, raised) in enumerate(seen):
        if raised is not None:
            everyone = all(str(other) == str(raised) for _, other in seen)
            raise raised if everyone else type(raised)(f"rank {number}: {raised}")
    raise CallError(_difference([found for found, _ in seen]))


def _difference(facts: Sequence[Mapping[str, str]]) -> str:
    """Returns what is not equal on all ranks, and on which ranks it is what."""
    for key in {key: None for found in facts for key in found}:
        lists = [found.get(key, "").split("\n") for found in facts]
        common = set(lists[0]).intersection(*lists)
        ranks: dict[str, list[int]] = {}
        for rank, items in enumerate(lists):
            own = ", ".join(item for item in items if item not in common) or "none"
            ranks.setdefault(own, []).append(rank)
        if len(ranks) > 1:
            got = [
                f"{fact} on rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}"
                for fact, of in ranks.items()
            ]
            return f"{key}: expected the same on all ranks, got {' and '.join(got)}"
    raise AssertionError("different digests of equal facts")


class Call:
    """The arrays of one call, as all its ranks see them.

    Args:
        devices: Number of ranks.
        arrays: For each input an array for each rank of this process.
        sizes: For each input of which a rank is given a shard, the number of rows on each rank.

    Attributes:
        shapes: Global shape of each input.
        dtypes: Element type of each input.
    """

    def __init__(
        self,
        devices: int,
        arrays: Mapping[str, Sequence[Array]],
        sizes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Finds the global shapes."""
        self._devices, self._mine, self._sizes = devices, arrays, sizes
        self._first = 0 if started() is None else _own_rank()[0].index
        self.shapes = tuple(
            (sum(sizes[name]), *own[0].shape[1:]) if name in sizes else own[0].shape
            for name, own in arrays.items()
        )
        self.dtypes = tuple(own[0].dtype for own in arrays.values())

    @staticmethod
    def of_all_ranks(
        devices: int, what: str, feeds: Callable[[], Mapping[str, Any]], sliced: Mapping[str, bool]
    ) -> "Call":
        """Returns a call that every rank makes at the same time.

        Args:
            devices: Number of ranks.
            what: What is called, for messages.
            feeds: Returns an array for each input; for a sliced input this rank's shard, or a
                sequence with a shard for each rank if ranks are threads.
            sliced: For each input whether a rank is given a shard of it.

        Raises:
            OnnxparError: Of `feeds`; an input is not an array, or the arrays of ranks do not fit
                together. All ranks raise it.
        """
        own = devices if started() is None else 1

        def prepare() -> tuple[dict[str, str], dict[str, list[Array]]]:
            found = {n: _parts(n, given, own, sliced[n]) for n, given in feeds().items()}
            facts = {
                f"input {n!r}": described(parts[0], rows=sliced[n]) for n, parts in found.items()
            }
            return facts, found

        mine = same_call(what, prepare)
        for name, arrays in mine.items():
            for rank, array in enumerate(arrays):
                _check_equal(name, rank, array, arrays[0], rows=sliced[name])
        shards = [name for name, flag in sliced.items() if flag and mine[name][0].ndim]
        sizes = _rows(devices, [[len(a) for a in mine[name]] for name in shards])
        return Call(devices, mine, dict(zip(shards, sizes, strict=True)))

    def local(self, name: str, sharding: SizedSharding, rank: int) -> Array:
        """Returns the shard of an input for a rank of this process, padding included.

        Raises:
            CallError: The slices are not those of the sharding. All ranks raise it.
        """
        array = self._mine[name][rank - self._first]
        if name not in self._sizes:
            return np.asarray(sharding.take(array, rank), order="C")
        expected = [sharding.blocks(r)[0].valid for r in range(self._devices)]
        got = list(self._sizes[name])
        if got != expected:
            raise CallError(
                f"input {name!r}: expected shards of {expected} rows on the ranks, got {got}"
            )
        padding = [(0, sharding.local_shape[0] - len(array))] + [(0, 0)] * (array.ndim - 1)
        return np.pad(array, padding)


def described(array: Any, *, rows: bool = False) -> str:
    """Returns element type and shape of an array; the number of rows is left out if `rows`."""
    shape = ["rows", *array.shape[1:]] if rows and len(array.shape) else array.shape
    return f"{array.dtype}[{', '.join(map(str, shape))}]"


def _check_equal(name: str, rank: int, array: Array, first: Array, *, rows: bool) -> None:
    """Raises CallError unless the shards of two ranks of this process fit together."""
    found, wanted = (described(each, rows=rows) for each in (array, first))
    if found != wanted:
        facts = [{f"input {name!r}": wanted}] * rank + [{f"input {name!r}": found}]
        raise CallError(_difference(facts))


def _rows(devices: int, own: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns for each sliced input the number of rows on each rank, from those of this process."""
    if started() is None or not own:
        return [list(sizes) for sizes in own]
    rank, _ = _own_rank()
    table = np.zeros((len(own), devices), np.int64)
    table[:, rank.index] = [size for (size,) in own]
    found: list[list[int]] = rank.all_reduce(table).tolist()
    return found


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
            with naming_arguments(OnnxparError):
                report = make(Path(folder, "program"))
            group = ThreadsGroup(Path(folder, "program"))
        return _Program(group.members, group), report
    rank, comm = _own_rank()
    try:
        if rank.index:
            # Polled, since a waiting MPI call would take the core that rank 0 computes on.
            while not comm.iprobe(source=0, tag=_TAG):
                time.sleep(_POLL_S)
            with warnings.catch_warnings():
                # PyTorch warns of its own class when a description of results is unpickled.
                warnings.simplefilter("ignore", FutureWarning)
                packet = comm.recv(source=0, tag=_TAG)
            return _opened(rank, *packet)
        with TemporaryDirectory(prefix="onnxpar-shard-") as folder:
            report, error = {}, None
            try:
                # Before the error goes to the other ranks.
                with naming_arguments(OnnxparError):
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

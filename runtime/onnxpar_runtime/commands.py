"""`run`, as the command line and `mpirun python` scripts start it.

The commands of training are in `onnxpar_runtime.training.commands`.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import numpy as np

from onnxpar_format.calls import calls_file
from onnxpar_format.new_file import check_file
from onnxpar_format.options import Execution
from onnxpar_format.place import find_place
from onnxpar_format.texts import numbered_ranks
from onnxpar_format.trace import Trace
from onnxpar_format.trace_times import times
from onnxpar_runtime.agree import together, together_for_long
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import DirectoryError, InputError, LaunchError
from onnxpar_runtime.inputs import Inputs
from onnxpar_runtime.interrupts import reporting_termination
from onnxpar_runtime.launch import find_mpirun, guarded, init
from onnxpar_runtime.logs import open_log
from onnxpar_runtime.machine_layout import layout_notice
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.npz import read_npz, write_npz
from onnxpar_runtime.opened import wrong_size
from onnxpar_runtime.options import parse_pairs
from onnxpar_runtime.session import Session
from onnxpar_runtime.tracing.recording import Recording, write_trace

log = logging.getLogger(__name__)
_DEFAULT = Execution()
_LOG_FOLDER, _DEFAULT_FOLDER = "ONNXPAR_LOG_DIR", "onnxpar-failed"
T = TypeVar("T")


def run(
    directory: str | Path,
    inputs: str | Path,
    outputs: str | Path,
    how: Execution = _DEFAULT,
    *,
    debug_nan: bool = False,
) -> int:
    """Runs a program once on the whole arrays of an `.npz` file; the body of one rank.

    Every rank reads `inputs`; rank 0 writes `outputs`, which appears complete or not at all.

    Args:
        directory: The directory.
        inputs: `.npz` file with a whole array for each input, named as in the model.
        outputs: `.npz` file to write, arrays named as the model's outputs.
        how: How to run.
        debug_nan: As `onnxpar_runtime.opened.Opening`.

    Returns:
        The exit code. Errors have been printed.
    """
    rank = start(how)

    def body() -> None:
        manifest = begin(rank, "run", directory, how, outputs)
        with traced(rank, "run", manifest, how):
            feeds = together(rank, lambda: read_npz(inputs))
            program = Inputs(manifest, "model", rank.index)
            runs = [together(rank, lambda: program.values(feeds))]
            session = opened(Session, rank, manifest, how, debug_nan=debug_nan, runs=runs)
            start = time.perf_counter()
            results = session.run_global(feeds)
            log.info("ran in %.3f s", time.perf_counter() - start)

        def finish() -> None:
            if results is not None:
                write_npz(outputs, results)
                log.info("wrote %s", outputs)

        # If the disk is full by now, all ranks must raise the error.
        together(rank, finish)
        session.close()

    return interruptible(rank, body)


def interruptible(rank: Rank, body: Callable[[], None]) -> int:
    """Runs all that this rank does, which signals may end; returns the exit code."""

    def run() -> int:
        with reporting_termination(rank):
            body()
        return 0

    code = guarded(rank, run)
    # The interrupt has been printed; for 128 and a signal's number the caller would print it again.
    return 1 if code > 128 else code


def start(how: Execution) -> Rank:
    """Returns this process's rank; raises LaunchError (for malformed options before MPI starts)."""
    parse_pairs(how.ort)
    return init(how.transport, how.device)


def tell(rank: Rank, notices: Iterable[str]) -> None:
    """Prints notices to stderr, on rank 0."""
    if rank.index == 0:
        for notice in notices:
            sys.stderr.write(f"notice: {notice}\n")


def opened(
    kind: Callable[..., T], rank: Rank, manifest: Manifest, how: Execution, **more: object
) -> T:
    """Makes the session, generator or trainer (`kind`) of a directory on all ranks."""

    def make() -> T:
        options = parse_pairs(how.ort)
        return kind(
            manifest.directory,
            rank=rank,
            ort_options=options,
            custom_ops=how.custom_ops,
            manifest=manifest,
            **more,
        )

    return together(rank, make)


def begin(
    rank: Rank,
    command: str,
    directory: str | Path,
    how: Execution,
    writes: str | Path | None = None,
) -> Manifest:
    """Opens the log, checks the directory, the ranks and the file to write; returns the manifest.

    Raises:
        DirectoryError: The directory is damaged, or differs between ranks.
        LaunchError: The number of ranks is wrong, or the log cannot be written.
        InputError: The file cannot be written.
    """

    def prepare() -> Manifest:
        if how.log_dir is not None:
            open_log(how.log_dir, rank.index)
        manifest = Manifest.load(directory)
        check_size(manifest, rank, command, how.transport)
        if how.trace_operators and how.trace is None:
            raise LaunchError("--trace-operators: expected --trace as well")
        for file in (writes, how.trace):
            if rank.index == 0 and file is not None:
                check_file(file, InputError)
        return manifest

    manifest = together(rank, prepare)
    rank.calls_file(calls_file(how.log_dir or _default_folder(rank), rank.index))
    check_equal(rank, manifest)
    machines = _of_each(rank, crc32(socket.gethostname().encode()))
    if rank.index == 0 and (notice := layout_notice(manifest, machines)):
        tell(rank, [notice])
    copies = _of_each(rank, manifest.copy_number)
    beside = [index for index, copy in enumerate(copies) if copy == copies[rank.index]]
    names = manifest.files_to_verify(rank.index, beside)
    together_for_long(rank, lambda: manifest.verify_files(names))
    return manifest


def _default_folder(rank: Rank) -> Path:
    """Returns the folder for the last calls of ranks that fail, the same on all; it is not made.

    Every rank must call it.
    """
    now = np.array([int(time.time()) if rank.index == 0 else 0], np.int64)
    began = time.gmtime(int(rank.all_reduce(now)[0]))
    folder = Path(os.environ.get(_LOG_FOLDER) or _DEFAULT_FOLDER)
    return folder / time.strftime("%Y%m%dT%H%M%SZ", began)


def check_equal(rank: Rank, manifest: Manifest) -> None:
    """Checks that all ranks, which may be on several machines, have the same directory.

    Every rank must call it.

    Raises:
        DirectoryError: The manifests differ.
    """
    digests = _of_each(rank, manifest.digest)
    others = [index for index, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise DirectoryError(
            f"{manifest.directory}: expected the same directory on all ranks, but the manifest of "
            f"{numbered_ranks(others)} differs from that of rank 0; copy the directory to all "
            "machines"
        ).as_agreed()


def _of_each(rank: Rank, number: int) -> list[int]:
    """Returns the number of each rank. Every rank must call it."""
    numbers = np.zeros(rank.world.size, np.int64)
    numbers[rank.index] = number
    return [int(n) for n in rank.all_reduce(numbers)]


@dataclass
class TraceOfRun:
    """A trace that is being made.

    Attributes:
        even: The share of a step in which stages would be idle if they took the same time, if the
            run has found it.
    """

    even: float | None = None


@contextmanager
def traced(rank: Rank, command: str, manifest: Manifest, how: Execution) -> Iterator[TraceOfRun]:
    """Writes a trace of the block, if it is wanted. Every rank must enter it.

    The sessions must be made within the block. Rank 0 says on stderr where the time went.

    Raises:
        InputError: The file cannot be written.
        RankError: A rank failed.
    """
    made = TraceOfRun()
    if how.trace is None:
        yield made
        return
    recording = Recording(rank, operators=how.trace_operators)
    yield made
    trace = recording.finish(command, manifest.stage_devices)
    write_trace(rank, how.trace, trace)
    if trace is not None:
        sys.stderr.write(f"wrote {how.trace}{_where_time_went(trace, made.even)}\n")
        sys.stderr.flush()


def _where_time_went(trace: Trace, even: float | None) -> str:
    """Returns for people what a trace says, in one line."""
    try:
        found = times(trace)
    except ValueError:
        return ""
    text = f": {found.sentence()}"
    if found.idle is not None and even is not None:
        text += (
            f"; the stages are idle for {found.idle:.1%} of a step; if all stages took the same "
            f"time, they would be idle for {even:.1%}"
        )
    return text


def check_size(
    manifest: Manifest, rank: Rank, command: str = "run", transport: str = "auto"
) -> None:
    """Raises LaunchError, with the command to type, unless there is a rank for each device."""
    size = rank.world.size
    if size == manifest.devices:
        return
    if find_place() is None:
        start = f"`onnxpar launch -- {command} {manifest.directory} …`"
        try:
            find_mpirun()
        except LaunchError as error:
            raise LaunchError(
                f"{manifest.directory} was made for {manifest.devices} ranks, but {error}; then "
                f"{start} starts it"
            ) from None
        raise LaunchError(
            f"{manifest.directory} was made for {manifest.devices} ranks: start it with {start}"
        )
    if transport == "threads":
        raise LaunchError(
            f"--transport threads: expected one rank, but {manifest.directory} was made for "
            f"{manifest.devices}; leave out --transport"
        )
    raise LaunchError(wrong_size(manifest, size))

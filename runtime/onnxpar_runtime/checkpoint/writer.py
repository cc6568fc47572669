"""Writes checkpoints while training goes on.

At the end of a step every rank copies its shards and goes on. A thread writes the copies to the
disk, under a hidden name, and then a mark with the checksum. Rank 0's thread waits for the marks of
all ranks, and only then gives the checkpoint its name. So ranks do not wait for one another, and no
collective is needed while a step may run one. The next checkpoint begins when the last one is
complete on all ranks.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.checkpoint import GENERATOR, SCHEMA, CheckpointContents, Progress, StoredTensor
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import FileEntry
from onnxpar_format.new_file import new_file
from onnxpar_format.trace import CHECKPOINT
from onnxpar_runtime.agree import together, together_for_long
from onnxpar_runtime.checkpoint.folder import (
    cannot_write,
    complete_steps,
    finish,
    make_partial,
    owned,
    partial_name,
    prune,
    step_name,
    write_file,
)
from onnxpar_runtime.checkpoint.layout import Written, rank_file, stored_tensors, written
from onnxpar_runtime.checkpoint.sums import modulus, sum_of
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import CheckpointError, OnnxparRuntimeError
from onnxpar_runtime.files import check_sizes
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.tensor_file import Entry, header, raw_bytes

log = logging.getLogger(__name__)
Array = NDArray[Any]
_POLL_S = 0.02
_LEAVE_S = 30.0


class Source(Protocol):
    """The states of a rank, as `onnxpar_runtime.training.state.States`."""

    def memory(self, name: str) -> Array:
        """Returns memory for this rank's shard of a state, padding included."""

    def copy_to(self, name: str, into: Array) -> None:
        """Begins to copy this rank's shard of a state, as it is now."""

    def finish_copies(self) -> None:
        """Waits until all copies are complete. Any thread may call it."""


class Checkpointer:
    """Writes one rank's files of checkpoints; used in a `with` statement, by all ranks.

    Args:
        rank: This rank.
        manifest: The directory's manifest.
        root: The folder of checkpoints, the same for all ranks.
        source: The states of this rank.
        run: The options of the run, to compare when it is resumed.
        keep: Number of complete checkpoints to keep.
        begun: Number of steps that are done when the run begins; the folder may have no later
            checkpoints.

    Attributes:
        best: The step whose checkpoint is kept, however old it is; None if there is none.

    Raises:
        CheckpointError: The folder cannot be used; raised by all ranks.
    """

    def __init__(
        self,
        rank: Rank,
        manifest: Manifest,
        root: str | Path,
        source: Source,
        run: Mapping[str, Any],
        *,
        keep: int = 2,
        begun: int = 0,
    ) -> None:
        """Prepares the folder."""
        self._rank = rank
        self._manifest = manifest
        self._root = Path(root)
        self._source = source
        # Kept from one checkpoint to the next: new memory would cost more than copying.
        self._copies: list[Array] = []
        self._run = run
        self._keep = keep
        self.best: int | None = None
        self._thread: threading.Thread | None = None
        self._error: OnnxparRuntimeError | None = None
        self._own_done = threading.Event()
        self._leaving = threading.Event()
        self._last = begun
        self._mine: list[Written] = []
        self._writers: set[int] = set()
        for part in written(manifest):
            self._writers.add(part.rank)
            if part.rank == rank.index:
                self._mine.append(part)
        # Larger elements first, so that all tensors are aligned.
        self._mine.sort(key=lambda part: -DTYPES[part.state.dtype].dtype.itemsize)
        self._tensors: dict[str, StoredTensor] = stored_tensors(manifest) if not rank.index else {}
        self._open = ExitStack()
        try:
            together(rank, lambda: self._prepare(begun))
            self._check_shared()
        except BaseException:
            self._open.close()
            raise

    def _prepare(self, begun: int) -> None:
        if self._rank.index:
            return
        self._open.enter_context(owned(self._root))
        later = [step for step in complete_steps(self._root) if step > begun]
        if later:
            raise CheckpointError(
                f"{self._root}: has checkpoints up to step {later[-1]}, but this run begins at "
                f"step {begun}: continue it with --resume {self._root}, or write to another folder"
            )

    def _check_shared(self) -> None:
        """Raises on all ranks unless all of them see the same folder."""
        token = int.from_bytes(np.random.default_rng().bytes(4)) if not self._rank.index else 0
        token = int(self._rank.all_reduce(np.array([token], np.int64))[0])
        probe = self._root / f".shared-{token}"

        def write() -> None:
            if not self._rank.index:
                try:
                    probe.touch()
                except OSError as error:
                    raise cannot_write(self._root, error) from None

        def see() -> None:
            if not probe.exists():
                raise CheckpointError(
                    f"{self._root}: rank {self._rank.index} does not see the files that rank 0 "
                    f"writes there; expected a folder that all ranks share"
                )

        together(self._rank, write)
        try:
            together(self._rank, see)
        finally:
            if not self._rank.index:
                probe.unlink(missing_ok=True)

    # -- in the main thread ----------------------------------------------------------------------

    def check(self) -> None:
        """Raises the error of the thread, if it failed, on this rank alone."""
        if self._error is not None:
            raise self._error

    def save(self, progress: Progress) -> bool:
        """Begins to write a checkpoint, once the last one is complete. Every rank must call it.

        Returns:
            Whether it did; otherwise there is one of this step already.

        Raises:
            CheckpointError: The last one could not be written, by this rank.
            RankError: Likewise, by another rank.
        """
        if progress.step <= self._last:
            return False
        with self._rank.timeline.span(CHECKPOINT, f"checkpoint of step {progress.step}"):
            self._save(progress)
        return True

    def _save(self, progress: Progress) -> None:
        self.wait()
        self._last = progress.step
        start = time.perf_counter()
        if not self._copies:
            self._copies = [self._source.memory(p.state.name) for p in self._mine]
        for part, array in zip(self._mine, self._copies, strict=True):
            self._source.copy_to(part.state.name, array)
        log.info("copied step %d in %.3f s", progress.step, time.perf_counter() - start)
        self._own_done.clear()
        self._thread = threading.Thread(
            target=self._work, args=(progress,), name="onnxpar-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last checkpoint is complete on all ranks. Every rank must call it.

        Raises:
            CheckpointError: As `save`.
            RankError: As `save`.
        """
        if self._thread is None:
            return
        try:
            # Rank 0 must not wait for the mark of a rank that has failed to write.
            together_for_long(self._rank, self._join_own)
            together_for_long(self._rank, self._join)
        except BaseException:
            self._leaving.set()
            raise
        self._thread = None

    def _join_own(self) -> None:
        self._own_done.wait()
        self.check()

    def _join(self) -> None:
        assert self._thread is not None
        self._thread.join()
        self.check()

    def __enter__(self) -> "Checkpointer":
        """Returns itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Waits for the last checkpoint; after an error for a limited time, if all ranks do so."""
        try:
            together = getattr(error, "agreed", False) or self._rank.world.size == 1
            if error is None:
                self.wait()
            elif self._thread is not None and together:
                self._thread.join(_LEAVE_S)
        finally:
            self._leaving.set()
            self._open.close()

    # -- in the thread ---------------------------------------------------------------------------

    def _work(self, progress: Progress) -> None:
        try:
            start = time.perf_counter()
            partial = self._root / partial_name(progress.step)
            if self._mine:
                self._write_own(partial)
            self._own_done.set()
            if not self._rank.index:
                self._finish(partial, progress)
            log.info("wrote step %d in %.3f s", progress.step, time.perf_counter() - start)
        except OnnxparRuntimeError as error:
            self._error = error
        except OSError as error:
            self._error = cannot_write(self._root, error)
        except Exception as error:  # raised in the main thread, which ends all ranks
            self._error = CheckpointError(f"{self._root}: {type(error).__name__}: {error}")
        finally:
            self._own_done.set()

    def _write_own(self, partial: Path) -> None:
        make_partial(partial, shared=True)
        self._source.finish_copies()
        arrays = [
            part.sharding.unpadded(array, part.place)
            for part, array in zip(self._mine, self._copies, strict=True)
        ]
        entries = [
            Entry(part.state.name, part.state.dtype, array.shape)
            for part, array in zip(self._mine, arrays, strict=True)
        ]
        name = rank_file(self._rank.index)
        entry = write_file(partial / name, chain([header(entries)], map(raw_bytes, arrays)))
        sums: dict[str, int] = {}
        for part, array in zip(self._mine, arrays, strict=True):
            tensor = part.state.tensor.name
            total = sums.get(tensor, 0) + sum_of(array)
            sums[tensor] = total % modulus(array.itemsize)
        with new_file(partial / _mark(self._rank.index), CheckpointError) as mark:
            mark.write_text(json.dumps({"file": vars(entry), "sums": sums}))

    def _finish(self, partial: Path, progress: Progress) -> None:
        """Waits for all ranks' files, and completes the checkpoint."""
        files, sums = {}, dict.fromkeys(self._tensors, 0)
        for writer in sorted(self._writers):
            mark = partial / _mark(writer)
            while not mark.exists():
                if self._leaving.wait(_POLL_S):
                    return
            left = json.loads(mark.read_text())
            files[rank_file(writer)] = FileEntry(**left["file"])
            for name, number in left["sums"].items():
                sums[name] = (sums[name] + number) % modulus(self._tensors[name].itemsize)
            mark.unlink()
        contents = CheckpointContents(
            schema=SCHEMA,
            generator=GENERATOR,
            model=self._manifest.model,
            optimizer=self._manifest.trained().optimizer,
            devices=self._manifest.devices,
            progress=progress,
            run=self._run,
            tensors={name: replace(t, sum=sums[name]) for name, t in self._tensors.items()},
            files=files,
        )
        check_sizes(partial, files, "checkpoint", CheckpointError)
        target = self._root / step_name(progress.step)
        finish(partial, contents, target)
        prune(self._root, self._keep, self.best)


def _mark(rank: int) -> str:
    return f".{rank_file(rank)}.done"

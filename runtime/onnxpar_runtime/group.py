"""All ranks in one process, one thread each, over the `threads` transport."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from onnxpar_runtime.closing import Closing
from onnxpar_runtime.collectives import OpCounter, World
from onnxpar_runtime.errors import OnnxparRuntimeError, RankError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.session import Session

Array = NDArray[Any]
T = TypeVar("T")


M = TypeVar("M", bound=Closing)


class Ranks(Closing, Generic[M]):
    """A member for every rank of a directory, all in this process, kept between runs.

    If a rank fails, all others end with it, and the group can no longer be used.

    Args:
        directory: The directory.
        kind: Session or Trainer. The members are made on all ranks at once.
        options: Further arguments of it.

    Attributes:
        manifest: The manifest.
        world: The ranks.
        members: The members, in the order of the ranks.

    Raises:
        OnnxparRuntimeError: As `kind`.
    """

    def __init__(
        self, directory: str | Path, kind: Callable[..., M], *, device: str = "cpu", **options: Any
    ) -> None:
        """Makes the members."""
        self.manifest = Manifest.load(directory)
        self.world = World.threads(self.manifest.devices)
        self._pool = ThreadPoolExecutor(self.manifest.devices, "onnxpar-rank")
        self._first: tuple[int, BaseException] | None = None
        self._lock = threading.Lock()
        self.members: list[M] = []
        options |= {"device": device, "manifest": self.manifest}
        try:
            self.members = self.each(
                lambda rank: kind(directory, rank=self.world.rank(rank), **options)
            )
        except BaseException:
            self.close()
            raise

    def each(self, action: Callable[[int], T]) -> list[T]:
        """Returns what `action` returns for each rank, all ranks running at the same time.

        Raises:
            OnnxparRuntimeError: The error of the first rank that failed, if all fail alike.
            RankError: Otherwise, with the message of the first rank that failed.
        """

        def guarded(rank: int) -> T:
            try:
                return action(rank)
            except BaseException as error:
                with self._lock:
                    if self._first is None:
                        self._first = (rank, error)
                if not getattr(error, "agreed", False):
                    self.world.abort(rank, _message(error))
                raise

        self._first = None
        futures: list[Future[T]] = [
            self._pool.submit(guarded, rank) for rank in range(self.manifest.devices)
        ]
        try:
            errors = [f.exception() for f in futures]
        except KeyboardInterrupt:
            self.world.abort(0, "interrupted")
            raise
        if self._first is None:
            return [f.result() for f in futures]
        rank, error = self._first
        if isinstance(error, RankError) or getattr(error, "agreed", False):
            raise error
        if isinstance(error, OnnxparRuntimeError) and all(type(e) is type(error) for e in errors):
            raise error
        code = error.exit_code if isinstance(error, OnnxparRuntimeError) else 1
        raise RankError(rank, _message(error), code) from error

    def on_each(self, action: Callable[[M], T]) -> list[T]:
        """Returns what `action` returns for each rank's member, as `each`."""
        return self.each(lambda rank: action(self.members[rank]))

    def counters(self) -> list[dict[str, OpCounter]]:
        """Returns every rank's counts of collective calls and bytes, by operator."""
        return [self.world.rank(r).counters() for r in range(self.manifest.devices)]

    def reset_counters(self) -> None:
        """Sets every rank's counts to zero."""
        for rank in range(self.manifest.devices):
            self.world.rank(rank).reset_counters()

    def close(self) -> None:
        """Frees members, threads and the world."""
        for member in self.members:
            member.close()
        self._pool.shutdown()
        self.world.close()


class ThreadsGroup(Ranks[Session]):
    """The sessions of all ranks of a directory; they are kept between runs.

    Args:
        directory: The directory.
        program: Which of its programs.
        device: As `Session`.
        ort_options: As `Session`.
        custom_ops: As `Session`.

    Raises:
        OnnxparRuntimeError: As `Session`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        program: str = "model",
        device: str = "cpu",
        ort_options: Mapping[str, str] | None = None,
        custom_ops: Sequence[str | Path] = (),
    ) -> None:
        """Loads the graphs of all ranks."""
        super().__init__(
            directory,
            Session,
            program=program,
            device=device,
            ort_options=ort_options,
            custom_ops=custom_ops,
        )

    def run_global(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the global outputs for global inputs, as `Session.run_global` on every rank.

        Raises:
            OnnxparRuntimeError: As `Session.run_global`.
        """
        result = self.on_each(lambda session: session.run_global(feeds))[0]
        if result is None:
            raise AssertionError("rank 0 returned no outputs")
        return result


def run_threads(
    directory: str | Path, feeds: Mapping[str, Array], **options: Any
) -> dict[str, Array]:
    """Returns the global outputs of one run of all ranks in this process.

    Args:
        directory: The directory.
        feeds: Global inputs.
        options: As `ThreadsGroup`.

    Raises:
        OnnxparRuntimeError: As `ThreadsGroup` and `Session.run_global`.
    """
    with ThreadsGroup(directory, **options) as group:
        return group.run_global(feeds)


def _message(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, RankError):
        return text.split(" | ", 1)[-1]
    return text if isinstance(error, OnnxparRuntimeError) else f"{type(error).__name__}: {text}"

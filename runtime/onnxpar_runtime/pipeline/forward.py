"""A program that runs forward through the stages of a pipeline, on one rank."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from onnxpar_format.entries import TensorEntry
from onnxpar_runtime.executor import Executor
from onnxpar_runtime.inputs import Feeds
from onnxpar_runtime.loader import Loader
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.pipeline.inbox import Inbox
from onnxpar_runtime.pipeline.work import FORWARD, Micro, VirtualStages
from onnxpar_runtime.without_padding import Values

Array = NDArray[Any]


class Forward:
    """A rank's programs of a forward program without states.

    Args:
        manifest: The manifest of a pipeline.
        program: Name of the program.
        loader: Makes the sessions.
        runs: As `Executor.expect`.

    Attributes:
        made: The program's outputs, and the stage that makes each.

    Raises:
        DirectoryError: The manifest has no such program, parts do not fit together, or a graph
            cannot be loaded.
        LaunchError: The device or an option cannot be used.
    """

    def __init__(
        self, manifest: Manifest, program: str, loader: Loader, runs: Sequence[Values] = ()
    ) -> None:
        """Loads the rank's graphs."""
        self._executors: dict[str, Executor] = {}
        self._inbox = Inbox(loader.rank)

        def load(name: str) -> Executor:
            self._executors[name] = Executor(manifest, name, loader, runs=runs)
            return self._executors[name]

        self._stages = VirtualStages(manifest, program, loader.rank, load, self._inbox)
        self.made: Mapping[TensorEntry, int] = self._stages.made

    def run(self, feeds: Feeds, counters: Mapping[str, int]) -> dict[str, Array]:
        """Returns local arrays of the outputs that this rank's stage makes.

        Every rank must call it.

        Args:
            feeds: This rank's part of the inputs.
            counters: Values of `onnxpar_format.entries.COUNTERS`.

        Raises:
            RankError: A rank failed.
        """
        micro = Micro(feeds, {}, counters["micro_batch"])
        (found,) = self._stages.run(FORWARD, [micro], counters)
        return found

    @property
    def bound_bytes(self) -> int:
        """Bytes of the bound inputs."""
        return sum(executor.bound_bytes for executor in self._executors.values())

    def close(self) -> None:
        """Frees the sessions."""
        self._inbox.close()
        for executor in self._executors.values():
            executor.close()

"""A decoder that runs through the stages of a pipeline: each rank runs the graphs of its stage.

Each stage has the states of its layers. Values go from stage to stage as those of any forward
program do; here the graphs run as they are bound to a batch.
"""

from collections.abc import Mapping, Sequence

from onnxpar_format.entries import COUNTERS
from onnxpar_runtime.executor import Executor
from onnxpar_runtime.generation.bound_graph import BoundGraph
from onnxpar_runtime.inputs import Feeds
from onnxpar_runtime.loader import Loader
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.pipeline.inbox import Inbox
from onnxpar_runtime.pipeline.work import FORWARD, Micro, VirtualStages
from onnxpar_runtime.run_values import Given, Results

_COUNTERS = dict.fromkeys(COUNTERS, 0)


class _Part:
    """A graph of the rank, which runs as a batch has bound it; a `pipeline.work.Part`."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.program, self.queue = executor, executor.program, executor.queue
        self.graph: BoundGraph | None = None

    def run_part(self, given: Given) -> Results:
        assert self.graph is not None, "`Stages.run` sets it"
        return Results({}, self.graph.run(given.handed))


class Stages:
    """A rank's graphs of a decoder in a pipeline.

    Args:
        manifest: The manifest of a pipeline.
        program: Name of the decoder.
        loader: Makes the sessions.

    Attributes:
        outputs: The stage that makes each output, by name.

    Raises:
        DirectoryError: Parts do not fit together, or a graph cannot be loaded.
        LaunchError: The device or an option cannot be used.
    """

    def __init__(self, manifest: Manifest, program: str, loader: Loader) -> None:
        """Loads the rank's graphs."""
        self._inbox = Inbox(loader.rank)
        self._parts: dict[str, _Part] = {}

        def load(name: str) -> _Part:
            self._parts[name] = _Part(Executor(manifest, name, loader))
            return self._parts[name]

        self._stages = VirtualStages(manifest, program, loader.rank, load, self._inbox)
        self.outputs = {spec.name: stage for spec, stage in self._stages.made.items()}

    @property
    def executors(self) -> tuple[Executor, ...]:
        """The rank's graphs, in their order."""
        return tuple(part.executor for part in self._parts.values())

    def run(self, graphs: Sequence[BoundGraph], values: Mapping[str, int]) -> None:
        """Runs all stages once; every rank must call it.

        Args:
            graphs: This rank's graphs, bound.
            values: Values of the symbols, equal on all ranks.

        Raises:
            RankError: A rank failed.
        """
        for graph in graphs:
            self._parts[graph.executor.program.name].graph = graph
        self._stages.run(FORWARD, [Micro(Feeds(dict(values), {}), {}, 0)], _COUNTERS)

    def close(self) -> None:
        """Ends what receives values; the sessions are not closed."""
        self._inbox.close()

"""One rank's program in onnxruntime, on its local arrays or on whole arrays."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from numpy.typing import NDArray

from onnxpar_format.entries import COUNTERS, ProgramEntry, TensorEntry
from onnxpar_format.trace import INPUT, STEP
from onnxpar_runtime.agree import agree, together
from onnxpar_runtime.errors import OnnxparRuntimeError
from onnxpar_runtime.executor import Executor
from onnxpar_runtime.gather import join_outputs
from onnxpar_runtime.inputs import Feeds, Inputs
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.memory import peak_bytes, weight_bytes
from onnxpar_runtime.opened import Opened, Opening
from onnxpar_runtime.pipeline.forward import Forward
from onnxpar_runtime.without_padding import Values

Array = NDArray[Any]


class Session(Opened):
    """One rank of a directory, ready to run.

    Args:
        directory: The directory.
        program: Which of its programs.
        measured: Whether to count the bytes that the rank holds, for `peak_bytes`; on the CPU only,
            and runs take longer.
        runs: As `onnxpar_runtime.executor.Executor.expect`.
        opening: How to open the directory, see `Opening`.

    Attributes:
        program: The program.
        counters: Seed, step and micro-batch, the keys of random numbers; all 0 at first. They must
            be equal on all ranks.

    Raises:
        DirectoryError: The directory is incomplete, or onnxruntime refuses the graph.
        LaunchError: The world does not have as many ranks as the directory has devices, or the
            device or an option cannot be used.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        program: str = "model",
        measured: bool = False,
        runs: Sequence[Values] = (),
        **opening: Unpack[Opening],
    ) -> None:
        """Loads the rank's graph."""
        super().__init__(directory, measured, **opening)
        self._runs: Executor | Forward
        self._made: Mapping[TensorEntry, int]
        self.program: ProgramEntry = self.manifest.program(program)
        pipeline = self.manifest.pipeline
        if pipeline is not None and program in pipeline.programs:
            self._runs = Forward(self.manifest, program, self._loader, runs)
            self._made = self._runs.made
        else:
            self._runs = Executor(self.manifest, program, self._loader, runs=runs)
            self._made = dict.fromkeys(self.program.outputs, 0)
        self._inputs = Inputs(self.manifest, program, self.rank.index)
        self.counters = dict.fromkeys(COUNTERS, 0)

    def run_global(self, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        """Runs the program on whole arrays; every rank must call it with the same arrays.

        Args:
            feeds: Whole array of every input.

        Returns:
            On rank 0 the whole array of every output, on other ranks None.

        Raises:
            InputError: An input is missing, unknown, of the wrong dtype or shape, or its sizes do
                not fit those of another.
            SymbolValueError: A symbol's value violates its constraint, or ranks disagree.
            RankError: Another rank cannot go on; raised by all ranks.
        """
        timeline = self.rank.timeline
        with timeline.span(STEP, "run"):
            with timeline.span(INPUT, "shard the inputs"):
                inputs = self._agreed(lambda: self._inputs.shard_inputs(feeds))
            parts = self._runs.run(inputs, self.counters)
            self._check_values()
            with timeline.span("output", "gather the outputs"):
                return together(
                    self.rank,
                    lambda: join_outputs(
                        self.rank, self.manifest, self._made, parts, inputs.values
                    ),
                )

    def run(
        self, feeds: Mapping[str, Array], symbols: Mapping[str, int] | None = None
    ) -> dict[str, Array]:
        """Runs the program on this rank's shards; every rank must call it.

        Args:
            feeds: Local array of every input, padding included.
            symbols: Global values of the symbols. Without them they follow from the local shapes of
                dims that are replicated, or that the constraint lets every sharding divide evenly.

        Returns:
            Local array of every output, padding included; in a pipeline, of those that this rank's
            stage makes.

        Raises:
            InputError: An input is missing, unknown, or of the wrong dtype or local shape.
            SymbolValueError: A symbol has no value, violates its constraint, or ranks disagree.
            RankError: Another rank cannot go on; raised by all ranks.
        """
        inputs = self._agreed(lambda: self._inputs.local_inputs(feeds, symbols))
        parts = self._runs.run(inputs, self.counters)
        self._check_values()
        return parts

    def peak_bytes(self, *, reset: bool = False) -> int:
        """Returns the most bytes that this rank held at a time: inputs, values, weights.

        Args:
            reset: Begin a new peak, at what is held now.

        Raises:
            LaunchError: The session was not made with `measured`.
        """
        bound = self._runs.bound_bytes + weight_bytes(self.manifest, self.rank.index)
        return peak_bytes(self._loader.memory, bound, reset=reset)

    def _agreed(self, make: Callable[[], Feeds]) -> Feeds:
        inputs = Feeds({}, {})
        error: OnnxparRuntimeError | None = None
        try:
            inputs = make()
        except OnnxparRuntimeError as caught:
            error = caught
        agree(self.rank, error, inputs.values, common_symbols(self.manifest))
        return inputs

    def close(self) -> None:
        """Frees the session, and the world of one rank if it made one."""
        self._runs.close()
        super().close()


def common_symbols(manifest: Manifest) -> list[str]:
    """Returns the symbols that have one value on all ranks."""
    return [name for name, symbol in sorted(manifest.symbols.items()) if not symbol.per_rank]

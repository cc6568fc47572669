"""One rank's program in onnxruntime, on its local arrays or on global arrays."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from onnxpar_format.entries import COUNTERS, ProgramEntry, TensorEntry
from onnxpar_runtime.agree import agree, together
from onnxpar_runtime.closing import Closing
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.devices import Device
from onnxpar_runtime.errors import LaunchError, OnnxparRuntimeError
from onnxpar_runtime.executor import Executor, Loader
from onnxpar_runtime.gather import join_outputs
from onnxpar_runtime.inputs import Feeds, Inputs
from onnxpar_runtime.launch import ranks_in_words
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.memory import peak_bytes, weight_bytes
from onnxpar_runtime.pipeline.forward import Forward

Array = NDArray[Any]


class Session(Closing):
    """One rank of a directory, ready to run.

    Args:
        directory: The directory.
        program: Which of its programs.
        rank: The rank, of a world with as many ranks as the directory has devices. Without one, the
            directory must be for one device.
        device: `auto` (the device that `init` chose, else CUDA if it can be used), `cpu`, `cuda` or
            `cuda:NUMBER`.
        ort_options: Options of onnxruntime, see `onnxpar_runtime.options.session_options`.
        custom_ops: Further custom-op libraries that the model needs.
        manifest: The manifest, if it has already been read.
        measured: Whether to count the bytes that the rank holds, for `peak_bytes`; on the CPU only,
            and runs take longer.

    Attributes:
        manifest: The manifest.
        program: The program.
        rank: The rank.
        device: The kind of device.
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
        rank: Rank | None = None,
        device: str = "auto",
        ort_options: Mapping[str, str] | None = None,
        custom_ops: Sequence[str | Path] = (),
        manifest: Manifest | None = None,
        measured: bool = False,
    ) -> None:
        """Loads the rank's graph."""
        self.manifest = manifest or Manifest.load(directory)
        self._own_world, self.rank = own_rank(self.manifest, rank)
        self._loader = Loader(self.rank, device, ort_options, custom_ops, measured)
        self._runs: Executor | Forward
        self._made: Mapping[TensorEntry, int]
        self.program: ProgramEntry = self.manifest.program(program)
        pipeline = self.manifest.pipeline
        if pipeline is not None and program in pipeline.programs:
            self._runs = Forward(self.manifest, program, self._loader)
            self._made = self._runs.made
        else:
            self._runs = Executor(self.manifest, program, self._loader)
            self._made = dict.fromkeys(self.program.outputs, 0)
        self._inputs = Inputs(self.manifest, program, self.rank.index)
        self.device: Device = self._loader.device
        self.counters = dict.fromkeys(COUNTERS, 0)

    def run_global(self, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        """Runs the program on global arrays; every rank must call it with the same arrays.

        Args:
            feeds: Global array of every input.

        Returns:
            On rank 0 the global array of every output, on other ranks None.

        Raises:
            InputError: An input is missing, unknown, of the wrong dtype or shape, or its sizes do
                not fit those of another.
            SymbolValueError: A symbol's value violates its constraint, or ranks disagree.
            RankError: Another rank cannot go on; raised by all ranks.
        """
        inputs = self._agreed(lambda: self._inputs.shard_inputs(feeds))
        parts = self._runs.run(inputs, self.counters)
        return together(
            self.rank,
            lambda: join_outputs(self.rank, self.manifest, self._made, parts, inputs.values),
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
        return self._runs.run(inputs, self.counters)

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
        self._loader.close()
        if self._own_world is not None:
            self._own_world.close()


def own_rank(manifest: Manifest, rank: Rank | None) -> tuple[World | None, Rank]:
    """Returns the rank, with a world of one rank made for it where none is given.

    Raises:
        LaunchError: The world does not have as many ranks as the directory has devices.
    """
    size = 1 if rank is None else rank.world.size
    if size != manifest.devices:
        raise LaunchError(wrong_size(manifest, size))
    if rank is not None:
        return None, rank
    world = World.threads(1)
    return world, world.rank(0)


def common_symbols(manifest: Manifest) -> list[str]:
    """Returns the symbols that have one value on all ranks."""
    return [name for name, symbol in sorted(manifest.symbols.items()) if not symbol.per_rank]


def wrong_size(manifest: Manifest, size: int) -> str:
    """Returns the message for a world whose size is not the directory's device count."""
    return (
        f"{manifest.directory} was made for {ranks_in_words(manifest.devices)}, got {size}: start "
        f"it with `mpirun -n {manifest.devices} …`"
    )

"""One rank's program in onnxruntime, on its local arrays or on whole arrays, cut and joined.

The rank's graph is an ordinary ONNX file. The session binds the collective library to its rank,
fills the system inputs (global values of symbols, mesh coordinates), and keeps one IO binding for
each set of shapes, so that a repeated step neither allocates nor copies on the device.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from onnxpar_runtime.agree import agree, together
from onnxpar_runtime.boxes import coordinates
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.data import convert
from onnxpar_runtime.errors import (
    ArtifactError,
    InputError,
    LaunchError,
    OnnxparRuntimeError,
    RankError,
    SymbolValueError,
)
from onnxpar_runtime.expressions import ExpressionError, UnknownSymbolError
from onnxpar_runtime.gather import gather_to_root
from onnxpar_runtime.manifest import COUNTERS, Manifest, Program, TensorSpec
from onnxpar_runtime.options import CUDA, Device, choose_device, providers, session_options
from onnxpar_runtime.shapes import (
    bind_local_symbols,
    bind_symbols,
    check_equal_sizes,
    check_symbols,
)
from onnxpar_runtime.tensors import to_host, to_ort

log = logging.getLogger(__name__)
Array = NDArray[Any]
_MAX_BINDINGS = 8


@dataclass
class _Binding:
    """An IO binding for one set of input shapes: its outputs keep their buffers."""

    io: Any
    reusable: bool
    inputs: dict[str, Any] = field(default_factory=dict)


class Session:
    """One rank of an artifact directory, ready to run.

    Args:
        directory: The artifact directory.
        program: Which of its programs.
        rank: The rank, of a world with as many ranks as the artifact has devices. Without one, the
            artifact must be for one device.
        device: `auto` (CUDA where it can be used), `cpu` or `cuda`.
        ort_options: Options of onnxruntime, see `onnxpar_runtime.options.session_options`.
        custom_ops: Further custom-op libraries that the model needs.
        manifest: The manifest, if it has been read already.

    Attributes:
        manifest: The manifest.
        program: The program.
        rank: The rank.
        device: Where it computes.
        counters: Seed, step and micro-batch that random numbers are keyed by, all 0 at first; every
            rank of a run must have the same.

    Raises:
        ArtifactError: The directory is incomplete, or onnxruntime refuses the graph.
        LaunchError: The world does not have as many ranks as the artifact has devices, or the
        device
            or an option cannot be used.
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
    ) -> None:
        """Loads the rank's graph."""
        self.manifest = manifest or Manifest.load(directory)
        self.program: Program = self.manifest.program(program)
        size = 1 if rank is None else rank.world.size
        if size != self.manifest.devices:
            raise LaunchError(wrong_size(self.manifest, size))
        self._own_world: World | None = None
        if rank is None:
            self._own_world = World.threads(1)
            rank = self._own_world.rank(0)
        self.rank: Rank = rank
        pairs = dict(ort_options or {})
        self.device = choose_device(device)
        path = self.manifest.graph_path(program, self.rank.index)
        self._session = self._load(path, pairs, custom_ops, strict=device == "cuda")
        self._specs = {spec.name: spec for spec in self.program.inputs}
        self._graph_inputs = {i.name for i in self._session.get_inputs()}
        self._output_names = [o.name for o in self._session.get_outputs()]
        self._check_graph(path)
        coords = coordinates(self.rank.index, self.manifest.atoms)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._coordinates = {
            s.name: coords[s.atom] for s in self.program.system_inputs if s.atom is not None
        }
        self._bindings: OrderedDict[tuple[Any, ...], _Binding] = OrderedDict()
        log.info(
            "rank %d of %d: %s on %s", self.rank.index, self.manifest.devices, path, self.device
        )

    def _load(
        self, path: Path, pairs: dict[str, str], custom_ops: Sequence[str | Path], strict: bool
    ) -> Any:
        options = session_options(pairs)
        self.rank.register(options)
        for library in custom_ops:
            if not Path(library).is_file():
                raise LaunchError(f"custom-op library {library}: no such file")
            try:
                options.register_custom_ops_library(str(library))
            except Exception as error:
                raise LaunchError(f"custom-op library {library}: {_first_line(error)}") from None
        if self.device is Device.CUDA:
            onnxruntime.preload_dlls()
        wanted, self._index = providers(self.device, self.rank.index, pairs)
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=wanted)
        except Exception as error:
            # onnxruntime has no common base class for what it raises.
            raise ArtifactError(
                f"{path}: onnxruntime cannot load it: {_first_line(error)}"
            ) from None
        if self.device is Device.CUDA and CUDA not in session.get_providers():
            message = "device cuda: onnxruntime could not start its CUDA provider"
            if strict:
                raise LaunchError(message)
            log.warning("%s; the CPU is used", message)
            self.device = Device.CPU
        return session

    def _check_graph(self, path: Path) -> None:
        outputs = {spec.name for spec in self.program.outputs}
        system = {s.name for s in self.program.system_inputs}
        unknown = sorted(self._graph_inputs - set(self._specs) - system)
        absent = sorted(outputs - set(self._output_names))
        if unknown or absent:
            raise ArtifactError(
                f"{path}: does not match its manifest: inputs {unknown} are not in the manifest, "
                f"outputs {absent} are not in the graph"
            )

    # -- whole arrays ----------------------------------------------------------------------------

    def run_global(self, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        """Runs the program on whole arrays; every rank must call it with the same arrays.

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
        values: dict[str, int] = {}
        local: dict[str, Array] = {}
        error: OnnxparRuntimeError | None = None
        try:
            values, local = self.cut_inputs(feeds)
        except OnnxparRuntimeError as caught:
            error = caught
        self._agree(error, values)
        outputs = self._execute(local, values)
        return together(self.rank, lambda: self._join(outputs, values))

    def cut_inputs(self, feeds: Mapping[str, Array]) -> tuple[dict[str, int], dict[str, Array]]:
        """Returns the symbols' values and this rank's part of every input, padded with zeros."""
        arrays = convert(self.program.inputs, feeds)
        values = bind_symbols(self.program.inputs, {n: a.shape for n, a in arrays.items()})
        check_symbols(self.manifest.symbols, values)
        check_equal_sizes(self.program, values)
        local = {
            # Not ascontiguousarray, which gives a scalar a dim.
            name: np.asarray(
                self._cut(self._specs[name], values).take(a, self.rank.index), order="C"
            )
            for name, a in arrays.items()
        }
        return values, local

    def _cut(self, spec: TensorSpec, values: Mapping[str, int], local: Any = None) -> Any:
        try:
            return spec.cut(self.manifest.atoms, values, local)
        except ExpressionError as error:
            raise ArtifactError(
                f"{self.manifest.directory}: sharding of {spec.name!r}: {error}"
            ) from None

    def _join(
        self, outputs: Mapping[str, Array], values: Mapping[str, int]
    ) -> dict[str, Array] | None:
        whole: dict[str, Array] = {}
        for spec in self.program.outputs:
            part = outputs[spec.name]
            cut = self._cut(spec, values, part.shape)
            array = gather_to_root(self.rank, cut, part)
            if array is not None:
                whole[spec.name] = array
        return whole if self.rank.index == 0 else None

    # -- local arrays ----------------------------------------------------------------------------

    def run(
        self, feeds: Mapping[str, Array], symbols: Mapping[str, int] | None = None
    ) -> dict[str, Array]:
        """Runs the program on this rank's parts; every rank must call it.

        Args:
            feeds: Local array of every input, padding included.
            symbols: Global values of the symbols. Without them they are read off the local shapes,
                which works for whole dims and for splits that the constraint makes even.

        Returns:
            Local array of every output, padding included.

        Raises:
            InputError: An input is missing, unknown, or of the wrong dtype or local shape.
            SymbolValueError: A symbol has no value, violates its constraint, or ranks disagree.
            RankError: Another rank cannot go on; raised by all ranks.
        """
        values: dict[str, int] = {}
        local: dict[str, Array] = {}
        error: OnnxparRuntimeError | None = None
        try:
            local = convert(self.program.inputs, feeds)
            values = self._local_symbols(local, symbols)
            self._check_local(local, values)
        except OnnxparRuntimeError as caught:
            error = caught
        self._agree(error, values)
        return self._execute(local, values)

    def _local_symbols(
        self, local: Mapping[str, Array], symbols: Mapping[str, int] | None
    ) -> dict[str, int]:
        shapes = {name: a.shape for name, a in local.items()}
        if symbols is None:
            values = bind_local_symbols(
                self.program.inputs, shapes, self.manifest.atoms, self.manifest.symbols
            )
        else:
            values = {name: int(value) for name, value in symbols.items()}
        check_symbols(self.manifest.symbols, values)
        check_equal_sizes(self.program, values)
        for entry in self.program.system_inputs:
            if entry.symbol is not None and entry.symbol not in values:
                raise SymbolValueError(
                    f"symbol {entry.symbol!r} has no value: local shapes do not tell the size of a "
                    "dim that may be split unevenly, pass `symbols`"
                )
        return values

    def _check_local(self, local: Mapping[str, Array], values: Mapping[str, int]) -> None:
        for name, array in local.items():
            try:
                expected = self._specs[name].cut(self.manifest.atoms, values).local_shape
            except UnknownSymbolError:
                continue  # without the symbol's value there is nothing to compare with
            if array.shape != expected:
                raise InputError(
                    f"input {name!r}: expected the local shape {expected}, got {array.shape}"
                )

    def _agree(self, error: OnnxparRuntimeError | None, values: Mapping[str, int]) -> None:
        names = [n for n, symbol in sorted(self.manifest.symbols.items()) if not symbol.per_rank]
        agree(self.rank, error, values, names)

    # -- onnxruntime -----------------------------------------------------------------------------

    def _execute(self, local: Mapping[str, Array], values: Mapping[str, int]) -> dict[str, Array]:
        feeds = {name: a for name, a in local.items() if name in self._graph_inputs}
        for entry in self.program.system_inputs:
            if entry.name in self._graph_inputs:
                if entry.symbol is not None:
                    number = values[entry.symbol]
                elif entry.counter is not None:
                    number = self.counters[entry.counter]
                else:
                    number = self._coordinates[entry.name]
                feeds[entry.name] = np.array([number], np.int64)
        key = (tuple(sorted(values.items())), *((n, a.shape) for n, a in sorted(feeds.items())))
        binding = self._bindings.pop(key, None) or self._bind(values)
        self._bindings[key] = binding
        while len(self._bindings) > _MAX_BINDINGS:
            self._bindings.popitem(last=False)
        self._feed(binding, feeds)
        if not binding.reusable:
            self._bind_outputs(binding)
        try:
            self._session.run_with_iobinding(binding.io)
        except Exception as error:
            del self._bindings[key]
            raise RankError(self.rank.index, _first_line(error)) from error
        results = zip(self._output_names, binding.io.get_outputs(), strict=True)
        return {name: to_host(value) for name, value in results}

    def _bind(self, values: Mapping[str, int]) -> _Binding:
        """Returns a new binding. Its output buffers are kept where the shapes alone fix theirs."""
        reusable = True
        for spec in self.program.outputs:
            try:
                spec.cut(self.manifest.atoms, values)
            except ExpressionError:
                reusable = False
        binding = _Binding(self._session.io_binding(), reusable)
        self._bind_outputs(binding)
        return binding

    def _bind_outputs(self, binding: _Binding) -> None:
        binding.io.clear_binding_outputs()
        for name in self._output_names:
            binding.io.bind_output(name, self.device.value, self._index)

    def _feed(self, binding: _Binding, feeds: Mapping[str, Array]) -> None:
        """Binds the inputs: on the CPU the arrays themselves, on a GPU a buffer that is kept."""
        for name, array in feeds.items():
            kept = binding.inputs.get(name)
            if kept is not None and kept.device_name() != "cpu":
                kept.update_inplace(array)
                continue
            # Sizes and coordinates are read by shape arithmetic, which runs on the CPU everywhere.
            value = to_ort(array, self.device.value if name in self._specs else "cpu", self._index)
            binding.inputs[name] = value
            binding.io.bind_ortvalue_input(name, value)

    def close(self) -> None:
        """Frees the session, and the world of one rank if it made one."""
        self._bindings.clear()
        self._session = None
        if self._own_world is not None:
            self._own_world.close()

    def __enter__(self) -> "Session":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the session."""
        self.close()


def wrong_size(manifest: Manifest, size: int) -> str:
    """Returns the message for a world whose size is not the artifact's device count."""
    return (
        f"{manifest.directory} was cut for {manifest.devices} ranks, got {size}: start it with "
        f"`mpirun -n {manifest.devices} …`"
    )


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 2000 else text[:2000] + " …"

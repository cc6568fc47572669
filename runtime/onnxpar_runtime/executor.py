"""One rank's graph of one program in onnxruntime: loading, binding, running.

The rank's graph is an ordinary ONNX file. This module fills system inputs (global values of
symbols, mesh coordinates, counters, hyperparameters), and binds states to buffers that outlive the
run. One IO binding is kept for each set of shapes, so that a repeated step neither allocates nor
copies on the device.
"""

import functools
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxpar_format.boxes import coordinates
from onnxpar_format.entries import ProgramEntry, SystemInput
from onnxpar_format.expressions import ExpressionError
from onnxpar_format.manifest import TRANSIENT
from onnxpar_format.padding_mark import PaddingMark
from onnxpar_format.trace import PROGRAM
from onnxpar_runtime.added_up import add_up
from onnxpar_runtime.captured import FIXED, obstacle, read_anew
from onnxpar_runtime.cuda import Staged, copy_in
from onnxpar_runtime.errors import DirectoryError, RankError, first_line
from onnxpar_runtime.exposed_graph import read_graph
from onnxpar_runtime.inputs import Feeds
from onnxpar_runtime.loader import Loader
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.run_values import ACCUMULATE, ALONE, FIRST, LOSS_WEIGHT, Given, Results
from onnxpar_runtime.tensors import bind_input, empty, to_host, to_ort
from onnxpar_runtime.without_padding import Values, leave_out, needless

log = logging.getLogger(__name__)
Array = NDArray[Any]
_MAX_BINDINGS = 8
_MAX_CAPTURES = 64
"""CUDA graphs of a program, each for one set of sizes and memory."""
_ON_GPU = "Cuda"  # onnxruntime's name of a GPU's memory


class StateMemory(Protocol):
    """The memory of states."""

    def value(self, name: str) -> Any:
        """Returns the OrtValue of a state, always the same object."""


@dataclass
class _Number:
    """A system input of a binding.

    Attributes:
        entry: Its entry in the manifest.
        memory: Its value on the host, which onnxruntime reads at every run.
        on_gpu: Whether onnxruntime reads it on the GPU instead.
        differs: Whether the value may differ between the runs of a binding.
        sent: The value that the GPU has; None before the first.
    """

    entry: SystemInput
    memory: Array
    on_gpu: bool
    differs: bool
    sent: Array | None = None


@dataclass
class _Binding:
    """An IO binding for one set of input shapes: its outputs keep their buffers."""

    io: Any
    # The inputs that the graph reads.
    names: tuple[str, ...]
    reusable: bool
    options: Any
    # Whether its next run is captured as a CUDA graph; later runs replay it.
    captures: bool = False
    # Inputs that onnxruntime reads on the host, and the memory of those that it reads on the GPU.
    host_inputs: dict[str, Array] = field(default_factory=dict)
    gpu_inputs: dict[str, Any] = field(default_factory=dict)
    # The buffers of the outputs that are not states, once a run has made them.
    outputs: list[Any] = field(default_factory=list)
    system: list[_Number] = field(default_factory=list)


class Executor:
    """One rank's graph of one program.

    Args:
        manifest: The manifest.
        program: Name of the program.
        loader: Makes the session.
        buffers: The memory of the program's states.
        runs: As `expect`.
        several: As `expect`.

    Attributes:
        manifest: The manifest.
        program: The program.
        rank: The rank.
        device: The kind of device.
        queue: The streams of the GPU; None on the CPU.
        session: onnxruntime's session.
        graph_inputs: Names of the graph's inputs.
        on_gpu: Those that onnxruntime reads on the GPU.
        made_on_gpu: Names of the outputs that it makes there.
        obstacle: Why runs are not captured as CUDA graphs; None if they are, or need not be.

    Raises:
        DirectoryError: The graph was not written, does not match its manifest, or onnxruntime
            refuses it.
        LaunchError: The device or an option cannot be used.
    """

    def __init__(
        self,
        manifest: Manifest,
        program: str,
        loader: Loader,
        buffers: StateMemory | None = None,
        runs: Sequence[Values] = (),
        several: bool = False,
    ) -> None:
        """Loads the rank's graph."""
        self.manifest = manifest
        self.program: ProgramEntry = manifest.program(program)
        self.rank = loader.rank
        self._path = manifest.graph_path(program, self.rank.index)
        self.loader, self.queue = loader, loader.queue
        self.device, self._index = loader.device, loader.index
        self._buffers = buffers
        self._states = {o.name: o.state for o in self.program.state_outputs}
        self._sums = manifest.training.sums if manifest.training else {}
        self._handed = {v.name for v in self.program.handed_out} | manifest.supplying(program)
        self._coordinates = coordinates(self.rank.index, manifest.atoms)
        # By sizes and mode. Runs of a binding need no other nodes than its first: to load a graph
        # drops all bindings.
        self._bindings: OrderedDict[tuple[Any, ...], _Binding] = OrderedDict()
        self._captures = count()
        self._saved = self._writes_saved_states()
        # Whether the graph adds up gradients, and whether the one that is loaded does.
        self._adds = any(entry.kind == ACCUMULATE for entry in self.program.system_inputs)
        self._several = self._adds and several
        model, self._left_out = self._model(runs)
        self._load(model)
        log.info(
            "rank %d of %d: %s on %s", self.rank.index, manifest.devices, self._path, self.device
        )

    def expect(self, runs: Sequence[Values], *, several: bool | None = None) -> None:
        """Says what runs will come: nodes that they do not need are left out.

        These are nodes that set padding where no run has any, and nodes that add up gradients. Any
        other run may come, too; then all nodes are there from then on.

        Args:
            runs: The values of symbols in each run; none if they are not known.
            several: Whether steps have several micro-batches; None for as before.

        Raises:
            DirectoryError: As of the constructor.
        """
        before = self._left_out, self._several
        self._several = self._several if several is None else self._adds and several
        model, self._left_out = self._model(runs)
        if (self._left_out, self._several) != before:
            self._load(model)

    def _model(
        self, runs: Sequence[Values]
    ) -> tuple[onnx.ModelProto | None, frozenset[PaddingMark]]:
        """The graph to load, None for that in the file; and the marks of what is left out of it."""
        watch, path, marks = self.loader.watch, self._path, frozenset[PaddingMark]()
        if not (runs or self._adds or watch is not None):
            return None, marks
        model = read_graph(path)
        if self._adds:
            add_up(model.graph, several=self._several)
        if watch is not None:
            watch.expose(model.graph, self.program)
        elif runs:
            marks = needless(path, model.graph, runs)
            leave_out(path, model.graph, marks)
        return model if marks or self._adds or watch is not None else None, marks

    def _load(self, model: onnx.ModelProto | None) -> None:
        """Makes the session of a graph, in place of one that there may be."""
        self.close()
        loader, path = self.loader, self._path
        self.obstacle = obstacle(self.manifest, self.program) if loader.graphs else None
        wanted = loader.graphs and self.obstacle is None
        self.session, self._graphs = loader.load(path, wanted, model)
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self.graph_inputs = {i.name for i in inputs}
        places = zip(inputs, self.session.get_input_memory_infos(), strict=True)
        self.on_gpu = {i.name for i, place in places if place.name == _ON_GPU}
        places = zip(outputs, self.session.get_output_memory_infos(), strict=True)
        if wanted and not self._graphs:
            self.obstacle = "some of its nodes run on the host"
        elif wanted and read_anew(self.program, self.graph_inputs - self.on_gpu):
            self.obstacle = "it reads some of its inputs on the host"
        if self.obstacle is not None:
            log.warning("%s: is not captured as a CUDA graph: %s", path, self.obstacle)
        self.made_on_gpu = {o.name for o, place in places if place.name == _ON_GPU}
        outputs = [o.name for o in outputs]
        self._check_graph(path, set(outputs))
        self._made = [name for name in outputs if name not in self._states]
        specs = {spec.name for spec in self.program.outputs}
        # Each output's place among those that are not states.
        numbered = list(enumerate(self._made))
        self._data = [(n, i) for i, n in numbered if n in specs or n not in self._handed]
        self._to_hand = [(n, i) for i, n in numbered if n in self._handed]
        self._taken = [v.name for v in self.program.handed_in if v.name in self.graph_inputs]
        self._outputs = outputs

    def _check_graph(self, path: Path, found: set[str]) -> None:
        program = self.program
        added = set(self._sums.values()) if self._several else ()
        written = {name for name, state in self._states.items() if state not in added}
        outputs = {spec.name for spec in program.outputs} | written | self._handed
        known = {spec.name for spec in program.inputs} | set(program.state_inputs)
        known |= {entry.name for entry in program.system_inputs}
        known |= {value.name for value in program.handed_in}
        unknown = sorted(self.graph_inputs - known)
        absent = sorted(outputs - found)
        if unknown or absent:
            raise DirectoryError(
                f"{path}: does not match its manifest: inputs {unknown} are not in the manifest, "
                f"outputs {absent} are not in the graph"
            )

    def _writes_saved_states(self) -> bool:
        """Whether a run writes states that checkpoints hold, which may be being copied."""
        training = self.manifest.training
        states = {} if training is None else training.states
        return any(states[s].kind not in TRANSIENT for s in self._states.values() if s in states)

    def stage(self, feeds: Feeds) -> Feeds:
        """Begins to copy inputs to the program's device, and returns them.

        May be called from another thread while the program runs.
        """
        queue = self.queue
        if queue is None:
            return feeds
        local = {
            name: array
            if isinstance(array, Staged) or name not in self.on_gpu
            else queue.stage(array)
            for name, array in feeds.local.items()
        }
        return Feeds(feeds.values, local)

    def run(
        self,
        feeds: Feeds,
        counters: Mapping[str, int],
        numbers: Mapping[str, float] | None = None,
        *,
        read: bool = True,
    ) -> dict[str, Array]:
        """Runs the program; states are read and written in their buffers.

        Args:
            feeds: The inputs.
            counters: As `Given`.
            numbers: As `Given`.
            read: Copy the outputs to the host. Otherwise a GPU is not waited for.

        Returns:
            Local array of every output that is not a state, padding included; empty unless `read`.

        Raises:
            RankError: onnxruntime failed on this rank, or another rank did.
            KeyError: A number that the program reads is missing.
        """
        return dict(self.run_part(Given(feeds, counters, numbers or {}), read=read).data)

    def run_part(self, given: Given, *, read: bool = True) -> Results:
        """Runs the program of a stage, as `run` does.

        Args:
            given: What the program takes.
            read: As `run`.

        Raises:
            RankError: As `run`.
            KeyError: As `run`; or a value is missing.
        """
        feeds = given.feeds
        mode = int(given.numbers.get(ACCUMULATE, ALONE))
        key = feeds.key, mode
        binding = self._bindings.get(key) or self._new_binding(key, feeds, mode)
        self._bindings.move_to_end(key)
        self._feed(binding, feeds.local)
        for name in self._taken:
            binding.io.bind_ortvalue_input(name, given.handed[name])
        self._number(binding, given.counters, given.numbers)
        if self.queue is not None and self._saved:
            self.queue.before_writing()
        if not binding.reusable:
            binding.outputs.clear()
            self._bind_outputs(binding)
        with self.rank.timeline.span(PROGRAM, self.program.name, sizes=feeds.values):
            try:
                if binding.captures:
                    self._capture(binding)
                self.session.run_with_iobinding(binding.io, binding.options)
            except Exception as error:
                if self.queue is None:
                    # Collectives in the background still use the memory of the run's tensors. Their
                    # own errors come from this one.
                    with suppress(RankError):
                        self.rank.settle()
                del self._bindings[key]
                raise RankError(self.rank.index, first_line(error)) from error
            if read or self._handed:
                # Values are sent only when they are complete, so that the receiver's time limit
                # begins then.
                self.loader.synchronize()
        if not binding.outputs:
            # Outputs that are not states were bound first.
            binding.outputs = binding.io.get_outputs()[: len(self._made)]
        made = binding.outputs
        results = Results(
            {name: to_host(made[place]) for name, place in self._data} if read else {},
            {name: made[place] for name, place in self._to_hand},
        )
        if self.loader.kept is not None or self.loader.watch is not None:
            self._show(dict(zip(self._made, made, strict=True)))
        self._let_go(binding)
        return results

    def _new_binding(self, key: tuple[Any, ...], feeds: Feeds, mode: int) -> _Binding:
        """Makes and keeps the binding of a run, after loading the nodes that it needs."""
        padded = not all(mark.needless(feeds.values) for mark in self._left_out)
        if padded or (mode and not self._several):
            self.expect((), several=bool(mode) or self._several)
        if self._several and mode == ALONE:
            mode = FIRST
        binding = self._bindings[key] = self._bind(feeds, mode)
        while len(self._bindings) > _MAX_BINDINGS:
            self._bindings.popitem(last=False)
        return binding

    def _show(self, made: Mapping[str, Any]) -> None:
        """Hands what a run has made to those who look at it."""
        if self.loader.kept is not None:
            self.loader.kept |= {name: to_host(value) for name, value in made.items()}
        if self.loader.watch is not None:
            self.loader.watch.look(self.program, made)

    def _capture(self, binding: _Binding) -> None:
        """Has onnxruntime capture a run, and restores the states afterwards.

        onnxruntime runs the program several times: to allocate memory, to capture, and to replay.
        States that the program reads and writes would be updated each time.
        """
        read = {self._sums.get(name, name) for name in self.program.state_inputs}
        both = sorted(read.intersection(self._states.values()))
        self.loader.synchronize()
        kept = {name: to_host(self._state(name)) for name in both}
        self.session.run_with_iobinding(binding.io, binding.options)
        self.loader.synchronize()
        for name, array in kept.items():
            copy_in(self._state(name).data_ptr(), array)
        binding.captures = False

    def _number(
        self, binding: _Binding, counters: Mapping[str, int], numbers: Mapping[str, float]
    ) -> None:
        """Writes the system inputs of a run."""
        for number in binding.system:
            entry, memory = number.entry, number.memory
            if number.differs:
                if entry.counter is not None:
                    memory[...] = counters[entry.key]
                elif entry.kind == LOSS_WEIGHT:
                    memory[...] = numbers[entry.key]
                elif entry.hyperparameter is not None:
                    memory[...] = numbers[entry.hyperparameter]
                else:
                    memory[...] = int(numbers.get(entry.kind, 0))
            if number.on_gpu and (number.sent is None or not np.array_equal(number.sent, memory)):
                self._put(binding, entry.name, memory)
                number.sent = memory.copy()

    def _let_go(self, binding: _Binding) -> None:
        """Drops the references to values of other programs, so that their memory can be freed."""
        for name in self._taken:
            binding.io.bind_ortvalue_input(name, _nothing())
        for name in self._handed:
            self._bind_made(binding, name)
        if self._handed:
            binding.outputs.clear()

    def _bind(self, feeds: Feeds, mode: int) -> _Binding:
        """Returns a new binding for runs of the same sizes and mode.

        It keeps output buffers whose sizes follow from the shapes.
        """
        reusable, values = True, feeds.values
        for spec in self.program.outputs:
            try:
                spec.sharding(self.manifest.atoms, values)
            except ExpressionError:
                reusable = False
        captured = self.capture() if reusable and self.captures else None
        options = self.loader.run_options(None) if captured is None else captured
        names = tuple(name for name in feeds.local if name in self.graph_inputs)
        io = self.session.io_binding()
        binding = _Binding(io, names, reusable, options, captured is not None)
        for name in self.program.state_inputs:
            if name in self.graph_inputs:
                binding.io.bind_ortvalue_input(name, self._state(self._sums.get(name, name)))
        for entry in self.program.system_inputs:
            if entry.name in self.graph_inputs:
                memory = self.system_memory(entry, values)
                # Of the kinds in `FIXED`, only `ACCUMULATE` is part of a binding's key.
                differs = entry.symbol is None and entry.atom is None and entry.kind != ACCUMULATE
                if entry.kind == ACCUMULATE:
                    memory[...] = mode
                number = _Number(entry, memory, entry.name in self.on_gpu, differs)
                if differs or number.on_gpu:
                    binding.system.append(number)
                if not number.on_gpu:
                    self._bind_array(binding, entry.name, memory)
        self._bind_outputs(binding)
        return binding

    @property
    def captures(self) -> bool:
        """Whether runs that repeat can be captured as CUDA graphs."""
        return self._graphs and self.obstacle is None

    def capture(self) -> Any | None:
        """Returns options of a run that is captured, and of those that replay it.

        They are for one set of sizes and memory. onnxruntime keeps all that it has captured, so
        there are not more than a number of them; then it is None.
        """
        number = next(self._captures)
        if number < _MAX_CAPTURES:
            return self.loader.run_options(number)
        if number == _MAX_CAPTURES:
            log.warning(
                "program %r: runs of %d kinds have been captured as CUDA graphs; others are not",
                self.program.name,
                number,
            )
        return None

    def system_memory(self, entry: SystemInput, values: Mapping[str, int]) -> Array:
        """Returns new memory for a system input, with its value if that is a size or a place."""
        if entry.symbol is not None:
            return np.array([values[entry.symbol]], np.int64)
        if entry.atom is not None:
            return np.array([self._coordinates[entry.atom]], np.int64)
        if entry.counter is not None or entry.kind in FIXED:
            return np.zeros(1, np.int64)
        return np.zeros((), np.float32 if entry.kind == LOSS_WEIGHT else np.float64)

    def _bind_outputs(self, binding: _Binding) -> None:
        binding.io.clear_binding_outputs()
        for name in self._made:
            self._bind_made(binding, name)
        for name in self._outputs:
            if name in self._states:
                binding.io.bind_ortvalue_output(name, self._state(self._states[name]))

    def _bind_made(self, binding: _Binding, name: str) -> None:
        """Binds an output to the memory in which the session makes it."""
        if name in self.made_on_gpu:
            binding.io.bind_output(name, self.device.value, self._index)
        else:
            binding.io.bind_output(name)

    def _state(self, name: str) -> Any:
        if self._buffers is None:
            raise DirectoryError(
                f"{self.manifest.directory}: program {self.program.name!r} uses states such as "
                f"{name!r}; run it with a Trainer"
            )
        return self._buffers.value(name)

    def _feed(self, binding: _Binding, local: Mapping[str, Array | Staged]) -> None:
        """Binds the inputs: on the CPU the arrays themselves, on a GPU the binding's own memory."""
        for name in binding.names:
            array = local[name]
            if isinstance(array, Staged) or name in self.on_gpu:
                self._put(binding, name, array)
            else:
                self._bind_array(binding, name, array)

    def _bind_array(self, binding: _Binding, name: str, array: Array) -> None:
        bind_input(binding.io, name, array)
        binding.host_inputs[name] = array

    def _put(self, binding: _Binding, name: str, array: Array | Staged) -> None:
        """Enqueues writing an input to the binding's memory on the GPU."""
        assert self.queue is not None
        kept = binding.gpu_inputs.get(name)
        if kept is None:
            kept = empty(array.shape, array.dtype, self.device.value, self._index)
            binding.gpu_inputs[name] = kept
            binding.io.bind_ortvalue_input(name, kept)
        staged = array if isinstance(array, Staged) else self.queue.stage(array)
        staged.put(kept.data_ptr())

    @property
    def bound_bytes(self) -> int:
        """Bytes of the inputs that are bound to the session, without states."""
        bindings = self._bindings.values()
        arrays = {id(array): array.nbytes for b in bindings for array in b.host_inputs.values()}
        on_gpu: list[int] = [
            v.tensor_size_in_bytes() for b in bindings for v in b.gpu_inputs.values()
        ]
        return sum(arrays.values()) + sum(on_gpu)

    def close(self) -> None:
        """Frees the session."""
        self._bindings.clear()
        self.session = None


@functools.cache
def _nothing() -> Any:
    return to_ort(np.zeros(0, np.float32))

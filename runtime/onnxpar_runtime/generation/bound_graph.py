"""A graph of a rank, with what it reads and writes bound from run to run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.entries import SystemInput
from onnxpar_format.trace import PROGRAM
from onnxpar_runtime.cuda import copy_in, copy_out
from onnxpar_runtime.errors import RankError, first_line
from onnxpar_runtime.executor import Executor
from onnxpar_runtime.generation.states import State
from onnxpar_runtime.tensors import empty, to_host, to_ort

Array = NDArray[Any]


class BoundGraph:
    """A graph of a decoder on one rank; in a pipeline, that of a virtual stage.

    Args:
        executor: The graph.
        states: The states of the decoder; those that another stage has are left out.
        logits: Name of the output that scores tokens.
        repeats: Whether its runs repeat, so that they may be captured as a CUDA graph.

    Attributes:
        executor: The graph.
        scores: Whether it makes the logits.
    """

    def __init__(
        self, executor: Executor, states: Sequence[State], logits: str, *, repeats: bool = False
    ) -> None:
        """Binds the values that are the same in every step."""
        self.executor = executor
        self._loader, program = executor.loader, executor.program
        self._place = (self._loader.device.value, self._loader.index)
        self._io: Any = executor.session.io_binding()
        # On the CPU they say nothing, and onnxruntime would look into them in each run.
        self._options = None if self._loader.queue is None else self._loader.run_options(None)
        self._bound: dict[str, Array] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._scores: tuple[Any, Array] | None = None
        self._taken: dict[str, Any] = {}
        self._order: dict[str, int] = {}
        carried = {state.input for state in program.carried}
        self._states = [state for state in states if state.entry.input in carried]
        made = {state.output for state in program.carried}
        outputs = [spec.name for spec in program.outputs if spec.name not in made]
        self._logits, self.scores = logits, logits in outputs
        self._others = [name for name in outputs if name != logits]
        self._given = [value.name for value in program.handed_out]
        # The next run writes the symbols' values; none is known here.
        sizes = dict.fromkeys(executor.manifest.symbols, -1)
        self._numbers = [
            (entry, executor.system_memory(entry, sizes))
            for entry in program.system_inputs
            if entry.name in executor.graph_inputs
        ]
        for entry, memory in self._numbers:
            self._bind_number(entry, memory)
        self._captures = repeats and executor.captures and not self._others
        # Whether sizes or memory differ from those of the last run.
        self._changed, self._replay = True, None
        self._steady = all(state.in_place for state in self._states)
        if self._steady:
            for state in self._states:
                self._bind_state(state, state.length)

    def bind(self, name: str, array: Array) -> None:
        """Binds an input; it is written where the last one is if its shape is the same."""
        if name not in self.executor.graph_inputs:
            return
        if name in self.executor.on_gpu:
            if self._sizes.get(name) != array.shape:
                self._sizes[name] = array.shape
                self.bind_value(name, empty(array.shape, array.dtype, *self._place))
            copy_in(self._taken[name].data_ptr(), array)
            return
        bound = self._bound.get(name)
        if bound is not None and bound.shape == array.shape:
            np.copyto(bound, array)
            return
        bound = np.array(array)
        self._bound[name], self._changed = bound, True
        self._io.bind_ortvalue_input(name, to_ort(bound))

    def bind_value(self, name: str, value: Any) -> None:
        """Binds an input to an OrtValue, which stays on its device."""
        if name in self.executor.graph_inputs:
            # A binding does not keep the memory of an array alive.
            self._taken[name], self._changed = value, True
            self._io.bind_ortvalue_input(name, value)

    def bind_symbols(self, values: Mapping[str, int]) -> None:
        """Writes the values of the symbols that the graph reads."""
        for entry, memory in self._numbers:
            if entry.symbol is not None and memory[0] != values[entry.symbol]:
                memory[0], self._changed = values[entry.symbol], True
                if entry.name in self.executor.on_gpu:
                    self.bind(entry.name, memory)

    def bind_states(self, lengths: Mapping[str, int]) -> None:
        """Binds the states; `lengths` has their lengths after the run, by input."""
        if not self._steady:
            for state in self._states:
                self._bind_state(state, lengths[state.entry.input])

    def bind_logits(self, memory: Array | None) -> None:
        """Binds the logits to memory on the host; to new memory in each run if it is None.

        On a GPU they are written to memory there, and then copied.
        """
        self._changed, self._scores = True, None
        if memory is None:
            self._bind_output(self._logits, "cpu", 0)
            return
        self._order.setdefault(self._logits, len(self._order))
        if self._logits in self.executor.made_on_gpu:
            value = empty(memory.shape, memory.dtype, *self._place)
            self._scores = value, memory
        else:
            value = to_ort(memory)
        self._io.bind_ortvalue_output(self._logits, value)

    def run(self, handed: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the graph, and returns the values for other stages, OrtValues on the device.

        Args:
            handed: The values of other stages, likewise; there may be more.

        Raises:
            RankError: onnxruntime failed on this rank, or another rank did.
        """
        for value in self.executor.program.handed_in:
            self.bind_value(value.name, handed[value.name])
        for name in self._others:
            self._bind_output(name, "cpu", 0)
        for name in self._given:
            self._bind_output(name, *self._place)
        executor = self.executor
        with executor.rank.timeline.span(PROGRAM, executor.program.name):
            try:
                executor.session.run_with_iobinding(self._io, self._run_options())
            except Exception as error:
                raise RankError(executor.rank.index, first_line(error)) from error
            self._loader.synchronize()
        if self._scores is not None:
            value, memory = self._scores
            copy_out(value.data_ptr(), memory)
        if not self._given:
            return {}
        made = self._io.get_outputs()
        return {name: made[self._order[name]] for name in self._given}

    def _run_options(self) -> Any:
        """Returns the options of the next run, which is captured if it repeats the last one.

        For the capture, onnxruntime runs the graph three times. Each run writes the new tokens at
        the same places of the states.
        """
        if not self._captures:
            return self._options
        if self._changed:
            self._changed, self._replay = False, None
            return self._options
        if self._replay is None:
            self._replay = self.executor.capture()
            self._captures = self._replay is not None
        return self._replay or self._options

    def logits(self) -> Array:
        """Returns a copy of the logits of the last run."""
        return to_host(self._io.get_outputs()[self._order[self._logits]])

    def _bind_state(self, state: State, length: int) -> None:
        self._order.setdefault(state.entry.output, len(self._order))
        state.bind(self._io, length)

    def _bind_output(self, name: str, device: str, index: int) -> None:
        # A binding has its outputs in the order in which they were first bound.
        self._order.setdefault(name, len(self._order))
        self._io.bind_output(name, device, index)

    def _bind_number(self, entry: SystemInput, memory: Array) -> None:
        if entry.name in self.executor.on_gpu:
            self.bind(entry.name, memory)
        else:
            self._io.bind_ortvalue_input(entry.name, to_ort(memory))

"""A rank's virtual stages of a program that runs through the stages of a pipeline."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import HandedEntry, ProgramEntry, TensorEntry
from onnxpar_format.expressions import ExpressionError, evaluate
from onnxpar_format.manifest import Pipeline, VirtualStage
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.cuda import Queue
from onnxpar_runtime.errors import DirectoryError, RankError
from onnxpar_runtime.inputs import Feeds
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.pipeline.carriers import (
    Carrier,
    DeviceCarrier,
    Expected,
    HostCarrier,
    Leaving,
)
from onnxpar_runtime.pipeline.inbox import Inbox
from onnxpar_runtime.pipeline.player import Place, plan, play
from onnxpar_runtime.pipeline.schedule import Action, Kind, Message, PlayedSchedule
from onnxpar_runtime.pipeline.simulate import even_bubble
from onnxpar_runtime.pipeline.values import Ends, read_values
from onnxpar_runtime.run_values import Given, Results
from onnxpar_runtime.tensors import host_view, to_ort

Array = NDArray[Any]
FORWARD = "forward"
"""The schedule without backwards."""
_Sizes = tuple[tuple[str, int], ...]
_MAX_SIZES = 64
"""Number of sets of the symbols' values for which shapes are kept."""


class Micro(NamedTuple):
    """A micro-batch to run.

    Attributes:
        feeds: This rank's shards of the inputs.
        numbers: Numbers that programs read, by name.
        number: Its number in the step, a key of random numbers.
    """

    feeds: Feeds
    numbers: Mapping[str, float]
    number: int


class Numbers(Protocol):
    """Decides what programs do with gradients."""

    def numbers(self, program: str, index: int) -> Mapping[str, float]:
        """Returns numbers that a program reads in its run on micro-batch `index`, by name."""


class Part(Protocol):
    """A program of a virtual stage, loaded; `Executor` is one."""

    @property
    def program(self) -> ProgramEntry:
        """The program."""

    @property
    def queue(self) -> Queue | None:
        """The streams of the GPU; None on the CPU."""

    def run_part(self, given: Given) -> Results:
        """Runs the program, as `Executor.run_part`."""


class _Held:
    """A value that waits for the programs that read it."""

    def __init__(self, value: Any, readers: int) -> None:
        self.value = value
        self.bytes: int = value.tensor_size_in_bytes()
        self.readers = readers


@dataclass(frozen=True)
class _Route:
    """Where a value goes that a program makes.

    Attributes:
        value: The value.
        near: The virtual stages of this rank that take it.
        sent: The messages that have it.
    """

    value: HandedEntry
    near: Sequence[int]
    sent: Sequence[Ends]


@dataclass(frozen=True)
class _Loaded:
    """A program of a virtual stage, with what it takes from others and makes for them.

    Attributes:
        name: Its name.
        part: The program.
        taken: Names of the values that it takes.
        routes: The values that it makes.
    """

    name: str
    part: Part
    taken: Sequence[str]
    routes: Sequence[_Route]


class VirtualStages:
    """A rank's virtual stages of one program.

    Args:
        manifest: The manifest of a pipeline.
        program: Name of a program that runs through its stages.
        rank: The rank.
        load: Loads a part.
        inbox: The rank's posted receives.

    Attributes:
        made: The program's outputs, and the stage that makes each.
        peak_bytes: The most bytes of values from other programs and stages that the rank has kept
            at a time. A value that two of its virtual stages read counts twice.

    Raises:
        DirectoryError: The manifest has no such program, parts do not fit together, or a graph
            cannot be loaded.
    """

    def __init__(
        self,
        manifest: Manifest,
        program: str,
        rank: Rank,
        load: Callable[[str], Part],
        inbox: Inbox,
    ) -> None:
        """Loads the rank's parts."""
        self._manifest, self._rank, self._inbox = manifest, rank, inbox
        self._values = read_values(manifest, program)
        assert manifest.pipeline is not None  # or there were no values
        self._pipeline: Pipeline = manifest.pipeline
        size = manifest.stage_devices
        self._place = Place(manifest.stage_of(rank.index), rank.index % size, size)
        self.made = _made(manifest, program, self._values.stages, self._pipeline.stages)
        own = self._pipeline.virtual_stages_of(self._place.stage)
        parts = [name for stage in own for name in self._values.stages[stage].programs]
        loaded = {name: load(name) for name in parts if _makes(manifest, name)}
        # All of a rank's parts are on one device. Without parts, nothing is sent.
        queues = [part.queue for part in loaded.values()]
        self._queue = queues[0] if queues else None
        self._carrier: Carrier = (
            HostCarrier(rank) if self._queue is None else DeviceCarrier(rank, self._queue)
        )
        # For each value that a part makes: the messages and the virtual stages here that take it.
        sent: dict[tuple[str, str], list[Ends]] = defaultdict(list)
        near: dict[tuple[str, str], list[int]] = defaultdict(list)
        for ends, values in self._values.messages.items():
            _, source, target = ends
            for value in values:
                key = (self._maker(source, value.name), value.name)
                if target in own:
                    near[key].append(target)
                else:
                    sent[key].append(ends)
        for stage in own:
            for name in self._values.kept[stage]:
                near[self._maker(stage, name), name].append(stage)
        self._loaded = {
            name: _Loaded(
                name,
                part,
                [value.name for value in part.program.handed_in],
                [
                    _Route(value, near[name, value.name], sent[name, value.name])
                    for value in part.program.handed_out
                ],
            )
            for name, part in loaded.items()
        }
        self._counters: Mapping[str, int] = {}
        self._more: Numbers | None = None
        self._micro: Sequence[Micro] = ()
        self._held: dict[tuple[int, int], dict[str, _Held]] = defaultdict(dict)
        self._leaving: dict[tuple[Ends, int], dict[str, Any]] = defaultdict(dict)
        self._found: list[dict[str, Array]] = []
        self._known: OrderedDict[_Sizes, dict[str, Expected]] = OrderedDict()
        self._bytes = 0
        self.peak_bytes = 0

    def _maker(self, virtual_stage: int, value: str) -> str:
        """Returns the program of a virtual stage that makes a value."""
        for name in self._values.stages[virtual_stage].programs:
            if any(v.name == value for v in self._manifest.program(name).handed_out):
                return name
        raise AssertionError(f"virtual stage {virtual_stage} does not make {value!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rank's parts."""
        return tuple(self._loaded)

    def run(
        self,
        schedule: str,
        micro_batches: Sequence[Micro],
        counters: Mapping[str, int],
        more: Numbers | None = None,
    ) -> list[dict[str, Array]]:
        """Plays a schedule. Every rank must call it, with the same number of micro-batches.

        Args:
            schedule: Name of the schedule.
            micro_batches: The micro-batches.
            counters: Values of `onnxpar_format.entries.COUNTERS`, without the micro-batch.
            more: Gives numbers that programs read besides those of a micro-batch.

        Returns:
            For each micro-batch the local arrays of the outputs that this rank's stage makes.

        Raises:
            ScheduleError: The schedule cannot be played.
            DirectoryError: The schedule splits a backward that is one program.
            RankError: A rank failed.
        """
        program = self._plan(schedule, len(micro_batches))
        self._counters, self._more, self._micro = counters, more, micro_batches
        self._found = [{} for _ in micro_batches]
        self._held.clear()
        self._leaving.clear()
        self._bytes = 0
        play(self._carrier, self._place, program, self, self._inbox, self._rank.timeline)
        return self._found

    def even_bubble(self, schedule: str, count: int) -> float:
        """Returns the bubble for `count` micro-batches if all stages took the same time."""
        return even_bubble(self._plan(schedule, count))

    def _plan(self, schedule: str, count: int) -> PlayedSchedule:
        pipeline = self._pipeline
        edges = self._values.edges
        program = plan(schedule, pipeline.stages, count, pipeline.chunks, edges)
        split = any(a.kind is Kind.BACKWARD_WEIGHT for _, _, a in program.schedule.places())
        if split and any(stage.weight is None for stage in self._values.stages):
            raise DirectoryError(
                f"{self._manifest.directory}: schedule {schedule!r} computes parameter "
                "gradients separately, but the backward pass of a stage is one program"
            )
        return program

    # -- what the schedule asks for ----------------------------------------------------------------

    def compute(self, action: Action) -> None:
        """Runs the programs of a computation; as `player.Work`."""
        virtual = action.chunk * self._pipeline.stages + self._place.stage
        stage = self._values.stages[virtual]
        if action.kind is Kind.FORWARD:
            self._run(virtual, stage.forward, action.micro_batch)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self._run(virtual, stage.backward, action.micro_batch)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self._run(virtual, stage.weight, action.micro_batch)

    def leaving(self, message: Message) -> list[Leaving]:
        """Returns the values of a message; as `player.Work`."""
        ends = (message.payload, message.source, message.target)
        values = self._leaving.pop((ends, message.micro_batch))
        return [
            Leaving(v.name, self._outgoing(values[v.name]), v.shape is None)
            for v in self._values.messages[ends]
        ]

    def _outgoing(self, value: Any) -> Any:
        """Returns an OrtValue in the form that the carrier takes."""
        if self._queue is None:
            return np.asarray(host_view(value), order="C")
        if value.device_name() == "cpu":
            # Some nodes compute on the host, but the receiver expects all values on the GPU.
            return to_ort(host_view(value), "cuda", self._queue.index)
        return value

    def expected(self, message: Message) -> list[Expected]:
        """Returns the values of a message to this rank; as `player.Work`."""
        values = self._values.messages[message.payload, message.source, message.target]
        return [self._expected(value, message.micro_batch) for value in values]

    def arrived(self, message: Message, values: Sequence[Any]) -> None:
        """Keeps received values for the programs that read them; as `player.Work`."""
        expected = self._values.messages[message.payload, message.source, message.target]
        for handed, value in zip(expected, values, strict=True):
            kept = to_ort(value) if self._queue is None else value
            self._keep(message.target, message.micro_batch, handed.name, kept)

    def _expected(self, value: HandedEntry, index: int) -> Expected:
        """Returns type and shape of a value, computed once for each set of sizes."""
        feeds = self._micro[index].feeds
        known = self._known.get(feeds.sizes)
        if known is None:
            known = self._known[feeds.sizes] = {}
            while len(self._known) > _MAX_SIZES:
                self._known.popitem(last=False)
        self._known.move_to_end(feeds.sizes)
        if value.name not in known:
            known[value.name] = self._described(value, feeds.values)
        return known[value.name]

    def _described(self, value: HandedEntry, symbols: Mapping[str, int]) -> Expected:
        dtype = DTYPES[value.dtype].dtype
        if value.shape is None:
            return Expected(value.name, dtype, None)
        try:
            shape = tuple(evaluate(size, symbols) for size in value.shape)
        except ExpressionError as error:
            raise DirectoryError(
                f"{self._manifest.directory}: shape of {value.name!r}: {error}"
            ) from None
        return Expected(value.name, dtype, shape)

    # -- running -----------------------------------------------------------------------------------

    def _run(self, virtual: int, name: str | None, index: int) -> None:
        loaded = self._loaded.get(name or "")
        if loaded is None:
            return
        micro, held = self._micro[index], self._held[virtual, index]
        numbers = micro.numbers
        if self._more is not None:
            numbers = {**numbers, **self._more.numbers(loaded.name, index)}
        given = Given(
            micro.feeds,
            {**self._counters, "micro_batch": micro.number},
            numbers,
            {taken: held[taken].value for taken in loaded.taken},
        )
        results = loaded.part.run_part(given)
        for taken in loaded.taken:
            self._read(held, taken)
        for route in loaded.routes:
            value = route.value.name
            made = results.handed[value]
            self._check(route.value, made, index)
            for target in route.near:
                self._keep(target, index, value, made)
            for ends in route.sent:
                self._leaving[ends, index][value] = made
        self._found[index] |= results.data

    def _check(self, value: HandedEntry, made: Any, index: int) -> None:
        """Raises RankError unless a value has the shape that its readers expect."""
        shape = self._expected(value, index).shape
        if shape is not None and tuple(made.shape()) != shape:
            raise RankError(
                self._rank.index,
                f"{value.name!r}, handed to another program: expected the local shape {shape}, "
                f"got {tuple(made.shape())}",
            )

    def _keep(self, virtual: int, index: int, name: str, value: Any) -> None:
        kept = _Held(value, self._values.readers[virtual][name])
        self._held[virtual, index][name] = kept
        self._bytes += kept.bytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _read(self, held: dict[str, _Held], name: str) -> None:
        """Forgets a value when its last reader has read it."""
        value = held[name]
        value.readers -= 1
        if not value.readers:
            self._bytes -= held.pop(name).bytes


def _makes(manifest: Manifest, name: str) -> bool:
    """Whether a program makes anything; a backward may not, if nothing before it is trained."""
    program = manifest.program(name)
    return bool(program.outputs or program.handed_out or program.state_outputs)


def _made(
    manifest: Manifest, program: str, stages: Sequence[VirtualStage], count: int
) -> dict[TensorEntry, int]:
    """Returns the outputs of a program, and the stage that makes each.

    Raises:
        DirectoryError: None does, or several do.
    """
    makers: dict[str, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        for name in stage.programs:
            for spec in manifest.program(name).outputs:
                makers[spec.name].append(index % count)
    made = {}
    for spec in manifest.program(program).outputs:
        if len(makers[spec.name]) != 1:
            raise DirectoryError(
                f"{manifest.directory}: output {spec.name!r} of {program}: expected one stage "
                f"that computes it, got {makers[spec.name]}"
            )
        made[spec] = makers[spec.name][0]
    return made

"""`manifest.json` (schema 1) of a directory: its records, and the checks between them.

The runtime knows the transformer's decisions only from the manifest: mesh, symbols, programs with
their inputs and outputs, parameters as explicit boxes of indices, files with checksums. The fields
have the order of the file.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from onnxpar_format.boxes import Interval, ShardBox
from onnxpar_format.entries import (
    FileEntry,
    ParameterEntry,
    Positive,
    ProgramEntry,
    SuppliedEntry,
    SymbolEntry,
    TensorEntry,
    is_file_name,
    one_of,
)
from onnxpar_format.expressions import Size
from onnxpar_format.records import (
    LISTED,
    OPTIONAL,
    Absent,
    FormatError,
    Key,
    Problem,
    from_json,
    load_json,
)

FILE_NAME = "manifest.json"
SCHEMA = 1


class StateKind(StrEnum):
    """The kind of a state.

    Attributes:
        PARAMETER: A trained parameter.
        GRADIENT: Its gradient, summed over the micro-batches of a step so far.
        MICRO_GRADIENT: The sum of its gradients over micro-batches, if a step has several. Our
            runtime has it in the memory of the gradient.
        MOMENT1: The momentum, or the mean of gradients.
        MOMENT2: The mean of squared gradients.
        STATISTIC: A running statistic of the model, which every micro-batch updates.
    """

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    MICRO_GRADIENT = "micro_gradient"
    MOMENT1 = "moment1"
    MOMENT2 = "moment2"
    STATISTIC = "statistic"


FROM_FILES: tuple[str, ...] = (StateKind.PARAMETER, StateKind.STATISTIC)
"""Kinds of states that are weights of the model."""
TRANSIENT: tuple[str, ...] = (StateKind.GRADIENT, StateKind.MICRO_GRADIENT)
"""Kinds of states that mean nothing between steps: checkpoints do not hold them."""


@dataclass(frozen=True)
class VirtualStage:
    """The programs of one virtual stage.

    Attributes:
        forward: Name of the program of the forward pass; None if `backward` computes it.
        backward: Name of that of the backward pass; None without gradients.
        weight: Name of the part of the backward pass for which no other stage waits; None if the
            backward pass is one program.
    """

    forward: str | None
    backward: str | None = None
    weight: str | None = None

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of the programs, in the order in which a micro-batch runs through them."""
        return tuple(n for n in (self.forward, self.backward, self.weight) if n is not None)


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline, each with its own mesh.

    Virtual stage s is chunk s // stages of stage s % stages. The rank at a place on the mesh of a
    stage exchanges values with those at the same place of other stages.

    Attributes:
        stages: Number of stages.
        chunks: Virtual stages of each stage.
        schedule: Name of the schedule.
        micro_batches: Default number of micro-batches in a step.
        parts: The programs that each program consists of. A program that runs through the stages
            has `forward`, and perhaps `backward` and `weight`, for each virtual stage. A program
            that works on states alone has an `update` for each stage.
    """

    stages: Positive
    chunks: Positive
    schedule: str
    micro_batches: Positive
    parts: Annotated[Mapping[str, tuple[Mapping[str, str | None], ...]], Key(("programs",))]

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages."""
        return self.stages * self.chunks

    def virtual_stages_of(self, stage: int) -> range:
        """Returns the virtual stages of a stage."""
        return range(stage, self.virtual_stages, self.stages)

    @cached_property
    def programs(self) -> dict[str, tuple[VirtualStage, ...]]:
        """The parts of each program that runs through the stages, by virtual stage."""
        return {
            name: tuple(
                VirtualStage(p.get("forward"), p.get("backward"), p.get("weight")) for p in parts
            )
            for name, parts in self.parts.items()
            if name not in self.updates
        }

    @cached_property
    def updates(self) -> dict[str, tuple[str, ...]]:
        """The parts of each program that works on states alone, by stage or virtual stage."""
        return {
            name: tuple(part["update"] or "" for part in parts)
            for name, parts in self.parts.items()
            if all("update" in part for part in parts)
        }

    def part_problems(self) -> Iterator[Problem]:
        """Yields what is wrong with the parts."""
        for name, parts in self.parts.items():
            place, updates = f".pipeline.programs.{name}", name in self.updates
            kinds = ("update",) if updates else ("forward", "backward")
            for part in parts:
                if all(part.get(kind) is None for kind in kinds):
                    yield place, f"a program under {' or '.join(map(repr, kinds))}", part
            allowed = sorted({self.virtual_stages, self.stages if updates else self.virtual_stages})
            if len(parts) not in allowed:
                yield place, f"{' or '.join(map(str, allowed))} entries", len(parts)


@dataclass(frozen=True)
class Loss:
    """The loss of a training program.

    Attributes:
        kind: `softmax_cross_entropy`, `mse`, `mae`, `bce`, or `output` for an output of the model.
        labels: Name of the input with the labels, or None.
        ignore_index: The label that does not count, or None.
        count: Number of terms of its mean, as a size expression; None if it is unknown, so that a
            batch counts by its rows.
    """

    kind: str
    labels: str | None
    ignore_index: int | None
    count: Size | None


ONE_STAGE = Absent((0,))


@dataclass(frozen=True)
class PartEntry:
    """The tensor of the model of which a state is a range.

    Attributes:
        state: Name of the state of the complete tensor, by which checkpoints know it.
        parameter: The parameter that the complete tensor is, or belongs to.
        shape: Shape of the complete tensor.
        axis: The dim that is divided.
        start: Index of the state's first element in this dim.
    """

    state: str
    parameter: str
    shape: tuple[int, ...]
    axis: int
    start: int

    def moved(self, box: tuple[Interval, ...]) -> tuple[Interval, ...]:
        """Returns a box of the part as a box of the complete tensor."""
        first, last = box[self.axis]
        inside = (first + self.start, last + self.start)
        return (*box[: self.axis], inside, *box[self.axis + 1 :])

    def problems_of(self, shape: tuple[int, ...]) -> Iterator[Problem]:
        """Yields what is wrong if the part has this shape."""
        if not 0 <= self.axis < len(self.shape) == len(shape):
            yield ".part.axis", f"a dim of the shape {list(self.shape)}", self.axis
            return
        end = self.start + shape[self.axis]
        rest = (*self.shape[: self.axis], shape[self.axis], *self.shape[self.axis + 1 :])
        if rest != shape or not 0 <= self.start <= end <= self.shape[self.axis]:
            expected = f"a range of the shape {list(self.shape)} from {self.start} on"
            yield ".part", expected, list(shape)


@dataclass(frozen=True)
class StateEntry(TensorEntry):
    """A tensor that the runtime keeps between runs, on the device, and updates in place.

    Attributes:
        name: Its name.
        dtype: Name of the element type.
        shape: Global shape, of integers.
        dims: Components of each dim, of integers.
        kind: Its kind.
        parameter: The parameter that it is, or belongs to; for a statistic the statistic itself.
        partial: Atoms over which the stored values are partial sums.
        stages: The stages of the pipeline that hold it.
        partial_stages: Whether the values of these stages are partial sums; None without a
            pipeline.
        part: The tensor of which it is a part; None if it is a tensor of its own.
    """

    kind: Annotated[str, one_of(tuple(StateKind))]
    parameter: str
    partial: tuple[int, ...]
    stages: Annotated[tuple[int, ...], OPTIONAL] = ONE_STAGE
    partial_stages: Annotated[bool | None, OPTIONAL] = None
    part: Annotated[PartEntry | None, OPTIONAL] = None

    @property
    def tensor(self) -> "TensorOfStates":
        """The tensor that it is, or is a part of."""
        if self.part is not None:
            return TensorOfStates(
                self.part.state, self.kind, self.part.parameter, self.dtype, self.part.shape
            )
        shape = tuple(int(n) for n in self.shape)
        return TensorOfStates(self.name, self.kind, self.parameter, self.dtype, shape)

    def in_tensor(self, boxes: Iterable[ShardBox]) -> tuple[ShardBox, ...]:
        """Returns boxes of this state as boxes of the tensor that it is, or is a part of."""
        part = self.part
        if part is None:
            return tuple(boxes)
        return tuple(replace(box, source=part.moved(box.source)) for box in boxes)

    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong between fields."""
        yield from super().problems()
        sizes = [n for dim in self.dims for n, _ in dim]
        if not all(isinstance(n, int) for n in sizes):
            yield ".dims", "integer sizes", sizes
        elif self.part is not None:
            yield from self.part.problems_of(tuple(int(n) for n in self.shape))


class TensorOfStates(NamedTuple):
    """A tensor that one state holds, or several states part by part.

    Attributes:
        name: Name of the state of the complete tensor.
        kind: Its kind.
        parameter: The parameter that it is, or belongs to.
        dtype: Name of its element type.
        shape: Its shape.
    """

    name: str
    kind: str
    parameter: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TrainingTensor:
    """A weight of the model, and whether it is trained.

    Attributes:
        name: Its name.
        elements: Number of its elements.
        trained: Whether the optimizer changes it.
        parameter: Whether it is a parameter; other weights are constants and running statistics.
        reason: Why it is not trained; empty if it is.
        rule: Name of the rule that decided this.
        used_by: Names of the nodes that read it.
    """

    name: str
    elements: int
    trained: bool
    parameter: bool
    reason: str
    rule: str
    used_by: tuple[str, ...]


@dataclass(frozen=True)
class Training:
    """What a manifest says about training, besides its programs.

    Attributes:
        loss: The loss.
        optimizer: Kind of the optimizer: `sgd`, `momentum`, `adam`, `adamw` or `lamb`.
        states: By name.
        compute: The 16-bit type of products, with float32 parameters; None if the type of the
            parameters is used.
        tensors: The weights, trained or not.
        notices: Notices for the user.
        spec: The user's request as the transformer understood it.
        flops: Operations of the products, convolutions, attention and recurrent layers in the
            forward and backward of a micro-batch, on all devices together, as an expression; None
            if the sizes of the inputs do not determine it.
        micro_batches: Default number of micro-batches in a step without stages; a step of pairs
            has at least two.
    """

    loss: Loss
    optimizer: Annotated[str, Key(("optimizer", "kind"))]
    states: Annotated[Mapping[str, StateEntry], LISTED]
    compute: str | None
    tensors: tuple[TrainingTensor, ...]
    notices: tuple[str, ...]
    spec: Mapping[str, Any]
    flops: Size | None
    micro_batches: Annotated[Positive, OPTIONAL] = 1

    @cached_property
    def by_tensor(self) -> Mapping[str, tuple[StateEntry, ...]]:
        """For each tensor the state that holds it, or the states that hold its parts, in order."""
        found: dict[str, list[StateEntry]] = {}
        for state in self.states.values():
            found.setdefault(state.tensor.name, []).append(state)
        return {
            name: tuple(sorted(states, key=lambda s: s.part.start if s.part else 0))
            for name, states in found.items()
        }

    @cached_property
    def sums(self) -> Mapping[str, str]:
        """For each state with the sum of a gradient over micro-batches, that of the gradient."""
        kinds = StateKind.GRADIENT, StateKind.MICRO_GRADIENT
        gradients, sums = (
            {s.parameter: n for n, s in self.states.items() if s.kind == k} for k in kinds
        )
        return {name: gradients[parameter] for parameter, name in sums.items()}

    def problems(self) -> Iterator[Problem]:
        """Yields tensors whose parts are not all there, or are there twice."""
        for name, states in self.by_tensor.items():
            parts = [state.part for state in states if state.part is not None]
            if len(states) == 1 and not parts:
                continue
            alike = {(state.tensor, state.part and state.part.axis) for state in states}
            met = len(alike) == 1
            if met:
                axis, shape = parts[0].axis, parts[0].shape
                ends = [p.start + int(s.shape[axis]) for p, s in zip(parts, states, strict=True)]
                met = [*(p.start for p in parts), shape[axis]] == [0, *ends]
            if not met:
                names = [state.name for state in states]
                yield ".states", f"parts that make up the tensor {name!r} together", names


@dataclass(frozen=True)
class Replicated:
    """A node that every rank computes in full, with the reason."""

    node: str
    op_type: str
    reason: str


@dataclass(frozen=True)
class ManifestContents:
    """The contents of a manifest.

    Attributes:
        schema: Version of the format.
        generator: Name and version of the program that wrote it.
        model: Name of the model.
        axes: Named mesh axes with their sizes, major first.
        atoms: Sizes of the atoms, major first.
        devices: Number of ranks.
        symbols: Constraints by name.
        programs: By name.
        parameters: By name.
        files: Checksums by file name.
        strategy: The strategy as resolved.
        replicated: Nodes that every rank computes in full.
        report: Further reports of the transformer.
        training: The training; None in a directory for inference.
        pipeline: The pipeline; None if there is one stage.
        dialect: The runtime whose collectives the graphs have; None for those of `onnxpar`.
    """

    schema: int
    generator: str
    model: str
    axes: Annotated[tuple[tuple[str, int], ...], Key(("mesh", "axes"))]
    atoms: Annotated[tuple[int, ...], Key(("mesh", "atoms"))]
    devices: int
    symbols: Mapping[str, SymbolEntry]
    programs: Mapping[str, ProgramEntry]
    parameters: Mapping[str, ParameterEntry]
    files: Mapping[str, FileEntry]
    strategy: Mapping[str, Any]
    replicated: tuple[Replicated, ...]
    report: Mapping[str, Any] | None
    training: Annotated[Training | None, OPTIONAL] = None
    pipeline: Annotated[Pipeline | None, OPTIONAL] = None
    dialect: Annotated[str | None, OPTIONAL] = None

    def supplying(self, program: str) -> set[str]:
        """Returns the outputs of a program that are inputs of others."""
        pairs = [pair for other in self.programs.values() for pair in other.supplied]
        return {pair.value for pair in pairs if pair.source == program and not pair.given}

    @property
    def stages(self) -> int:
        """Number of stages."""
        return 1 if self.pipeline is None else self.pipeline.stages

    @property
    def stage_devices(self) -> int:
        """Number of ranks of a stage."""
        return self.devices // self.stages

    def stage_of(self, rank: int) -> int:
        """Returns the stage of a rank."""
        return rank // self.stage_devices

    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong between the parts."""
        if self.devices < 1 or self.devices % self.stages:
            expected = f"a divisor of the {self.devices} devices"
            yield ".pipeline.stages", expected, self.stages
        if prod(self.atoms) != self.stage_devices or any(a < 2 for a in self.atoms):
            expected = f"integers > 1 whose product is {self.stage_devices}"
            yield ".mesh.atoms", expected, list(self.atoms)
        for name, symbol in self.symbols.items():
            if symbol.same_as is not None:
                yield from self._known(f".symbols.{name}.same_as", "symbols", symbol.same_as)
        if self.report is not None:
            yield from self._report_problems(self.report)
        for name in self.files:
            if not is_file_name(name):
                yield ".files", "a file name without folders", name
        for name, program in self.programs.items():
            yield from self._program_problems(f".programs.{name}", program)
        for name, parameter in self.parameters.items():
            place = f".parameters.{name}"
            yield from self._tensor_problems(place, parameter)
            sharding = parameter.sharding(self.atoms)
            for shard in parameter.shards:
                yield from self._known(f"{place}.shards", "files", shard.file)
                if any(not 0 <= rank < self.devices for rank in shard.ranks):
                    yield f"{place}.shards", f"ranks from 0 to {self.devices - 1}", shard.ranks
                if not shard.ranks:
                    yield f"{place}.shards", "at least one rank", shard.ranks
                for at, expected, got in parameter.shard_problems(sharding, shard):
                    yield f"{place}.shards of rank {shard.ranks[0]}{at}", expected, got
        for state in (self.training.states if self.training else {}).values():
            yield from self._state_problems(f".training.states {state.name!r}", state)
        if self.pipeline is not None:
            yield from self._pipeline_problems(self.pipeline)

    def _report_problems(self, report: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields what is wrong with the numbers of a report that what shows it relies on."""
        mesh = {"axes": dict(self.axes), "atoms": list(self.atoms)}
        facts = {"devices": self.devices, "stages": self.stages, "mesh": mesh}
        for key, expected in facts.items():
            if key in report and report[key] != expected:
                yield f".report.{key}", f"{expected} as in the manifest", report[key]

    def _known(self, place: str, what: str, name: str | None) -> Iterator[Problem]:
        """Yields a problem unless `what` (symbols, files, programs or parameters) has the name."""
        known: Mapping[str, object] = getattr(self, what)
        if name not in known:
            yield place, f"one of the {what} {sorted(known)}", name

    def _tensor_problems(self, place: str, tensor: TensorEntry) -> Iterator[Problem]:
        if not self._are_atoms(tensor.split_atoms):
            yield f"{place}.dims", "each atom of the mesh at most once", list(tensor.split_atoms)

    def _are_atoms(self, used: tuple[int, ...]) -> bool:
        return len(set(used)) == len(used) and {*used} <= {*range(len(self.atoms))}

    def _program_problems(self, place: str, program: ProgramEntry) -> Iterator[Problem]:
        if len(program.files) != self.devices:
            yield f"{place}.files", f"{self.devices} entries, one per rank", program.files
        for file in program.files:
            if file is not None:
                yield from self._known(f"{place}.files", "files", file)
        for key, tensors in (("inputs", program.inputs), ("outputs", program.outputs)):
            for tensor in tensors:
                yield from self._tensor_problems(f"{place}.{key} {tensor.name!r}", tensor)
        for entry in program.system_inputs:
            at = f"{place}.system_inputs {entry.name!r}"
            if entry.kind == "symbol":
                yield from self._known(at, "symbols", entry.symbol)
            if entry.kind == "coordinate" and entry.atom not in range(len(self.atoms)):
                yield at, f"an atom from 0 to {len(self.atoms) - 1}", entry.atom
        for pair in program.supplied:
            yield from self._supplied_problems(f"{place}.supplied {pair.input!r}", program, pair)
        states = self.training.states if self.training else {}
        for name in (*program.state_inputs, *(o.state for o in program.state_outputs)):
            if name not in states:
                yield place, "states of 'training'", name

    def _supplied_problems(
        self, place: str, program: ProgramEntry, pair: SuppliedEntry
    ) -> Iterator[Problem]:
        yield from self._known(f"{place}.from", "programs", pair.source)
        source = self.programs.get(pair.source)
        taken = {spec.name: spec for spec in program.inputs}
        if pair.input not in taken:
            yield place, f"one of the inputs {sorted(taken)}", pair.input
        if source is None:
            return
        specs = source.inputs if pair.given else source.outputs
        made = {spec.name: spec for spec in specs}
        if pair.value not in made:
            kind = "inputs" if pair.given else "outputs"
            yield f"{place}.value", f"one of the {kind} {sorted(made)}", pair.value
        elif pair.input in taken and not pair.given:
            one, other = taken[pair.input], made[pair.value]
            if (one.dtype, one.pieces) != (other.dtype, other.pieces):
                yield place, f"the type and the layout of {pair.value!r}", list(one.pieces)

    def _state_problems(self, place: str, state: StateEntry) -> Iterator[Problem]:
        yield from self._tensor_problems(place, state)
        if not self._are_atoms((*state.split_atoms, *state.partial)):
            yield f"{place}.partial", "atoms that do not shard it, once each", list(state.partial)
        yield from self._known(f"{place}.parameter", "parameters", state.parameter)
        every = list(range(self.stages))
        held = state.stages
        if not held or not {*held} <= {*every} or len(set(held)) != len(held):
            yield f"{place}.stages", f"different stages of {every}", list(held)

    def _pipeline_problems(self, pipeline: Pipeline) -> Iterator[Problem]:
        """Yields parts that are not programs, have graphs on other stages, or do not match."""
        yield from pipeline.part_problems()
        for name in pipeline.programs:
            yield from self._known(f".pipeline.programs.{name}", "programs", name)
        for stages in pipeline.programs.values():
            for index, stage in enumerate(stages):
                for name in stage.programs:
                    yield from self._part_problems(name, index % pipeline.stages)
        for updates in pipeline.updates.values():
            for index, name in enumerate(updates):
                yield from self._part_problems(name, index % pipeline.stages)

    def _part_problems(self, name: str, stage: int) -> Iterator[Problem]:
        yield from self._known(".pipeline.programs", "programs", name)
        ranks = [r for r, file in enumerate(self.programs[name].files) if file is not None]
        if any(self.stage_of(rank) != stage for rank in ranks):
            expected = f"files for the ranks of stage {stage} alone"
            yield f".programs.{name}.files", expected, ranks
        for value in self.programs[name].handed_in:
            source = self.programs.get(value.source)
            made = source and {(v.name, v.dtype, v.shape) for v in source.handed_out}
            if not made or (value.name, value.dtype, value.shape) not in made:
                place = f".programs.{name}.handed_in {value.name!r}"
                yield place, f"{value.source!r} to make it with the same type and shape", value


def read_manifest(directory: Path) -> ManifestContents:
    """Reads and validates a directory's manifest.

    Raises:
        FormatError: It is missing, malformed, or of another schema.
    """
    return validated_manifest(directory)[1]


def validated_manifest(directory: Path) -> tuple[Any, ManifestContents]:
    """Returns a directory's manifest as JSON, and its contents; raises as `read_manifest`."""
    if not directory.is_dir():
        raise FormatError(f"{directory}: no such directory")
    missing = f"expected a directory that `onnxpar shard` wrote, got one without {FILE_NAME}"
    path = directory / FILE_NAME
    raw = load_json(path, missing, shown=True)
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if type(schema) is int and schema != SCHEMA:
        raise FormatError(
            f"{path}: expected schema {SCHEMA}, got {schema}: it was written by another version of "
            "onnxpar; run `onnxpar shard` again"
        )
    return raw, from_json(ManifestContents, raw, f"{path}: manifest")

"""What the entries of a manifest say, as frozen data: symbols, tensors, programs, parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxpar_format.boxes import ShardBox, SizedSharding
from onnxpar_format.expressions import Size, evaluate
from onnxpar_runtime.errors import OnnxparRuntimeError


@dataclass(frozen=True)
class SymbolEntry:
    """Constraint of a symbolic dim: its value is divisor·N + remainder, N ≥ 1, in [min, max].

    Attributes:
        min: Smallest value.
        max: Largest value; no limit unless it is larger than `min`.
        divisor: The d of d·N + r.
        remainder: The r of d·N + r, 0 ≤ r < d.
        unique: Whether every use is the same number.
        per_rank: Whether data-parallel ranks may have different values.
        same_as: Another symbol whose value this one must have.
    """

    min: int = 1
    max: int = 0
    divisor: int = 1
    remainder: int = 0
    unique: bool = False
    per_rank: bool = False
    same_as: str | None = None

    @property
    def constraint(self) -> str:
        """The constraint for people: `8*N, N >= 1, at most 512`."""
        text = "N" if self.divisor == 1 else f"{self.divisor}*N"
        text += f" + {self.remainder}" if self.remainder else ""
        text += ", N >= 1"
        if self.min > self.divisor + self.remainder:
            text += f", at least {self.min}"
        return text + (f", at most {self.max}" if self.max > self.min else "")

    def admits(self, value: int) -> bool:
        """Whether the constraint holds for `value`."""
        if value < max(self.min, self.divisor + self.remainder):
            return False
        if self.max > self.min and value > self.max:
            return False
        return value % self.divisor == self.remainder

    def admissible(self, start: int, count: int) -> list[int]:
        """Returns up to `count` admissible values from `start` on, ascending."""
        first = max(start, self.min, self.divisor + self.remainder)
        first += (self.remainder - first) % self.divisor
        values = range(first, first + count * self.divisor, self.divisor)
        return [v for v in values if self.admits(v)]


@dataclass(frozen=True)
class TensorSpec:
    """One input, output or parameter: name, dtype name, and global shape with its sharding.

    Attributes:
        name: Name in the original model and in the rank's graph.
        dtype: ONNX's name of the element type in lower case (`float32`).
        shape: Global shape as size expressions.
        dims: Components `(size expression, atoms)` of each dim.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    dims: tuple[tuple[tuple[Size, tuple[int, ...]], ...], ...]

    def cut(
        self,
        atoms: tuple[int, ...],
        values: Mapping[str, int],
        local: tuple[int, ...] | None = None,
    ) -> SizedSharding:
        """Returns how the tensor is cut when the symbols have these values.

        Args:
            atoms: Sizes of the mesh's atoms.
            values: Values of the symbols.
            local: Local shape of a part, which gives the size of a whole dim whose expression has a
                symbol without a value (a size that depends on data).

        Raises:
            ExpressionError: A size cannot be evaluated and `local` does not give it.
        """
        dims: list[tuple[tuple[int, tuple[int, ...]], ...]] = []
        for index, dim in enumerate(self.dims):
            whole = len(dim) == 1 and not dim[0][1]
            if whole and local is not None:
                dims.append(((local[index], ()),))
            else:
                dims.append(tuple((evaluate(size, values), by) for size, by in dim))
        return SizedSharding(atoms, tuple(dims))


COUNTERS = ("seed", "step", "micro_batch")
"""What random numbers are keyed by, next to the node that draws them."""


@dataclass(frozen=True)
class SystemInput:
    """An input that the runtime fills.

    Symbols, coordinates and counters are int64 of shape [1]; the loss weight is a float32 scalar, a
    hyperparameter a float64 scalar.

    Attributes:
        name: Name in the rank's graph.
        symbol: The symbol whose global value it takes, or None.
        atom: The atom whose coordinate of the rank it takes, or None.
        counter: The session's counter that it takes (one of `COUNTERS`), or None.
        loss_weight: Whether it takes what the loss is multiplied by.
        hyperparameter: The hyperparameter that it takes (`lr`), or None.
    """

    name: str
    symbol: str | None = None
    atom: int | None = None
    counter: str | None = None
    loss_weight: bool = False
    hyperparameter: str | None = None


@dataclass(frozen=True)
class Collective:
    """A collective operator of the program: what it moves, over which atoms, and why.

    Attributes:
        op: Operator of the domain `onnxpar`.
        node: Name of the node.
        value: Name of the global value.
        atoms: Atoms that span its groups.
        bytes: Bytes that a rank sends, as a size expression (may be fractional).
        reason: Node and operand that want it.
        before: Layout before.
        after: Layout after.
    """

    op: str
    node: str
    value: str
    atoms: tuple[int, ...]
    bytes: Size
    reason: str
    before: str
    after: str


@dataclass(frozen=True)
class EqualSizes:
    """Two dims of the operands of a node that every rank takes to be of one size.

    Attributes:
        node: Name of the node.
        op_type: Its operator.
        values: Names of the two global values.
        dims: Which dim of each.
        sizes: Its size as an expression.
    """

    node: str
    op_type: str
    values: tuple[str, str]
    dims: tuple[int, int]
    sizes: tuple[Size, Size]


@dataclass(frozen=True)
class IndexRange:
    """What a node demands of the elements of an input that it reads as indices.

    Attributes:
        node: Name of the node.
        op_type: Its operator.
        input: Name of the input.
        low: Least element, as an expression.
        high: Greatest element, as an expression.
        ignored: An element that is admitted as well, or None.
    """

    node: str
    op_type: str
    input: str
    low: Size
    high: Size
    ignored: int | None


@dataclass(frozen=True)
class StateOutput:
    """An output of a graph that replaces the value of a state.

    Attributes:
        name: Name of the output in the rank's graph.
        state: The state whose buffer receives it.
    """

    name: str
    state: str


@dataclass(frozen=True)
class Handed:
    """A tensor that a program of a pipeline hands to others, of the same micro-batch.

    Attributes:
        name: Name of the graph's output, and of the input of those that read it.
        dtype: ONNX's name of the element type in lower case.
        shape: Local sizes as expressions; None where the symbols do not tell them.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...] | None


@dataclass(frozen=True)
class HandedIn(Handed):
    """A tensor that a program of a pipeline takes from another.

    Attributes:
        source: The program that makes it.
    """

    source: str


@dataclass(frozen=True)
class ProgramEntry:
    """One program of the artifact, a graph per rank.

    Attributes:
        name: `model`, …
        files: Graph file of each rank, None where it was not written.
        inputs: Inputs with global shapes.
        outputs: Outputs with global shapes; never partial.
        system_inputs: Inputs that the runtime fills.
        collectives: In the order in which every rank issues them.
        equal_sizes: What a run must check, since nothing but the operators says it.
        index_ranges: Likewise, of the elements of inputs.
        state_inputs: Graph inputs that are states, by the state's name.
        state_outputs: Graph outputs that are new values of states.
        handed_in: Graph inputs that other programs of the pipeline make.
        handed_out: Graph outputs that other programs of the pipeline read.
    """

    name: str
    files: tuple[str | None, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    system_inputs: tuple[SystemInput, ...]
    collectives: tuple[Collective, ...]
    equal_sizes: tuple[EqualSizes, ...] = ()
    index_ranges: tuple[IndexRange, ...] = ()
    state_inputs: tuple[str, ...] = ()
    state_outputs: tuple[StateOutput, ...] = ()
    handed_in: tuple[HandedIn, ...] = ()
    handed_out: tuple[Handed, ...] = ()


@dataclass(frozen=True)
class VirtualStage:
    """The programs of one virtual stage.

    Attributes:
        forward: Name of the program of the forward.
        backward: That of the backward; None where nothing is differentiated.
        weight: The part of the backward that no other stage waits for; None where it is whole.
    """

    forward: str
    backward: str | None = None
    weight: str | None = None

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of the programs, in the order in which a micro-batch runs through them."""
        return tuple(n for n in (self.forward, self.backward, self.weight) if n is not None)


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline, each on a mesh of its own.

    Virtual stage s is chunk s // stages of stage s % stages. The rank at a place on the mesh of a
    stage exchanges values with those at the same place of other stages.

    Attributes:
        stages: Number of stages.
        chunks: Virtual stages of each stage.
        schedule: Name of the schedule.
        micro_batches: Micro-batches of a step, unless another number is asked for.
        programs: Of each program that runs through the stages its parts, by virtual stage.
        updates: Of each program that works on states alone its parts: of the optimizer's by stage,
            of the accumulation's by virtual stage.
    """

    stages: int
    chunks: int
    schedule: str
    micro_batches: int
    programs: Mapping[str, tuple[VirtualStage, ...]]
    updates: Mapping[str, tuple[str, ...]]

    @property
    def virtual_stages(self) -> int:
        """Their number."""
        return self.stages * self.chunks


@dataclass(frozen=True)
class ShardFile:
    """One unique shard of a parameter: who holds it, where it is stored, which boxes it has."""

    ranks: tuple[int, ...]
    file: str
    boxes: tuple[ShardBox, ...]
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter and its shards."""

    spec: TensorSpec
    shards: tuple[ShardFile, ...]


@dataclass(frozen=True)
class FileEntry:
    """Checksum (hexadecimal SHA-256) and size in bytes of a file of the directory."""

    sha256: str
    bytes: int

    def check_size(self, path: Path, owner: str, error: type[OnnxparRuntimeError]) -> None:
        """Raises `error` unless a file is there with this size.

        Args:
            path: The file.
            owner: What names it, for the message.
            error: What is raised.
        """
        try:
            size = path.stat().st_size
        except OSError:
            raise error(f"{path}: missing, though the {owner} names it") from None
        if size != self.bytes:
            state = "truncated" if size < self.bytes else "changed"
            raise error(f"{path}: {state}, expected {self.bytes} bytes, got {size} bytes")


@dataclass(frozen=True)
class Loss:
    """The loss that is trained on.

    Attributes:
        kind: `softmax_cross_entropy`, `mse`, `mae`, `bce`, or `output` for one of the model's own.
        labels: Name of the input with the labels, or None.
        ignore_index: The label that does not count, or None.
        count: What its mean is over, as a size expression; None where that is not known, and a
            batch counts by its rows.
    """

    kind: str
    labels: str | None
    ignore_index: int | None
    count: Size | None


STATE_KINDS = ("parameter", "gradient", "micro_gradient", "moment1", "moment2", "statistic")


FROM_FILES = ("parameter", "statistic")
"""Kinds of states that are weights of the model."""


@dataclass(frozen=True)
class State:
    """A tensor that the runtime keeps between runs, on the device, and updates in place.

    Attributes:
        spec: Its name and global shape, and how it is cut. Its sizes are integers.
        kind: One of `STATE_KINDS`.
        parameter: The parameter that it is, or belongs to; of a statistic the statistic itself.
        partial: Atoms over whose ranks the stored values have still to be added up.
        stages: The stages of the pipeline that hold it.
        partial_stages: Whether those stages' values have still to be added up.
    """

    spec: TensorSpec
    kind: str
    parameter: str
    partial: tuple[int, ...]
    stages: tuple[int, ...] = (0,)
    partial_stages: bool = False


@dataclass(frozen=True)
class TrainingTensor:
    """A weight of the model, and whether it is trained.

    Attributes:
        name: Its name.
        elements: Number of its elements.
        trained: Whether the optimizer changes it.
        parameter: Whether it is a parameter; others are constants and running statistics.
        reason: Why it is not trained; empty where it is.
        rule: By what that is known.
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
    """What an artifact for training says beside its programs.

    Attributes:
        loss: The loss.
        optimizer: Kind of the optimizer: `sgd`, `momentum`, `adam`, `adamw` or `lamb`.
        states: By name.
        tensors: The weights, trained or not.
        notices: What the user should hear of.
        spec: What was asked for, as the transformer understood it.
        compute: The 16-bit type that products are computed in, with float32 parameters; None where
            there is none.
    """

    loss: Loss
    optimizer: str
    states: Mapping[str, State]
    tensors: tuple[TrainingTensor, ...]
    notices: tuple[str, ...]
    spec: Mapping[str, Any]
    compute: str | None = None


@dataclass(frozen=True)
class Contents:
    """An artifact directory's contents.

    Attributes:
        directory: The directory.
        generator: Name and version of what wrote it.
        model: Name of the model.
        axes: Named mesh axes with their sizes, major first.
        atoms: Sizes of the atoms, major first.
        devices: Number of ranks.
        symbols: Constraints by name.
        programs: By name.
        parameters: By name.
        files: Checksums by file name.
        strategy: The strategy as resolved.
        replicated: Nodes that every rank computes whole, with the reason.
        training: What there is to say about training; None where the artifact is for inference.
        pipeline: The stages; None where there is one.
    """

    directory: Path
    generator: str
    model: str
    axes: tuple[tuple[str, int], ...]
    atoms: tuple[int, ...]
    devices: int
    symbols: Mapping[str, SymbolEntry]
    programs: Mapping[str, ProgramEntry]
    parameters: Mapping[str, Parameter]
    files: Mapping[str, FileEntry]
    strategy: Mapping[str, Any]
    replicated: tuple[Mapping[str, Any], ...]
    training: Training | None = None
    pipeline: Pipeline | None = None

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

"""The records of a manifest about symbols, tensors, programs, parameters and files.

Sizes are integers or integer arithmetic over the symbols' names. The fields have the order of the
file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import gt
from typing import Annotated, NamedTuple

from onnxpar_format.boxes import ShardBox, SizedSharding
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.expressions import Size, evaluate
from onnxpar_format.records import KEYED, NONE_GIVEN, OPTIONAL, Check, Key, Problem

COUNTERS = ("seed", "step", "micro_batch")
"""The keys of random numbers, besides the node that draws them."""
SECOND = "onnxpar.second."
"""Prefix of the names of what a program of two micro-batches reads for the second one."""
_NO_SYMBOLS: Mapping[str, int] = {}


def one_of(values: Sequence[str]) -> Check:
    """Returns the check that a text is one of some values."""
    return Check(f"one of {[str(v) for v in values]}", frozenset(values).__contains__)


def is_file_name(name: str) -> bool:
    """Whether a name is that of a file in the folder itself."""
    # onnxruntime refuses external data outside a model's folder, and a foreign manifest must not
    # make the runtime read other files.
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


FileName = Annotated[str, Check("a file name without folders", is_file_name)]
Digest = Annotated[str, Check("64 hexadecimal digits", _is_digest)]
ElementName = Annotated[str, one_of(sorted(DTYPES))]
"""ONNX's name of the element type in lower case (`float32`)."""
Positive = Annotated[int, Check("a number >= 1", lambda number: number >= 1)]


@dataclass(frozen=True)
class SymbolSizes:
    """Constraint of a symbolic dim: its size is divisor·N + remainder, N ≥ 1, in [min, max].

    Attributes:
        max: Greatest size; no limit unless it is greater than `min`.
        min: Least size. 0 admits N = 0 too, as for a cache that is empty at first.
        divisor: The d of d·N + r, at least 1.
        remainder: The r of d·N + r, 0 ≤ r < d.
        unique: Whether all dims with this same constraint have one size. Dims with the same name in
            an ONNX model have one size in any case.
        per_rank: Whether data ranks may have different sizes.
    """

    max: int = 0
    min: int = 1
    divisor: int = 1
    remainder: int = 0
    unique: bool = False
    per_rank: bool = False

    @property
    def least(self) -> int:
        """The least size that `min`, `divisor` and `remainder` admit, or less."""
        return max(self.min, self.remainder + (self.divisor if self.min else 0))


@dataclass(frozen=True)
class SymbolEntry(SymbolSizes):
    """A symbol of a manifest.

    Attributes:
        same_as: Another symbol whose value this one must have.
    """

    same_as: Annotated[str | None, OPTIONAL] = None

    @property
    def constraint(self) -> str:
        """The constraint for people: `8*N, N >= 1, at most 512`, or `at least 1`."""
        if self.divisor == 1:
            text = f"at least {self.least}"
        else:
            text = f"{self.divisor}*N" + (f" + {self.remainder}" if self.remainder else "")
            text += f", N >= {int(self.min > 0)}"
            text += f", at least {self.min}" if self.min > self.divisor + self.remainder else ""
        return text + (f", at most {self.max}" if self.max > self.min else "")

    def admits(self, value: int) -> bool:
        """Whether the constraint holds for `value`."""
        if value < self.least:
            return False
        if self.max > self.min and value > self.max:
            return False
        return value % self.divisor == self.remainder

    def admissible(self, start: int, count: int) -> list[int]:
        """Returns up to `count` admissible values from `start` on, ascending."""
        first = max(start, self.least)
        first += (self.remainder - first) % self.divisor
        values = range(first, first + count * self.divisor, self.divisor)
        return [v for v in values if self.admits(v)]

    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong between fields."""
        if self.divisor < 1 or not 0 <= self.remainder < self.divisor:
            yield "", "divisor >= 1 and 0 <= remainder < divisor", vars(self)


class DimComponent(NamedTuple):
    """A component of a dim: its size, and the atoms that shard it."""

    size: Size
    atoms: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """One input, output, state or parameter: name, element type, and global shape with sharding.

    Attributes:
        name: Name in the original model and in the rank's graph.
        dtype: Name of the element type.
        shape: Global shape as size expressions.
        dims: Components of each dim.
    """

    name: str
    dtype: ElementName
    shape: tuple[Size, ...]
    dims: tuple[tuple[DimComponent, ...], ...]

    @property
    def split_atoms(self) -> tuple[int, ...]:
        """The atoms that shard it."""
        return tuple(a for dim in self.dims for _, atoms in dim for a in atoms)

    @property
    def pieces(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The atoms that shard each component of each dim."""
        return tuple(tuple(atoms for _, atoms in dim) for dim in self.dims)

    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong between fields."""
        if not all(self.dims):
            yield ".dims", "a list of components for each dim", self.dims
        if len(self.dims) != len(self.shape):
            yield ".shape", f"{len(self.dims)} sizes", self.shape
        for index, (size, dim) in enumerate(zip(self.shape, self.dims, strict=False)):
            parts = [n for n, _ in dim if isinstance(n, int)]
            if len(parts) == len(dim) and isinstance(size, int) and prod(parts) != size:
                yield f".shape[{index}]", f"the product of its components {parts}", size

    def sharding(
        self,
        atoms: tuple[int, ...],
        values: Mapping[str, int] = _NO_SYMBOLS,
        local: tuple[int, ...] | None = None,
    ) -> SizedSharding:
        """Returns how the tensor is sharded at these values of the symbols.

        Args:
            atoms: Sizes of the mesh's atoms.
            values: Values of the symbols.
            local: Local shape of a shard. It gives the size of a dim that is not sharded and whose
                expression has a symbol without a value (a size that depends on data).

        Raises:
            ExpressionError: A size cannot be evaluated and `local` does not give it.
        """
        dims: list[tuple[tuple[int, tuple[int, ...]], ...]] = []
        for index, dim in enumerate(self.dims):
            if len(dim) == 1 and not dim[0][1] and local is not None:
                dims.append(((local[index], ()),))
            else:
                dims.append(tuple((evaluate(size, values), by) for size, by in dim))
        return SizedSharding(atoms, tuple(dims))


@dataclass(frozen=True)
class SystemInput:
    """An input that the runtime fills.

    The loss weight is a float32 scalar, a hyperparameter a float64 scalar; all others are int64 of
    shape [1].

    Attributes:
        name: Name in the rank's graph.
        kind: Which of the following values it takes; or `loss_weight`, a factor of the loss; or
            `start_ahead`, 1 if the optimizer's program runs next, else 0; or `finish_later`, 1 if
            the next program finishes gathers of parameters, else 0; or `accumulate`, 1 in the last
            micro-batch of a step, 2 in the first, 3 in between, 0 if it is the only one.
        symbol: The symbol whose global value it takes.
        atom: The atom along which it takes the rank's coordinate.
        counter: The session's counter that it takes.
        hyperparameter: The hyperparameter that it takes (`lr`).
    """

    name: str
    kind: Annotated[
        str,
        one_of(
            (
                "symbol",
                "coordinate",
                "counter",
                "loss_weight",
                "hyperparameter",
                "start_ahead",
                "finish_later",
                "accumulate",
            )
        ),
    ]
    symbol: Annotated[str | None, OPTIONAL] = None
    atom: Annotated[int | None, OPTIONAL] = None
    counter: Annotated[str | None, OPTIONAL] = None
    hyperparameter: Annotated[str | None, OPTIONAL] = None

    @property
    def key(self) -> str:
        """The key of a counter or a loss weight among those of a run."""
        prefix = SECOND if self.name.startswith(SECOND) else ""
        return f"{prefix}{self.counter or self.kind}"

    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong between fields."""
        if self.kind == "counter" and self.counter not in COUNTERS:
            yield "", f"one of the counters {list(COUNTERS)}", self.counter
        if self.kind == "hyperparameter" and self.hyperparameter is None:
            yield ".hyperparameter", "its name", None


@dataclass(frozen=True)
class CollectiveEntry:
    """A collective operator of the program: what it sends, over which atoms, and why.

    Attributes:
        op: Operator of the domain `onnxpar`.
        node: Name of the node.
        value: Name of the global value.
        atoms: Atoms that span its groups.
        stages: The pipeline stages that span its groups; None for groups within a stage.
        bytes: Bytes that a rank sends, as a size expression (may be fractional).
        reason: Node and operand that need it.
        before: Layout before.
        after: Layout after.
        started_in: The program that starts it in the background; None for none.
        finished_in: The program that finishes it in the background; None for none.
    """

    op: str
    node: str
    value: str
    atoms: tuple[int, ...]
    stages: tuple[int, ...] | None
    bytes: Size
    reason: str
    before: str
    after: str
    started_in: Annotated[str | None, OPTIONAL] = None
    finished_in: Annotated[str | None, OPTIONAL] = None


@dataclass(frozen=True)
class EqualSizes:
    """Two dims of a node's operands that must have one size.

    Attributes:
        node: Name of the node.
        op_type: Its operator.
        values: Names of the two global values.
        dims: The dim of each.
        sizes: The size of each dim, as an expression.
    """

    node: str
    op_type: str
    values: tuple[str, str]
    dims: tuple[int, int]
    sizes: tuple[Size, Size]


@dataclass(frozen=True)
class IndexRangeEntry:
    """The range of the elements of an input that a node reads as indices.

    Attributes:
        node: Name of the node.
        op_type: Its operator.
        input: Name of the input.
        low: Least element, as an expression.
        high: Greatest element, as an expression.
        ignored: An element outside the range that is also allowed, or None.
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
class CarriedEntry:
    """An output of a forward program that is an input of its next run, such as a cache.

    Attributes:
        input: Name of the input. It is sharded as the output is.
        output: Name of the output.
        grows: The dim along which a run adds to it; None if it keeps its size.
        appends: Whether input and output may be one buffer, longer than what is in use; a run then
            writes only the new elements.
    """

    input: str
    output: str
    grows: int | None
    appends: bool


@dataclass(frozen=True)
class SuppliedEntry:
    """An input that takes its value from another program, which runs before, once.

    Attributes:
        input: Name of the input. It is sharded as the output is.
        source: Name of the other program.
        value: Name of its output, or of its input if `given`.
        given: Whether both programs take the same global input, each in its own sharding.
    """

    input: str
    source: Annotated[str, Key(("from",))]
    value: str
    given: bool


@dataclass(frozen=True)
class HandedEntry:
    """A tensor that a program of a pipeline hands to others, for the same micro-batch.

    Attributes:
        name: Name of the graph's output, and of the input of the programs that read it.
        dtype: Name of the element type.
        shape: Local sizes as expressions; None if they do not follow from the symbols.
    """

    name: str
    dtype: ElementName
    shape: tuple[Size, ...] | None


@dataclass(frozen=True)
class HandedInEntry(HandedEntry):
    """A tensor that a program of a pipeline takes from another.

    Attributes:
        source: The program that computes it.
    """

    source: Annotated[str, Key(("from",))]


@dataclass(frozen=True)
class ProgramEntry:
    """One program of the directory, a graph per rank.

    Attributes:
        name: `model`, …
        files: Graph file of each rank, None where it was not written.
        inputs: Inputs with global shapes.
        outputs: Outputs with global shapes; never partial.
        system_inputs: Inputs that the runtime fills.
        collectives: In the order in which every rank issues them.
        equal_sizes: Dims that operators need to be equal; a run checks them.
        index_ranges: Ranges of inputs that operators read as indices; a run checks them.
        state_inputs: Graph inputs that are states, by the state's name.
        state_outputs: Graph outputs that are new values of states.
        carried: Outputs that are inputs of the next run.
        supplied: Inputs that another program supplies.
        handed_in: Graph inputs that other programs of the pipeline compute.
        handed_out: Graph outputs that other programs of the pipeline read.
    """

    name: Annotated[str, KEYED]
    files: tuple[FileName | None, ...]
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]
    system_inputs: tuple[SystemInput, ...]
    collectives: tuple[CollectiveEntry, ...]
    equal_sizes: Annotated[tuple[EqualSizes, ...], OPTIONAL] = NONE_GIVEN
    index_ranges: Annotated[tuple[IndexRangeEntry, ...], OPTIONAL] = NONE_GIVEN
    state_inputs: Annotated[tuple[str, ...], OPTIONAL] = NONE_GIVEN
    state_outputs: Annotated[tuple[StateOutput, ...], OPTIONAL] = NONE_GIVEN
    carried: Annotated[tuple[CarriedEntry, ...], OPTIONAL] = NONE_GIVEN
    supplied: Annotated[tuple[SuppliedEntry, ...], OPTIONAL] = NONE_GIVEN
    handed_in: Annotated[tuple[HandedInEntry, ...], OPTIONAL] = NONE_GIVEN
    handed_out: Annotated[tuple[HandedEntry, ...], OPTIONAL] = NONE_GIVEN


@dataclass(frozen=True)
class ShardFile:
    """One shard of a parameter: the ranks that hold it, its file, its boxes and its shape."""

    ranks: tuple[int, ...]
    file: FileName
    boxes: tuple[ShardBox, ...]
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class ParameterEntry(TensorEntry):
    """A parameter and its shards. Any element type is allowed: only onnxruntime reads it."""

    name: Annotated[str, KEYED]
    dtype: str
    shards: tuple[ShardFile, ...]

    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong between fields."""
        yield from super().problems()
        sizes = [n for dim in self.dims for n, _ in dim]
        if not all(isinstance(n, int) and 0 <= n < 2**63 for n in (*sizes, *self.shape)):
            yield ".dims", "integer sizes of 0 to 2**63 - 1", sizes

    def shard_problems(self, sharding: SizedSharding, shard: ShardFile) -> Iterator[Problem]:
        """Yields how a shard differs from what the sharding says.

        Args:
            sharding: Of this parameter.
            shard: A shard whose first rank is that of a mesh.
        """
        if shard.local_shape != sharding.local_shape:
            yield ".local_shape", str(list(sharding.local_shape)), list(shard.local_shape)
        shapes = sharding.shape, shard.local_shape
        for box in shard.boxes:
            for key, ranges, shape in zip(
                ("global", "local"), (box.source, box.local), shapes, strict=True
            ):
                ends = [end for _, end in ranges]
                if len(ends) != len(shape) or any(map(gt, ends, shape)):
                    yield f".boxes.{key}", f"ranges of the shape {list(shape)}", ranges
            if box.lengths != tuple(end - start for start, end in box.local):
                yield ".boxes.local", f"ranges of the lengths {list(box.lengths)}", box.local
        held = sum(prod(box.lengths) for box in shard.boxes)
        valid = prod(sharding.unpadded_shape(shard.ranks[0] % prod(sharding.atoms)))
        if held != valid:
            yield ".boxes", f"{valid} elements of rank {shard.ranks[0]}", held


@dataclass(frozen=True)
class FileEntry:
    """Checksum (hexadecimal SHA-256) and size in bytes of a file of the directory."""

    sha256: Digest
    bytes: int

"""The schema of the strategy file, and `Strategy`, a strategy before it is applied to a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from onnxpar.core.errors import MeshError, StrategyError, short
from onnxpar.core.layout import REPLICATED
from onnxpar.core.mesh import Mesh
from onnxpar.core.name_patterns import nearest
from onnxpar.core.symbols import Symbol
from onnxpar.cost.optimizer_parallel import LEVELS, NOT_PARALLEL, THRESHOLD, OptimizerParallel
from onnxpar.graph.seeds import SPREAD
from onnxpar.strategy.annotation_reader import Annotation
from onnxpar.strategy.pipeline_entry import MicroBatches, PipelineEntry
from onnxpar.strategy.recompute_entry import NOTHING, RecomputeOptions, read_recompute
from onnxpar.strategy.tensor_entry import (
    DimEntry,
    TensorEntry,
    expected,
    names_in,
    read_split,
    read_tensor,
    read_tensors,
    run_of,
)
from onnxpar.strategy.validation_errors import in_words, problem
from onnxpar.strategy.yaml_document import Document, Location, parse_document, read_text
from onnxpar_format.option import parse_bytes

DATA_AXIS, PARAMETER_AXIS = "dp", "tp"
PIPELINE_AXIS = "pp"
"""In presets: the number of pipeline stages, each with the mesh of the other axes."""
MAX_DEVICES = 1 << 16
"""Each device has its own file, and all files are written before the directory appears."""
Rest = Literal["propagate", "data_parallel", "replicate", "search", "mindspore"]
SEARCH = "search"


def _dataset(entry: object) -> str | dict[str, TensorEntry]:
    if entry in ("data_parallel", "full_batch"):
        return str(entry)
    if isinstance(entry, Mapping):
        return {str(name): read_tensor(item) for name, item in entry.items()}
    raise expected("data_parallel, full_batch or a mapping of inputs", entry)


def _symbol(entry: object) -> Symbol:
    if isinstance(entry, Symbol):
        return entry
    if not isinstance(entry, Mapping):
        raise expected("constraints such as {divisor: 8, max: 512}", entry)
    known = Symbol.__dataclass_fields__
    for key in entry:
        if key not in known:
            raise ValueError(f"unknown key {key!r}{nearest(key, known)}")
    try:
        return Symbol(**entry)
    except TypeError as error:
        raise ValueError(str(error)) from None


_Tensors = Annotated[tuple[TensorEntry | None, ...], PlainValidator(read_tensors)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _number(entry: object) -> object:
    """Refuses a truth value, which Python takes for 0 or 1."""
    if isinstance(entry, bool):
        raise expected("a number", entry)
    return entry


class PartialEntry(_Section):
    """Operands of a node that stay partial, so that its output is partial.

    Attributes:
        operands: Their indices; all operands that must be partial together.
        axes: The mesh axes over which they are partial.
        reduction: The reduction that has not been done yet.
    """

    operands: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    axes: Annotated[list[str], Field(min_length=1)]
    reduction: Literal["sum", "prod", "max", "min"] = "sum"


class NodeEntry(_Section):
    """What the user wants of one node.

    Attributes:
        inputs: An entry for each operand (key `in`), None if it follows from the others.
        out: An entry for each output: its layout after a reshard.
        partial: Operands that stay partial.
        split: An entry for each factor of its rule that is sharded and that no operand has.
    """

    inputs: _Tensors | None = Field(default=None, alias="in")
    out: _Tensors | None = None
    partial: PartialEntry | None = None
    split: Annotated[dict[str, DimEntry], PlainValidator(read_split)] | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        more = self.partial is not None or self.split is not None
        if self.inputs is None and (self.out is None or more):
            raise ValueError("expected 'in', 'out' or both, got neither")
        return self


class TargetEntry(_Section):
    """What a strategy is for: the machine, and the sizes at which times and bytes are compared.

    Attributes:
        memory: Bytes that a device may hold; by default the memory of the machine.
        machine: A preset or a machine file.
        sizes: Sizes of symbols; the others have their typical size.
    """

    memory: Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)] | None = None
    machine: str = "cpu"
    sizes: dict[str, Annotated[int, Field(ge=1)]] = {}


class SearchEntry(TargetEntry):
    """How to search for what the other entries leave open, and for what.

    Attributes:
        algorithm: `recursive` halves the devices again and again; `ilp` is exact.
        level: The objective: 0 for little communication, 1 for little memory, 2 for speed.
    """

    algorithm: Literal["recursive", "ilp"] = "recursive"
    level: Annotated[Literal[0, 1, 2], BeforeValidator(_number)] = 2


class OptimizerParallelEntry(_Section):
    """How the states of training are sharded over the replicas of a parameter.

    Attributes:
        level: 0 for nothing, 1 for moments, 2 also for gradients, 3 also for parameters.
        threshold: Shards of a parameter with fewer bytes than this stay replicated.
        group: The most replicas over which one shard is sharded further.
    """

    level: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_number)]
    threshold: Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)] = THRESHOLD
    group: Annotated[int, Field(ge=2)] | None = None


class StrategyFile(_Section):
    """The keys of a strategy file, which `Strategy` describes."""

    mesh: dict[str, int] | None = None
    devices: int | None = None
    symbols: dict[str, Annotated[Symbol, PlainValidator(_symbol)]] = {}
    dataset: Annotated[str | dict[str, TensorEntry], PlainValidator(_dataset)] | None = None
    parameters: dict[str, Annotated[TensorEntry, PlainValidator(read_tensor)]] = {}
    parameter_axes: list[str] | None = None
    nodes: dict[str, NodeEntry] = {}
    rest: Rest | None = None
    search: SearchEntry | None = None
    target: TargetEntry | None = None
    optimizer_parallel: OptimizerParallelEntry | None = None
    pipeline: PipelineEntry | None = None
    atoms: list[Annotated[int, Field(ge=2)]] = []
    given: list[str] | None = None
    recompute: Annotated[RecomputeOptions, PlainValidator(read_recompute)] | None = None
    micro_batches: MicroBatches | None = None
    pair_micro_batches: bool | None = None


@dataclass(frozen=True)
class Strategy:
    """A strategy that was checked without a model; `resolve` checks it against a model.

    Attributes:
        source: File name or preset, for messages.
        devices: Number of devices of the mesh of one stage.
        axes: Named mesh axes, major first; empty if the strategy has only numbers of shards.
        symbols: Constraints on the symbols of the model.
        dataset: "data_parallel", "full_batch", entries of graph inputs by name, or "search": the
            search decides.
        parameters: Entries of initializers, by name or pattern.
        parameter_axes: Axes that shard parameters wherever that is cheapest.
        nodes: Entries of nodes, by name or pattern.
        rest: What happens to nodes without an entry.
        search: How to search, if `rest` is "search"; else only what the strategy is for.
        optimizer_parallel: Optimizer parallel, in training.
        pipeline: How the model is split into stages; None for a single stage.
        recompute: What is recomputed in training.
        document: The file, for the lines of entries.
        annotation: The model's annotation, which replaces all entries except `symbols`.
        atoms: The atoms of the mesh, if the other entries do not determine them.
        micro_batches: Micro-batches of a step of training, in one stage; None: whatever the
            command says. A pipeline has its own number.
        pair_micro_batches: Whether two micro-batches of a step of training take turns in one
            program; None: a search decides, without one they do not.
        given: The nodes whose entries come from the user, in a file that also has entries that
            followed from them; None if all do. If set, there may be entries for nodes that
            differentiation adds.
    """

    source: str
    devices: int
    axes: Mapping[str, int] = field(default_factory=dict)
    symbols: Mapping[str, Symbol] = field(default_factory=dict)
    dataset: str | Mapping[str, TensorEntry] = "data_parallel"
    parameters: Mapping[str, TensorEntry] = field(default_factory=dict)
    parameter_axes: tuple[str, ...] = ()
    nodes: Mapping[str, NodeEntry] = field(default_factory=dict)
    rest: Rest = "propagate"
    search: SearchEntry = field(default_factory=SearchEntry)
    optimizer_parallel: OptimizerParallel = NOT_PARALLEL
    pipeline: PipelineEntry | None = None
    recompute: RecomputeOptions = NOTHING
    document: Document = field(default_factory=lambda: Document({}, "strategy"), compare=False)
    annotation: Annotation | None = None
    atoms: tuple[int, ...] = ()
    micro_batches: int | None = None
    pair_micro_batches: bool | None = None
    given: frozenset[str] | None = None

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return 1 if self.pipeline is None else self.pipeline.stages

    @property
    def step_micro_batches(self) -> int | None:
        """Micro-batches of a step, of one stage or of a pipeline; None if it does not say."""
        return self.micro_batches if self.pipeline is None else self.pipeline.micro_batches

    @property
    def world(self) -> int:
        """Number of devices of all stages."""
        return self.devices * self.stages

    @staticmethod
    def from_dict(
        data: Mapping[str, Any], devices: int | None = None, source: str = "strategy"
    ) -> "Strategy":
        """Returns a strategy from the content of a strategy file as Python data.

        Lists may be tuples; entries of tensors may be `TensorLayout`, those of symbols `Symbol`.

        Args:
            data: The content.
            devices: Number of devices, if the data does not give it.
            source: A name for messages.

        Raises:
            StrategyError: A key is unknown, an entry is malformed, or the number of devices is
                missing or contradictory.
        """
        return _strategy(Document(data, source), devices)

    @staticmethod
    def from_text(
        text: str, devices: int | None = None, source: str = "strategy.yaml"
    ) -> "Strategy":
        """Returns a strategy from the text of a strategy file; as `from_dict` otherwise."""
        return _strategy(parse_document(text, source), devices)

    @staticmethod
    def from_file(path: Path, devices: int | None = None) -> "Strategy":
        """Returns a strategy from a strategy file; as `from_dict` otherwise."""
        return Strategy.from_text(read_text(path), devices, str(path))

    @staticmethod
    def from_annotation(annotation: Annotation) -> "Strategy":
        """Returns the strategy of an annotated model.

        Raises:
            StrategyError: Its metadata about a pipeline is contradictory.
        """
        return Strategy(
            annotation.source,
            annotation.devices,
            annotation.extras.axes,
            annotation.symbols,
            pipeline=_annotated_pipeline(annotation),
            annotation=annotation,
        )

    def at_level(self, level: int) -> "Strategy":
        """Returns the strategy with another level of optimizer parallel.

        Raises:
            StrategyError: There is no such level.
        """
        if level not in LEVELS:
            raise StrategyError(f"optimizer parallel: expected a level from 0 to 3, got {level}")
        return replace(self, optimizer_parallel=replace(self.optimizer_parallel, level=level))

    def where(self, *location: str | int) -> str:
        """Returns the place of a key for messages."""
        return self.document.where(location)


def _strategy(document: Document, devices: int | None) -> Strategy:
    data = document.data
    if not isinstance(data, Mapping):
        raise StrategyError(
            f"{document.where()}: expected a mapping with keys such as mesh and nodes, "
            f"got {short(data)}"
        )
    try:
        parsed = StrategyFile.model_validate(dict(data))
    except ValidationError as error:
        raise StrategyError(_message(document, error.errors()[0])) from None
    axes = parsed.mesh or {}
    _check_axes(document, parsed)
    if parsed.pair_micro_batches and parsed.pipeline is not None:
        raise StrategyError(
            f"{document.where(('pair_micro_batches',))}: expected no 'pipeline', since its stages "
            "work on several micro-batches already, got pair_micro_batches: true and a pipeline"
        )
    if parsed.micro_batches is not None and parsed.pipeline is not None:
        raise StrategyError(
            f"{document.where(('micro_batches',))}: expected the micro-batches of a pipeline under "
            f"'pipeline', got micro_batches: {parsed.micro_batches} and a pipeline"
        )
    count = _devices(document, parsed, devices)
    _check_names(document, parsed, count)
    rest: Rest = parsed.rest or ("propagate" if parsed.search is None else "search")
    if parsed.search is not None and rest != SEARCH:
        raise StrategyError(
            f"{document.where(('search',))}: expected 'rest: {SEARCH}', because the key "
            f"'search' is present, got {rest!r}"
        )
    if parsed.search is not None and parsed.target is not None:
        raise StrategyError(
            f"{document.where(('target',))}: expected 'search' or 'target', got both"
        )
    target = {} if parsed.target is None else parsed.target.model_dump(exclude_unset=True)
    return Strategy(
        document.source,
        count,
        axes,
        parsed.symbols,
        parsed.dataset or (SEARCH if rest == SEARCH else "data_parallel"),
        parsed.parameters,
        () if rest in (SEARCH, SPREAD) else _parameter_axes(parsed),
        parsed.nodes,
        rest,
        parsed.search or SearchEntry(**target),
        _parallel(parsed.optimizer_parallel),
        parsed.pipeline,
        replace(parsed.recompute or NOTHING, where=document.where(("recompute",))),
        document,
        atoms=tuple(parsed.atoms),
        micro_batches=parsed.micro_batches,
        pair_micro_batches=parsed.pair_micro_batches,
        given=None if parsed.given is None else frozenset(parsed.given),
    )


def _annotated_pipeline(annotation: Annotation) -> PipelineEntry | None:
    """The pipeline of an annotation, whose nodes have their virtual stages."""
    schedule = annotation.extras.pipeline
    if schedule is None and annotation.stages == 1:
        return None
    known = {} if schedule is None else schedule.model_dump()
    return PipelineEntry(stages=annotation.stages, **known)


def _parallel(entry: OptimizerParallelEntry | None) -> OptimizerParallel:
    return NOT_PARALLEL if entry is None else OptimizerParallel(**entry.model_dump())


_SECTIONS: Mapping[str | int, type[BaseModel]] = {
    "nodes": NodeEntry,
    "search": SearchEntry,
    "target": TargetEntry,
    "optimizer_parallel": OptimizerParallelEntry,
    "pipeline": PipelineEntry,
}


def _keys(section: type[BaseModel]) -> list[str]:
    return [f.alias or name for name, f in section.model_fields.items()]


def _message(document: Document, error: ErrorDetails) -> str:
    location: Location = error["loc"]
    # Data without a file have no lines; the message names the keys anyway.
    where = document.where(location) if document.lines else document.source
    if error["type"] == "extra_forbidden":
        names = _SECTIONS.get(location[0], StrategyFile) if len(location) > 1 else StrategyFile
        keys = _keys(names)
        inside = "" if len(location) == 1 else " in " + ": ".join(map(repr, location[:-1]))
        return f"{where}: unknown key {location[-1]!r}{inside}{nearest(str(location[-1]), keys)}"
    place = f"{where}: {in_words(location)}"
    if error["type"] in ("model_type", "model_attributes_type"):
        known = ", ".join(map(repr, _keys(_SECTIONS.get(location[0], StrategyFile))))
        return f"{place}expected a mapping with the keys {known}, got {short(error['input'])}"
    return f"{place}{problem(error)}"


def _entries(parsed: StrategyFile) -> list[tuple[Location, TensorEntry]]:
    """Every tensor entry with its location."""
    found: list[tuple[Location, TensorEntry]] = []
    if isinstance(parsed.dataset, dict):
        found += [(("dataset", name), entry) for name, entry in parsed.dataset.items()]
    found += [(("parameters", name), entry) for name, entry in parsed.parameters.items()]
    for name, node in parsed.nodes.items():
        found += [(("nodes", name, "split", n), (dim,)) for n, dim in (node.split or {}).items()]
        for key, tensors in (("in", node.inputs), ("out", node.out)):
            found += [
                (("nodes", name, key, index), entry)
                for index, entry in enumerate(tensors or ())
                if entry is not None
            ]
    return found


def _check_axes(document: Document, parsed: StrategyFile) -> None:
    axes = parsed.mesh or {}
    if parsed.mesh is not None and not axes:
        raise StrategyError(f"{document.where(('mesh',))}: expected mesh axes, got none")
    for name, size in axes.items():
        if size > MAX_DEVICES:
            raise StrategyError(
                f"{document.where(('mesh', name))}: expected at most {MAX_DEVICES} devices, "
                f"got {size}"
            )
    try:
        Mesh.of(axes)
    except MeshError as error:
        raise StrategyError(f"{document.where(('mesh',))}: {error}") from None
    if REPLICATED in axes:
        raise StrategyError(
            f"{document.where(('mesh', REPLICATED))}: expected a name for the mesh "
            f"axis, got {REPLICATED!r}, which means a replicated dim"
        )


def _check_names(document: Document, parsed: StrategyFile, devices: int) -> None:
    """Checks that entries name mesh axes, or runs of devices."""
    axes = parsed.mesh or {}
    partials: list[tuple[Location, TensorEntry]] = [
        (("nodes", name, "partial"), (tuple(node.partial.axes),))
        for name, node in parsed.nodes.items()
        if node.partial is not None
    ]
    for location, entry in (*_entries(parsed), *partials):
        for name in names_in(entry):
            if not _is_axis(name, axes, devices):
                raise StrategyError(
                    f"{document.where(location)}: {location[0]} {location[1]!r}: expected a mesh "
                    f"axis, got {name!r}{nearest(name, axes)}"
                )
    if parsed.atoms and prod(parsed.atoms) != devices:
        raise StrategyError(
            f"{document.where(('atoms',))}: expected prime factors of {devices} devices, got "
            f"{parsed.atoms}"
        )
    for name in parsed.parameter_axes or ():
        if name not in axes:
            raise StrategyError(
                f"{document.where(('parameter_axes',))}: expected mesh axes, got {name!r}"
                f"{nearest(name, axes)}"
            )


def _is_axis(name: str, axes: Mapping[str, int], devices: int) -> bool:
    """Whether a name is a mesh axis, or a run of devices such as `4@2`."""
    run = run_of(name)
    return name in axes or (run is not None and devices % (run[0] * run[1]) == 0)


def _parameter_axes(parsed: StrategyFile) -> tuple[str, ...]:
    """The axes that shard parameters without an entry.

    These are the axes that the file names; else `tp`, and every axis but `dp` that no entry uses.
    `tp` is included even if entries use it, so that other parameters are sharded as in the preset.
    """
    if parsed.parameter_axes is not None:
        return tuple(dict.fromkeys(parsed.parameter_axes))
    placed = {name for _, entry in _entries(parsed) for name in names_in(entry)}
    free = set(parsed.mesh or {}) - placed - {DATA_AXIS} | {PARAMETER_AXIS}
    return tuple(name for name in parsed.mesh or {} if name in free)


def _devices(document: Document, parsed: StrategyFile, given: int | None) -> int:
    """The number of devices of a stage, on which file, mesh and command line must agree."""
    stages = parsed.pipeline.stages if parsed.pipeline is not None else 1
    of_stages = f" in {stages} stages" if stages > 1 else ""
    sources = []
    if given is not None:
        sources.append(("--devices", given, document.where()))
    if parsed.mesh:
        size = prod(parsed.mesh.values()) * stages
        axes = " x ".join(f"{name}={axis}" for name, axis in parsed.mesh.items())
        sources.append((f"the mesh {axes}{of_stages}", size, document.where(("mesh",))))
    if parsed.devices is not None:
        sources.append(("'devices'", parsed.devices, document.where(("devices",))))
    if not sources:
        raise StrategyError(
            f"{document.where()}: expected a mesh, 'devices' or --devices, got none of them"
        )
    first, count, _ = sources[0]
    for what, number, where in sources:
        if not 1 <= number <= MAX_DEVICES:
            raise StrategyError(
                f"{where}: {what}: expected from 1 to {MAX_DEVICES} devices, got {number}"
            )
        if number != count:
            raise StrategyError(
                f"{where}: expected {count} devices, as {first} has, got {number} from {what}"
            )
    if count % stages:
        raise StrategyError(
            f"{document.where(('pipeline', 'stages'))}: expected a number of stages that divides "
            f"the {count} devices, got {stages}"
        )
    return count // stages

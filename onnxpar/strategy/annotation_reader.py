"""ONNX's multi-device annotations (IR version 11), read from a model of any producer and checked.

The ONNX checker ignores these fields. Read are `ModelProto.configuration`, and for each node
`device_configurations` with a `sharding_spec` for some of its operands and results. A spec lists
devices in the order of the shards; shards are numbered row by row over the sharded axes of the
tensor, in the tensor's order. An entry of the list is a device, or the key of a group of devices
that all hold the shard. `pipeline_stage` is the node's virtual stage (see
`onnxpar.stages.partition_chain`); the devices of a stage are neighbours, those of stage 0 first.

Facts for which there are no fields are in the model's metadata under `ANNOTATION`. Only `onnxpar
annotate` writes them: names of mesh axes, constraints on symbols, layouts of graph inputs and
parameters, the schedule of a pipeline, and which nodes have entries from the user. Partial values
cannot be annotated; they follow from the operands (see `onnxpar.strategy.annotation_seeds`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import onnx
import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, ValidationError

from onnxpar.core.errors import MeshError, StrategyError
from onnxpar.core.mesh import Mesh
from onnxpar.core.symbols import Symbol
from onnxpar.graph.metadata_keys import ANNOTATION
from onnxpar.strategy.pipeline_entry import Count, ScheduleEntry
from onnxpar.strategy.validation_errors import in_words, problem

MAX_DEVICES = 1 << 16
MIN_IR_VERSION = 11
"""The first version that has the fields."""

Piece = tuple[int | str | None, int]
"""The size of a part of a dim, if it is given, and its number of shards."""


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is sharded.

    Attributes:
        groups: For each shard the devices that hold it, ascending, counted from the first device of
            the node's stage. Each device of the stage occurs once.
        dims: The axes that are named, each with its parts, major first.
    """

    groups: tuple[tuple[int, ...], ...]
    dims: tuple[tuple[int, tuple[Piece, ...]], ...]


@dataclass(frozen=True)
class _Node:
    """A node with names for its tensors.

    Attributes:
        name: The node's name, which may be empty.
        op_type: Its operator.
        inputs: Names of its operands.
        outputs: Names of its results.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def title(self) -> str:
        """The node in messages."""
        return f"node {self.name or '/'.join(self.outputs)!r} ({self.op_type})"


@dataclass(frozen=True)
class NodeSpec(_Node):
    """The annotation of one node.

    Attributes:
        tensors: The tensors that are annotated, by name.
        stage: Its virtual stage, if it is given.
    """

    tensors: Mapping[str, TensorSpec]
    stage: int | None


DeviceRuns = list[list[tuple[int | str, list[tuple[Count, Count]]]]]
"""For each dim its parts, major first; none if it is replicated. A part is a size, and runs of
devices `(shards, distance of neighbours)`, outermost first."""


class Extras(BaseModel):
    """The content of the metadata.

    Attributes:
        axes: Named mesh axes, major first; none if the strategy has numbers of shards.
        atoms: The atoms of the mesh, if its axes do not determine them.
        symbols: Constraints on symbols.
        inputs: The layouts of graph inputs.
        parameters: The layouts of parameters that differ from what their first reader wants.
        pinned: The nodes with entries from the user, if the others followed from them; None if all
            have entries from the user.
        carried: The nodes that take partial operands; None for all that can.
        pipeline: How a pipeline runs; None without a pipeline, or if it is not known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    axes: dict[str, Count] = {}
    atoms: list[Count] = []
    symbols: dict[str, dict[str, Any]] = {}
    inputs: dict[str, DeviceRuns] = {}
    parameters: dict[str, DeviceRuns] = {}
    pinned: list[str] | None = None
    carried: list[str] | None = None
    pipeline: ScheduleEntry | None = None


@dataclass(frozen=True)
class Annotation:
    """The annotation of a model, checked without the model.

    Attributes:
        source: Where it was read, for messages.
        devices: Number of devices of a stage.
        nodes: The nodes that are annotated, in the order of the graph.
        extras: The content of the metadata.
        symbols: Its constraints on symbols.
        stages: Number of pipeline stages.
    """

    source: str
    devices: int
    nodes: tuple[NodeSpec, ...]
    extras: Extras = field(default_factory=Extras)
    symbols: Mapping[str, Symbol] = field(default_factory=dict)
    stages: int = 1


@dataclass(frozen=True)
class _Configured(_Node):
    """A node of a file or in memory, with its annotations for all configurations."""

    configurations: Sequence[onnx.NodeDeviceConfigurationProto]


_Entry = onnx.NodeDeviceConfigurationProto | None
"""The annotation of a node for the configuration that is carried out."""


def read_annotation(
    model: onnx.ModelProto | ir.Model, source: str, devices: int | None = None
) -> Annotation | None:
    """Returns the annotation of a model; None if no node has one.

    Args:
        model: The model; it is not changed.
        source: Name of the model in messages.
        devices: The number of devices wanted; it selects one of several configurations.

    Raises:
        StrategyError: The annotation is malformed, is for another number of devices, or cannot be
            carried out.
    """
    if isinstance(model, ir.Model):
        known = [(c.name, c.num_devices, c.device_names) for c in model.device_configurations]
        nodes = [_of_memory(node) for node in model.graph if node.device_configurations]
        bodies = [g for g in (*model.graphs(), *model.functions.values()) if g is not model.graph]
        inner = _in_bodies(n for g in bodies for n in g if n.device_configurations)
        metadata: Mapping[str, str] = model.metadata_props
    else:
        known = [(c.name, c.num_devices, tuple(c.device)) for c in model.configuration]
        nodes = [_of_file(node) for node in model.graph.node if node.device_configurations]
        inner = _in_bodies(n for n in nodes_of_bodies(model) if n.device_configurations)
        metadata = {p.key: p.value for p in model.metadata_props}
    if inner:
        raise StrategyError(
            f"{source}: {inner}: expected annotations only on nodes of the main graph, got one "
            "inside a function or control-flow body"
        )
    if not nodes:
        return None
    sizes = _configurations(source, known)
    chosen = _chosen(source, nodes, sizes, devices)
    mine = [(node, _configuration(source, node, chosen)) for node in nodes]
    virtual_stages = _virtual_stages(source, mine)
    extras = _extras(source, metadata.get(ANNOTATION))
    stages = _stages(source, virtual_stages, sizes[chosen], extras)
    size = sizes[chosen] // stages
    specs = tuple(_node(source, node, entry, size, virtual_stages, stages) for node, entry in mine)
    if virtual_stages == 1 and not any(spec.tensors for spec in specs):
        return None
    symbols = _checked(source, extras, size)
    return Annotation(source, size, specs, extras, symbols, stages)


def _of_file(node: onnx.NodeProto) -> _Configured:
    return _Configured(
        node.name,
        node.op_type,
        tuple(node.input),
        tuple(node.output),
        tuple(node.device_configurations),
    )


def _of_memory(node: ir.Node) -> _Configured:
    try:
        found = [*map(ir.serde.serialize_node_device_configuration, node.device_configurations)]
    except ValueError as error:
        raise StrategyError(f"node {node.name!r} ({node.op_type}): {error}") from None
    return _Configured(
        node.name or "",
        node.op_type,
        tuple("" if v is None else v.name or "" for v in node.inputs),
        tuple(v.name or "" for v in node.outputs),
        found,
    )


def nodes_of_bodies(model: onnx.ModelProto) -> Iterable[onnx.NodeProto]:
    """Returns the nodes of functions and of the graphs that are attributes of nodes."""
    inner = [node for function in model.functions for node in function.node]
    yield from inner
    for graph in inner_graphs((*inner, *model.graph.node)):
        yield from graph.node


def inner_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterable[onnx.GraphProto]:
    """Returns the graphs that are attributes of nodes, and the graphs inside them."""
    waiting = list(nodes)
    while waiting:
        for attribute in waiting.pop().attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield graph
                waiting += graph.node


def _in_bodies(nodes: Iterable[ir.Node | onnx.NodeProto]) -> str:
    """Names the first of some nodes; empty if there is none."""
    return next((f"node {n.name!r} ({n.op_type})" for n in nodes), "")


# -- configurations ------------------------------------------------------------------------------


def _configurations(source: str, known: Iterable[tuple[str, int, Sequence[str]]]) -> dict[str, int]:
    """Number of devices of each configuration, by name."""
    sizes: dict[str, int] = {}
    for name, count, devices in known:
        title = f"{source}: configuration {name!r}"
        if not name or name in sizes:
            raise StrategyError(f"{title}: expected configurations with distinct names")
        if not 1 <= count <= MAX_DEVICES:
            raise StrategyError(f"{title}: expected from 1 to {MAX_DEVICES} devices, got {count}")
        if devices and len(devices) != count:
            raise StrategyError(
                f"{title}: expected {count} device names or none, got {len(devices)}"
            )
        sizes[name] = count
    return sizes


def _chosen(
    source: str, nodes: Sequence[_Configured], sizes: Mapping[str, int], devices: int | None
) -> str:
    """The name of the configuration that is carried out."""
    used: dict[str, None] = {}
    for node in nodes:
        for entry in node.configurations:
            name = entry.configuration_id
            if name not in sizes:
                raise StrategyError(
                    f"{source}: {node.title}: expected a configuration of the model, one of "
                    f"{sorted(sizes)}, got {name!r}"
                )
            used[name] = None
    fitting = [name for name in used if devices in (None, sizes[name])]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(f"{name!r} ({sizes[name]} devices)" for name in used)
    if not fitting:
        raise StrategyError(
            f"{source}: expected an annotation for the {devices} requested devices, got {shown}"
        )
    raise StrategyError(
        f"{source}: expected one configuration, got {shown}; select one with --devices"
    )


# -- nodes and tensors ---------------------------------------------------------------------------


def _configuration(source: str, node: _Configured, chosen: str) -> _Entry:
    """The annotation of a node for the configuration that is carried out."""
    mine = [c for c in node.configurations if c.configuration_id == chosen]
    if len(mine) > 1:
        raise StrategyError(
            f"{source}: {node.title}: expected {chosen!r} once, got it {len(mine)} times"
        )
    return mine[0] if mine else None


def _stage(entry: _Entry) -> int | None:
    if entry is None or not entry.HasField("pipeline_stage"):
        return None
    return int(entry.pipeline_stage)


def _virtual_stages(source: str, nodes: Sequence[tuple[_Configured, _Entry]]) -> int:
    """The number of virtual stages, each of which must have a node."""
    first: dict[int, _Node] = {}
    for node, entry in nodes:
        stage = _stage(entry)
        if stage is None:
            continue
        if not 0 <= stage < MAX_DEVICES:
            raise StrategyError(
                f"{source}: {node.title}: expected a pipeline stage from 0 to {MAX_DEVICES - 1}, "
                f"got {stage}"
            )
        first.setdefault(stage, node)
    last = max(first, default=0)
    missing = next((n for n in range(last) if n not in first), None)
    if missing is not None:
        raise StrategyError(
            f"{source}: {first[last].title} is in pipeline stage {last}: expected at least one "
            f"node in every earlier stage, got none in stage {missing}"
        )
    return last + 1


def _stages(source: str, virtual_stages: int, devices: int, extras: Extras) -> int:
    """Number of pipeline stages, each of which has one virtual stage for each chunk."""
    chunks = 1 if extras.pipeline is None else extras.pipeline.chunks
    if virtual_stages % chunks:
        raise StrategyError(
            f"{source}: metadata {ANNOTATION!r}: expected a number of chunks that divides the "
            f"{virtual_stages} pipeline stages of the nodes, got {chunks}"
        )
    if devices % (virtual_stages // chunks):
        raise StrategyError(
            f"{source}: expected a number of pipeline stages that divides the {devices} devices of "
            f"the configuration, got {virtual_stages // chunks}"
        )
    return virtual_stages // chunks


def _node(
    source: str,
    node: _Configured,
    entry: _Entry,
    devices: int,
    virtual_stages: int,
    stages: int,
) -> NodeSpec:
    title, stage = f"{source}: {node.title}", _stage(entry)
    tensors: dict[str, TensorSpec] = {}
    for spec in entry.sharding_spec if entry is not None else ():
        if stage is None and virtual_stages > 1:
            raise StrategyError(
                f"{title}: expected a pipeline stage, since other nodes have one, got none"
            )
        name = spec.tensor_name
        if not name or name not in (*node.inputs, *node.outputs):
            names = [n for n in (*node.inputs, *node.outputs) if n]
            raise StrategyError(
                f"{title}: expected a tensor of the node, one of {names}, got {name!r}"
            )
        if name in tensors:
            raise StrategyError(f"{title}: tensor {name!r}: expected one spec, got two")
        held = range(devices)
        if stages > 1:
            title = f"{source}: {node.title}, of pipeline stage {stage}"
            start = (stage or 0) % stages * devices
            held = range(start, start + devices)
        tensors[name] = _tensor(f"{title}: tensor {name!r}", spec, held)
    return NodeSpec(node.name, node.op_type, node.inputs, node.outputs, tensors, stage)


def _tensor(title: str, spec: onnx.ShardingSpecProto, devices: range) -> TensorSpec:
    dims: list[tuple[int, tuple[Piece, ...]]] = []
    for dim in spec.sharded_dim:
        if dim.axis in [axis for axis, _ in dims]:
            raise StrategyError(f"{title}: axis {dim.axis}: expected it once, got it twice")
        pieces = []
        for part in dim.simple_sharding:
            if part.num_shards < 1:
                raise StrategyError(
                    f"{title}: axis {dim.axis}: expected num_shards of at least 1, got "
                    f"{part.num_shards}"
                )
            pieces.append((_size(f"{title}: axis {dim.axis}", part), part.num_shards))
        dims.append((dim.axis, tuple(pieces)))
    count = prod(number for _, pieces in dims for _, number in pieces)
    return TensorSpec(_groups(title, spec, count, devices), tuple(dims))


def _size(title: str, part: onnx.SimpleShardedDimProto) -> int | str | None:
    which = part.WhichOneof("dim")
    if which is None:
        return None
    if which == "dim_param":
        return part.dim_param or None
    if part.dim_value < 0:
        raise StrategyError(f"{title}: expected a size of at least 0, got {part.dim_value}")
    return int(part.dim_value)


def _groups(
    title: str, spec: onnx.ShardingSpecProto, count: int, devices: range
) -> tuple[tuple[int, ...], ...]:
    """For each shard the devices that hold it, counted from the first of `devices`."""
    named: dict[int, tuple[int, ...]] = {}
    for entry in spec.index_to_device_group_map:
        if entry.key in named:
            raise StrategyError(f"{title}: device group {entry.key}: expected it once")
        named[entry.key] = tuple(entry.value)
    listed = list(spec.device)
    if not listed and count in (1, len(devices)):
        # If no devices are listed, only one order of all devices makes sense.
        listed = list(devices)
    groups = [tuple(sorted(named.get(d, (d,)))) for d in listed]
    if count == 1 and len(groups) > 1:
        groups = [tuple(sorted(d for group in groups for d in group))]
    if len(groups) != count:
        raise StrategyError(
            f"{title}: expected a device or a device group for each of its {count} shards "
            f"(the product of num_shards), got {len(groups)}"
        )
    for device in (d for group in groups for d in group):
        if device not in devices:
            raise StrategyError(
                f"{title}: expected devices from {devices[0]} to {devices[-1]}, got {device}"
            )
    lengths = {len(group) for group in groups}
    if len(lengths) > 1:
        raise StrategyError(
            f"{title}: expected device groups of one size, got sizes {sorted(lengths)}"
        )
    held = [d for group in groups for d in group]
    if len(set(held)) != len(held):
        twice = next(d for d in held if held.count(d) > 1)
        raise StrategyError(f"{title}: expected each device once, got device {twice} twice")
    if len(held) != len(devices):
        missing = next(d for d in devices if d not in set(held))
        raise StrategyError(
            f"{title}: expected all {len(devices)} devices of the configuration, or of the "
            f"stage (replicated shards need a device group), got {len(held)}; device {missing} "
            "holds no shard"
        )
    return tuple(tuple(d - devices[0] for d in group) for group in groups)


# -- metadata ------------------------------------------------------------------------------------


def _extras(source: str, text: str | None) -> Extras:
    if text is None:
        return Extras()
    try:
        return Extras.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise StrategyError(
            f"{source}: metadata {ANNOTATION!r}: {in_words(first['loc'])}{problem(first)}"
        ) from None


def _checked(source: str, extras: Extras, devices: int) -> dict[str, Symbol]:
    """Checks the metadata against the number of devices; returns its symbols."""
    title = f"{source}: metadata {ANNOTATION!r}"
    for what, sizes in (("axes", list(extras.axes.values())), ("atoms", extras.atoms)):
        if sizes and prod(sizes) != devices:
            raise StrategyError(
                f"{title}: expected {what} whose product is the {devices} devices of the "
                f"configuration, or of one of its stages, got {sizes}"
            )
    try:
        Mesh.of(extras.axes)
        return {name: Symbol(**entry) for name, entry in extras.symbols.items()}
    except (TypeError, ValueError, MeshError) as error:
        raise StrategyError(f"{title}: {error}") from None

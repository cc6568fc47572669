"""Writes a plan into a model as ONNX's multi-device annotations (see `annotation_reader`).

The nodes of the file are annotated with the shardings in which they take their operands, and the
shardings of their results after reshards. If a node was replaced by its body, it has the operands
and results that the body has. A partial result has no spec, because the format has no word for it.
In a pipeline, a node has its virtual stage as `pipeline_stage`, and its tensors are on the devices
of its stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from onnxpar.core.errors import StrategyError
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Symbol, dim_str
from onnxpar.facts.program import Program
from onnxpar.graph.metadata_keys import ANNOTATION
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.pipeline_places import virtual_stage_of
from onnxpar.graph.plan import Plan
from onnxpar.strategy.annotation_reader import (
    MIN_IR_VERSION,
    Extras,
    nodes_of_bodies,
)
from onnxpar.strategy.annotation_seeds import runs_of
from onnxpar.strategy.expanded_nodes import bodies_by_results
from onnxpar.strategy.pipeline_entry import PipelineEntry, ScheduleEntry
from onnxpar.strategy.save import own_layouts, symbol_data
from onnxpar.strategy.schema import PIPELINE_AXIS


def annotate_proto(
    proto: onnx.ModelProto,
    program: Program,
    plan: Plan,
    symbols: Mapping[str, Symbol],
    pipeline: PipelineEntry | None = None,
) -> int:
    """Annotates a model in place, and returns the number of annotated nodes.

    Earlier annotations are removed.

    Args:
        proto: The model as it is in its file.
        program: The program of the same model; it is not changed.
        plan: Its plan.
        symbols: Constraints on its symbols, which are kept in the metadata.
        pipeline: How it is split into stages, if it is; the program's nodes have their virtual
            stages.

    Raises:
        StrategyError: A stage boundary is inside a node that was replaced by its body.
    """
    _forget(proto)
    stages = 1 if pipeline is None else pipeline.stages
    writer = _Writer(program, plan, bodies_by_results(program.rules))
    mesh = plan.mesh
    devices = mesh.size * stages
    axes = [(PIPELINE_AXIS, stages)] if stages > 1 else []
    named = ",".join(f"{name}={size}" for name, size in (*axes, *mesh.axes))
    text = named if mesh.axes else f"devices={devices}"
    configuration = ir.ModelConfiguration(text, devices)
    count = 0
    for node in proto.graph.node:
        tensors = writer.tensors(node)
        virtual = None if pipeline is None else writer.virtual_stage(node)
        if tensors or virtual is not None:
            count += 1
            first = (virtual or 0) % stages * mesh.size
            specs = tuple(writer.spec(name, sharding, first) for name, sharding in tensors.items())
            annotated = ir.NodeDeviceConfiguration(configuration, specs, virtual)
            node.device_configurations.append(
                ir.serde.serialize_node_device_configuration(annotated)
            )
    proto.configuration.add(name=text, num_devices=devices)
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)
    pinned = [name for name, chosen in plan.nodes.items() if chosen.pinned]
    extras = Extras(
        axes=dict(mesh.axes),
        atoms=list(mesh.atoms),
        symbols={name: symbol_data(symbol) for name, symbol in symbols.items()},
        inputs={name: runs_of(sharding, mesh) for name, sharding in plan.inputs.items()},
        parameters={n: runs_of(s, mesh) for n, s in own_layouts(plan, program.graph).items()},
        carried=[name for name, chosen in plan.nodes.items() if chosen.carried],
        pinned=None if len(pinned) == len(plan.nodes) else pinned,
        pipeline=None
        if pipeline is None
        else ScheduleEntry(**pipeline.model_dump(include={*ScheduleEntry.model_fields})),
    )
    proto.metadata_props.add(key=ANNOTATION, value=extras.model_dump_json(exclude_defaults=True))
    return count


def _forget(proto: onnx.ModelProto) -> None:
    proto.ClearField("configuration")
    for node in (*nodes_of_bodies(proto), *proto.graph.node):
        node.ClearField("device_configurations")
    kept = [entry for entry in proto.metadata_props if entry.key != ANNOTATION]
    proto.ClearField("metadata_props")
    proto.metadata_props.extend(kept)


@dataclass
class _Writer:
    program: Program
    plan: Plan
    bodies: Mapping[tuple[str, ...], list[NodeView]]
    _placed: dict[tuple[Sharding, int], ir.ShardingSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.program.graph
        self.made_by = {v.name: node for node in graph for v in node.outputs if v.name}

    def nodes(self, node: onnx.NodeProto) -> list[ir.Node]:
        """The nodes of the program for a node of the file."""
        outputs = tuple(node.output)
        if outputs in self.bodies:
            return [view.node for view in self.bodies[outputs]]
        made = next((self.made_by[n] for n in outputs if n in self.made_by), None)
        return [] if made is None else [made]

    def virtual_stage(self, node: onnx.NodeProto) -> int | None:
        """The virtual stage of a node of the file; None if the program no longer has it.

        Raises:
            StrategyError: Its body is in several virtual stages.
        """
        virtual_stages = sorted({virtual_stage_of(one) for one in self.nodes(node)})
        if len(virtual_stages) > 1:
            raise StrategyError(
                f"node {node.name or '/'.join(node.output)!r} ({node.op_type}), which was "
                "replaced by its body: expected one pipeline stage for all of it, got "
                f"{virtual_stages}; set it under pipeline: assign"
            )
        return virtual_stages[0] if virtual_stages else None

    def tensors(self, node: onnx.NodeProto) -> dict[str, Sharding]:
        """The shardings of the operands and results of a node of the file that get a spec."""
        outputs = tuple(node.output)
        nodes = self.nodes(node)
        wants: dict[str, list[Sharding]] = {}
        results: dict[str, Sharding] = {}
        for one in nodes:
            found = self.plan.nodes[one.name or ""]
            for value, want in zip(one.inputs, found.inputs, strict=False):
                if (
                    value is not None
                    and value.name
                    and want is not None
                    and value.name in node.input
                ):
                    wants.setdefault(value.name, []).append(want.with_partial(()))
            for value, made_as in zip(one.outputs, found.outputs, strict=True):
                name = value.name or ""
                left = self.plan.resharded.get(name, made_as)
                if name in outputs and not left.partial:
                    results[name] = left
        # A node has one spec for a tensor; an operand that it takes in two ways has none.
        taken = {n: found[0] for n, found in wants.items() if nodes[1:] or len({*found}) == 1}
        shapes = self.program.env.shapes
        ordered = [n for n in (*node.input, *node.output) if n in shapes]
        both = {**results, **taken}
        return {n: both[n] for n in ordered if n in both and both[n].rank == len(shapes[n])}

    def spec(self, name: str, sharding: Sharding, first: int) -> ir.ShardingSpec:
        """Returns the spec of one tensor, on the devices from `first` on."""
        if (sharding, first) not in self._placed:
            self._placed[sharding, first] = _placement(sharding, self.plan.mesh, first)
        placed = self._placed[sharding, first]
        return ir.ShardingSpec(
            ir.Value(name=name),
            placed.device,
            placed.index_to_device_group_map,
            placed.sharded_dims,
        )


def _placement(sharding: Sharding, mesh: Mesh, start: int) -> ir.ShardingSpec:
    """Returns the spec of a sharding, without a tensor, on the devices from `start` on."""
    split = sharding.split_atoms
    rest = [a for a in range(len(mesh.atoms)) if a not in split]
    firsts = mesh.group(0, split)
    dims = tuple(
        ir.ShardedDim(
            axis,
            tuple(
                ir.SimpleShardedDim(
                    c.size if isinstance(c.size, int) else ir.SymbolicDim(dim_str(c.size)),
                    mesh.count(c.atoms),
                )
                for c in dim
            ),
        )
        for axis, dim in enumerate(sharding.dims)
        if any(c.atoms for c in dim)
    )
    if not rest:
        return ir.ShardingSpec(None, tuple(start + d for d in firsts), (), dims)
    # Negative keys are not devices.
    groups = tuple(
        ir.IndexToDeviceGroupMapEntry(-1 - shard, tuple(start + d for d in mesh.group(first, rest)))
        for shard, first in enumerate(firsts)
    )
    return ir.ShardingSpec(None, tuple(group.key for group in groups), groups, dims)

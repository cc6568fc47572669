"""Partitioning: carries out a plan, node by node, and writes one graph for all ranks.

It walks the global graph once. Each operand is resharded as its node wants it; each reshard of a
value is kept, so that it is done only once. Padding that would change a reduction is set to the
reduction's identity. Then the operator's local form is written.

Every collective has a reason, which `inspect` shows: the node and operand that want another
sharding, and why the two differ (`onnxpar.propagation.conflicts`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx_ir as ir

from onnxpar.core.errors import OnnxparError, ShardingError
from onnxpar.core.rule import ANY, IDENTITY
from onnxpar.core.sharding import Sharding
from onnxpar.facts.equalities import assumed_equalities
from onnxpar.facts.index_ranges import demanded_ranges
from onnxpar.facts.program import Program
from onnxpar.graph.body_captures import open_node, read_by
from onnxpar.graph.builder import GENERATED, ir_shape
from onnxpar.graph.cleanup import remove_unused
from onnxpar.graph.local_builder import PLACE, LocalBuilder
from onnxpar.graph.metadata_keys import CAPTURED
from onnxpar.graph.padding_masks import mask_padding
from onnxpar.graph.pipeline_places import ONE_PLACE, Places
from onnxpar.graph.plan import NodePlan, Plan
from onnxpar.ops.fallback import refuse_random
from onnxpar.ops.local_node import LocalNode, PartitionBody, copy_node
from onnxpar.partition.fuse_nodes import fuse_nodes
from onnxpar.partition.partitioned_model import GraphValue, Parameter, PartitionedModel, States
from onnxpar.propagation.conflicts import Conflict
from onnxpar.resharding.lowering import emit_reshard
from onnxpar.resharding.routes import cheapest_route

INLINE_ELEMENTS = 1024
STATELESS = States()
_EVERYWHERE = -1


@dataclass
class ProgramWriter:
    """Writes the program of all ranks, node by node.

    Attributes:
        program: The program of one device.
        plan: Its plan.
        builder: Where nodes are written.
        partition_body: Partitions a body of a node.
        name: Name of the program that is written.
        states: Which of its operands are buffers of the runtime.
        gathered: Values that are resharded again for each node that reads them.
        places: Where nodes run in a pipeline.
        conflicts: Why neighbours want different shardings, for people.
        fuses: Whether nodes of a training program may become fused operators.
        made: The sharding of each value as it was made, by name.
        home: The virtual stage that made each value, by name.
        versions: The shardings in which each value exists, with their virtual stages, by name.
        zero: Whether the padding of a value in a sharding is known to be zero.
        parameters: The initializers that go to the weight files.
    """

    program: Program
    plan: Plan
    builder: LocalBuilder
    partition_body: PartitionBody
    name: str = "model"
    states: States = STATELESS
    gathered: frozenset[str] = frozenset()
    places: Places = ONE_PLACE
    conflicts: tuple[Conflict, ...] = ()
    fuses: bool = True
    made: dict[str, Sharding] = field(default_factory=dict)
    home: dict[str, int] = field(default_factory=dict)
    versions: dict[str, dict[tuple[int, Sharding], ir.Value]] = field(default_factory=dict)
    zero: dict[tuple[str, Sharding], bool] = field(default_factory=dict)
    parameters: list[Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Keeps the parts of the program that every node needs."""
        self.env, self.rules = self.program.env, self.program.rules

    def run(self) -> PartitionedModel:
        """Writes the complete program.

        Raises:
            ShardingError: A node has no local form for its sharding in the plan.
        """
        graph, mesh, table = self.program.graph, self.plan.mesh, self.env.table
        reserved = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
        for name in dict.fromkeys(v.name or "" for v in reserved):
            self.builder.fresh(name)
        inputs = []
        for value in graph.inputs:
            name = value.name or ""
            sharding = self.plan.inputs[name]
            inputs.append(GraphValue(name, self._enter(value, sharding), sharding))
        for name, value in graph.initializers.items():
            self._initializer(name, value)
        for node in graph:
            self.builder.scope = node.name or ""
            self.builder.place = self.places.nodes.get(node.name or "", 0)
            try:
                self.write(node)
            except OnnxparError as error:
                if repr(node.name) in str(error):
                    raise
                raise type(error)(f"node {node.name!r} ({node.op_type}): {error}") from error
        outputs = []
        used: set[str] = {v.name or "" for v in graph.inputs}
        for value in graph.outputs:
            name = value.name or ""
            self.builder.scope = name
            self.builder.place = self.places.outputs.get(name, 0)
            sharding = self.plan.outputs[name]
            local = self.get(value, sharding, f"output {name!r}")
            if name in self.states.outputs and not self.zero[name, sharding]:
                local = mask_padding(self.builder, local, sharding, 0)
            maker = local.producer()
            passed_on = maker is None and local.name == name
            # A value of another program of a pipeline gets a node here that makes it an output.
            made_here = maker is not None and maker.meta[PLACE] == self.builder.place
            if not passed_on and (not made_here or local.name in used):
                local = self.builder.op(
                    "Identity", local, dtype=local.dtype, shape=sharding.local_shape(mesh, table)
                )
            local.name = name
            local.shape = ir_shape(sharding.local_shape(mesh, table))
            used.add(name)
            outputs.append(GraphValue(name, local, sharding))
        results = [o.local for o in outputs]
        remove_unused(self.builder, results)
        if self.fuses and fuse_nodes(self.builder, results):
            remove_unused(self.builder, results)
        needed = {v for node in self.builder.nodes for v in read_by(node)}
        needed |= {o.local for o in outputs}
        replicated = tuple(
            (node.name or "", node.op_type, self.plan.nodes[node.name or ""].reason)
            for node in graph
            if self.plan.nodes[node.name or ""].reason
        )
        return PartitionedModel(
            program=self.name,
            source=self.program.model,
            builder=self.builder,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            parameters=tuple(p for p in self.parameters if p.local in needed),
            plan=self.plan,
            registry=self.program.registry,
            symbols=dict(self.env.table),
            replicated=replicated,
            equalities=assumed_equalities(self.program),
            ranges=demanded_ranges(self.program),
            states=self.states,
            conflicts=self.conflicts,
        )

    def _initializer(self, name: str, value: ir.Value) -> None:
        sharding = self.plan.parameters[name]
        if not all(isinstance(size, int) for size in sharding.shape):
            raise ShardingError(
                f"initializer {name!r}: a node expects its dims {list(value.shape or ())} to "
                f"equal {list(sharding.shape)}, which is not proved"
            )
        tensor = value.const_value
        floating = value.dtype is not None and value.dtype.is_floating_point()
        small = tensor is not None and tensor.size <= INLINE_ELEMENTS
        local = self._enter(value, sharding)
        fed = name in self.states.inputs
        if sharding.is_replicated and small and not fed and not (floating and sharding.rank):
            local.const_value = tensor
            self.builder.initializers.append(local)
        else:
            self.parameters.append(Parameter(name, value, local, sharding, fed))

    def _enter(self, value: ir.Value, sharding: Sharding) -> ir.Value:
        """Records an input or initializer in its sharding, for all stages; returns it."""
        name = value.name or ""
        local = ir.Value(
            name=name,
            type=value.type,
            shape=ir_shape(sharding.local_shape(self.plan.mesh, self.env.table)),
            doc_string=value.doc_string,
        )
        self.home[name] = _EVERYWHERE
        self.define(name, sharding, local, zero=True)
        return local

    @property
    def virtual_stage(self) -> int:
        """The virtual stage that is being written."""
        return self.places.virtual_stage[self.builder.place]

    def define(self, name: str, sharding: Sharding, local: ir.Value, *, zero: bool) -> None:
        """Records that a value exists in a sharding.

        Args:
            name: Name of the global value.
            sharding: The sharding.
            local: The value of one device.
            zero: Whether its padding is known to be zero.
        """
        self.made.setdefault(name, sharding)
        # The first version is the one that was made; a version of an input is in every stage.
        virtual = self.virtual_stage
        if name not in self.versions:
            virtual = self.home.setdefault(name, virtual)
        self.versions.setdefault(name, {})[virtual, sharding] = local
        self.zero[name, sharding] = zero
        if local.shape is not None and local not in self.builder.shapes:
            here = sharding.local_shape(self.plan.mesh, self.env.table)
            self.builder.note_shape(local, here)
        if sharding.partial or local.shape is None:
            return
        # Sizes that depend on data come from the first value that has them in a replicated dim.
        for axis, size in enumerate(self.env.shapes.get(name, ())):
            if (
                not isinstance(size, int)
                and size.is_Symbol
                and str(size) not in self.env.table
                and not sharding.dim_atoms(axis)
            ):
                self.builder.bind(str(size), local, axis)

    def versions_of(self, name: str) -> dict[Sharding, ir.Value]:
        """The versions of a value that the virtual stage being written may read."""
        # Its own versions win over those that would be sent to it.
        home, here = self.home.get(name), self.virtual_stage
        sent = self.places.sent.get(name)
        if home is None or sent is None or not self.places.is_sent(home, here):
            sent = None
        return {
            sharding: local
            for virtual in (home, here)
            for (where, sharding), local in self.versions.get(name, {}).items()
            if where == virtual and (where == here or sent in (None, sharding))
        }

    def _is_gathered(self, value: ir.Value | None) -> bool:
        return value is not None and value.name in self.gathered

    def get(
        self, value: ir.Value, want: Sharding, reason: str, there: Sequence[ir.Value] = ()
    ) -> ir.Value:
        """Returns a value in a sharding, resharded as propagation priced it.

        Args:
            value: The value.
            want: The sharding.
            reason: Which node and operand want it, for people.
            there: A value of `gathered` is resharded only after these values exist.
        """
        name = value.name or ""
        versions = self.versions_of(name)
        if want in versions:
            return versions[want]
        if not versions or value.dtype is None:
            raise ShardingError(f"{reason}: the value {name!r} does not exist")
        itemsize = int(value.dtype.itemsize)
        way = cheapest_route(versions, want, self.plan.mesh, self.env.table, itemsize)
        source = versions[way.source]
        if there and self._is_gathered(value):
            source = self.builder.after(source, there)
        moved = emit_reshard(
            self.builder,
            source,
            way.steps,
            dtype=value.dtype,
            name=name,
            reason=reason,
        )
        zero = self.zero[name, way.source]
        if name in self.gathered:
            self.zero[name, want] = zero
        else:
            self.define(name, want, moved, zero=zero)
        return moved

    def _any_version(self, name: str) -> Sharding:
        """A sharding in which a value exists, for an operand of which no element is read.

        It is that in which the value was made, unless a stage got it in another one.
        """
        versions, made = self.versions_of(name), self.made[name]
        return made if made in versions else next(iter(versions), made)

    def write(self, node: ir.Node) -> None:
        """Writes the local form of a node, with its operands resharded as its plan wants them.

        Raises:
            ShardingError: It has no local form for its plan.
        """
        name = node.name or ""
        plan, view = self.plan.nodes[name], self.rules.views[name]
        operands: list[ir.Value | None] = [None] * len(node.inputs)
        zero = [True] * len(node.inputs)
        # Values of `gathered` come last, after all other operands exist.
        order = sorted(enumerate(node.inputs), key=lambda item: self._is_gathered(item[1]))
        there: list[ir.Value] = []
        for index, value in order:
            if value is None:
                continue
            want = plan.inputs[index] if index < len(plan.inputs) else None
            if want is None:
                if plan.rule.inputs[index].mode != ANY:
                    raise ShardingError(f"operand {index} has no sharding")
                want = self._any_version(value.name or "")
            reason = f"{name} operand {index}"
            if (name, index, value.name) in self._reasons:
                reason += f": {self._reasons[name, index, value.name or '']}"
            operand = self.get(value, want, reason, there)
            operands[index], zero[index] = operand, self.zero[value.name or "", want]
            if operand.producer() is not None and not self._is_gathered(value):
                there.append(operand)
        definition = self.rules.ops.get(name)
        local = LocalNode(
            view,
            self.builder,
            plan,
            tuple(operands),
            tuple(zero),
            self.partition_body,
        )
        local = self._masked(local)
        copied = definition is None or definition.local is copy_node
        refuse_random(node, self.program.registry, self.plan.mesh.size, copied=copied)
        if definition is not None:
            outputs = definition.local(local)
            keeps = definition.keeps_zero and _covers(plan) and all(zero)
        else:
            inputs, attributes = open_node(node, local.inputs)
            outputs = local.copy(inputs, attributes)
            self.builder.nodes[-1].metadata_props.pop(CAPTURED, None)
            keeps = False
        for value, sharding, made in zip(node.outputs, plan.outputs, outputs, strict=True):
            out = value.name or ""
            if isinstance(value.type, ir.SequenceType | ir.OptionalType):
                made.type, made.shape = value.type, None
            self._keep_name(out, made)
            if out in self.plan.resharded:
                self.made[out] = self.plan.resharded[out]
            self.define(out, sharding, made, zero=keeps)
            if out in self.plan.resharded:
                self.get(value, self.plan.resharded[out], f"{name} result")
            if out in self.places.sent:
                sent = self.get(value, self.places.sent[out], f"{name} result, for other stages")
                self._keep_name(f"{out}.sent", sent)

    def _keep_name(self, name: str, made: ir.Value) -> None:
        """Gives a value that a node has just made the name of the global value."""
        is_new = made.producer() is not None and (made.name or "").endswith(GENERATED)
        if not is_new or name in self._outputs or made.name == name:
            return
        taken = (v for n in reversed(self.builder.nodes) for v in n.outputs if v.name == name)
        if name in self.builder.value_names and (other := next(taken, None)) is not None:
            # A value on the way to this one got the name, since its node has that of the node.
            other.name = self.builder.fresh(name)
            made.name = name
        else:
            made.name = self.builder.fresh(name)

    @cached_property
    def _reasons(self) -> Mapping[tuple[str, int, str], str]:
        """Why neighbours want different shardings, by node, operand and value."""
        return {(c.node, c.operand, c.value): c.reason for c in self.conflicts}

    @cached_property
    def _outputs(self) -> frozenset[str]:
        """Names of the graph's outputs, which are reserved for the last version of each value."""
        return frozenset(v.name or "" for v in self.program.graph.outputs)

    def _masked(self, local: LocalNode) -> LocalNode:
        """Sets padding that a reduction would read to the identity of the reduction."""
        rule = local.plan.rule
        operands = list(local.inputs)
        for factor in local.plan.factors:
            kind = rule.kinds[factor]
            if kind not in IDENTITY:
                continue
            for index, operand in enumerate(rule.inputs):
                value = operands[index] if index < len(operands) else None
                if value is None or not any(factor in names for names in operand.dims):
                    continue
                operands[index] = local.masked(
                    value, index, factor, IDENTITY[kind], known_zero=local.zero[index]
                )
        return replace(local, inputs=tuple(operands))


def _covers(plan: NodePlan) -> bool:
    """Whether every operand has every sharded factor, so that none broadcasts over padding."""
    return all(
        any(factor in names for names in operand.dims)
        for factor in plan.factors
        for operand in plan.rule.inputs
        if not operand.mode
    )

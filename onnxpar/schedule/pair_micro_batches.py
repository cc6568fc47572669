"""Makes the program of two micro-batches that take turns: one computes, the other communicates.

With tensor parallel, a rank waits for the sums of its activations. In a paired program it computes
the nodes of one micro-batch up to a collective, then those of the other up to the same collective,
and so on. `onnxpar.schedule.background` then runs each collective while the other micro-batch
computes. (Wang et al., "Domino: Eliminating Communication in LLM Training via Generic Tensor
Slicing and Overlapping", 2024, divide the batch in this way.)
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from onnxpar.facts.varying_nodes import varying_nodes
from onnxpar.graph.body_captures import bodies_of, opened, read_by
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import MICRO_BATCH, LocalBuilder
from onnxpar.graph.metadata_keys import VALUE
from onnxpar.graph.new_nodes import twin
from onnxpar.partition.partitioned_model import GraphValue, PartitionedModel
from onnxpar_format.entries import SECOND

PAIRED = "paired_model"
"""Name of the program of two micro-batches."""
_FIRST, _SECOND = ".first", ".second"
"""Suffixes of the names of nodes and values."""


def pair_micro_batches(program: PartitionedModel) -> PartitionedModel:
    """Returns the program of two micro-batches of one size; what is given is not changed.

    It has the inputs of the second micro-batch with the prefix `SECOND`. Losses and gradients are
    the sums of both. The second micro-batch reads the running statistics that the first one writes.
    What depends on parameters and sizes alone is computed once.

    Args:
        program: Forward and backward of one micro-batch, before anything in it is scheduled.
    """
    return _Pair(program).run()


@dataclass
class _Pair:
    """The pass over one program. All keys are values of the old program.

    Attributes:
        old: The program of one micro-batch.
        builder: The builder of the new program.
        first: Each value of the first micro-batch, or of both.
        second: Each value of the second micro-batch that differs from that of the first.
        results: The outputs.
        varying: The values that differ between micro-batches.
    """

    old: PartitionedModel
    builder: LocalBuilder = field(init=False)
    first: dict[ir.Value, ir.Value] = field(default_factory=dict)
    second: dict[ir.Value, ir.Value] = field(default_factory=dict)
    results: dict[ir.Value, ir.Value] = field(default_factory=dict)
    varying: set[ir.Value] = field(default_factory=set)

    def __post_init__(self) -> None:
        old = self.old
        held = old.builder
        self.builder = replace(
            held,
            nodes=[],
            initializers=[],
            system_inputs={},
            collectives=[],
            shapes={},
            _consts={},
            _known={},
            _bound={},
        )
        self.builder.initializers = [self._shared(v) for v in held.initializers]
        self.builder.system_inputs = {n: self._shared(v) for n, v in held.system_inputs.items()}
        self._collectives = {c.node: c for c in held.collectives}
        states = {p.name: p.local for p in old.parameters if p.fed}
        states |= {i.name: i.local for i in old.inputs if i.name in old.states.inputs}
        buffers = {o.local: old.states.outputs.get(o.name, "") for o in old.outputs}
        # The running statistic that each new one replaces. Other outputs are added up.
        self._replaced = {v: states[name] for v, name in buffers.items() if name in states}
        self._names = {o.local: o.name for o in old.outputs}
        self._plans = dict(old.plan.nodes)

    def run(self) -> PartitionedModel:
        """Returns the program of both."""
        old = self.old
        parameters = tuple(replace(p, local=self._shared(p.local)) for p in old.parameters)
        inputs = [replace(i, local=self._shared(i.local)) for i in old.inputs]
        for item in old.inputs:
            if item.name not in old.states.inputs:
                again = self._again(item.local)
                inputs.append(GraphValue(again.name or "", again, item.sharding))
        count = old.builder.system_inputs.get(MICRO_BATCH)
        if count is not None:
            again = self._again(count)
            self.builder.system_inputs[again.name or ""] = again
        self.varying.update(self.second, self._replaced.values())
        waiting: list[ir.Node] = []
        for part in self._parts():
            for node in part:
                self._emit(node, self.first, "")
                varies = any(v in self.varying for v in self._reads(node))
                if varies:
                    self.varying.update(node.outputs)
                    waiting.append(node)
                for value in node.outputs:
                    if value in self._replaced:
                        self.second[self._replaced[value]] = self.first[value]
                    elif value in self._names and not varies:
                        self._add(value)
            waiting = [node for node in waiting if not self._emit_second(node)]
        for item in old.outputs:
            if item.local not in self.results:
                self._add(item.local)
        own = {item.name for item in old.inputs if item.name not in old.states.inputs}
        own.update(old.states.outputs.values())
        return replace(
            old,
            program=PAIRED,
            twice=varying_nodes(old.source.graph, own, old.plan, old.registry),
            builder=self.builder,
            inputs=tuple(inputs),
            outputs=tuple(replace(o, local=self.results[o.local]) for o in old.outputs),
            parameters=parameters,
            plan=replace(old.plan, nodes=self._plans),
        )

    # -- values ----------------------------------------------------------------------------------

    def _shared(self, value: ir.Value) -> ir.Value:
        """Returns the copy of a value from outside that both micro-batches read."""
        if value not in self.first:
            self.first[value] = self._copy(value, value.name or "")
        return self.first[value]

    def _again(self, value: ir.Value) -> ir.Value:
        """Returns the copy of an input for the second micro-batch."""
        self.second[value] = self._copy(value, f"{SECOND}{value.name}")
        return self.second[value]

    def _copy(self, value: ir.Value, name: str) -> ir.Value:
        made = ir.Value(
            name=name, type=copy(value.type), shape=value.shape, const_value=value.const_value
        )
        made.metadata_props.update(value.metadata_props)
        self._know(value, made)
        return made

    def _know(self, old: ir.Value, new: ir.Value) -> None:
        """Keeps the local shape of a copy."""
        shapes = self.old.builder.shapes
        if old in shapes:
            self.builder.shapes[new] = shapes[old]

    # -- nodes -----------------------------------------------------------------------------------

    def _parts(self) -> Iterator[list[ir.Node]]:
        """Yields the nodes up to each collective, and those after the last one."""
        part: list[ir.Node] = []
        for node in self.old.builder.nodes:
            part.append(node)
            if self._communicates(node):
                yield part
                part = []
        yield part

    def _communicates(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.name in self._collectives

    def _reads(self, node: ir.Node) -> list[ir.Value]:
        """Returns the values that a node reads, without the token, which only orders."""
        read = read_by(node)
        return read[:1] if self._communicates(node) else read

    def _emit_second(self, node: ir.Node) -> bool:
        """Emits a node of the second micro-batch if its operands are there; returns whether."""
        if any(v in self.varying and v not in self.second for v in self._reads(node)):
            # It reads a running statistic that the first micro-batch has not written yet.
            return False
        self._emit(node, self.second, _SECOND)
        for value in node.outputs:
            if value in self._replaced:
                self._name_result(value, self.second[value])
            elif value in self._names:
                self._add(value)
        return True

    def _emit(self, node: ir.Node, made: dict[ir.Value, ir.Value], suffix: str) -> None:
        """Emits a copy of a node that reads values of one micro-batch."""
        builder = self.builder

        def now(value: ir.Value) -> ir.Value | None:
            return made.get(value, self.first.get(value))

        new = twin(node, [None if v is None else now(v) for v in node.inputs], suffix)
        for name, body in bodies_of(node).items():
            new.attributes[name] = ir.Attr(name, ir.AttributeType.GRAPH, opened(body, now))
        if suffix:
            new.name = builder.node_names.fresh(new.name or "")
        for old, result in zip(node.outputs, new.outputs, strict=True):
            if old in self._names and not suffix:
                result.name = builder.fresh(f"{old.name}{_FIRST}")
            elif suffix and result.name:
                result.name = builder.fresh(result.name)
            self._know(old, result)
            made[old] = result
        builder.nodes.append(new)
        if self._communicates(node):
            known = self._collectives[node.name or ""]
            new.metadata_props[VALUE] = value = f"{known.value}{suffix}"
            builder.collectives.append(replace(known, node=new.name or "", value=value))
        if node.name in self._plans:
            self._plans[new.name or ""] = self._plans[node.name or ""]

    def _add(self, value: ir.Value) -> None:
        """Emits the sum of an output of both micro-batches."""
        one = self.first[value]
        other = self.second.get(value, one)
        total = self.builder.op("Add", one, other, name=f"onnxpar.schedule/Add({value.name})")
        self._name_result(value, total)

    def _name_result(self, value: ir.Value, result: ir.Value) -> None:
        """Makes a value the output that was another one in the old program."""
        result.name = self._names[value]
        self.results[value] = result

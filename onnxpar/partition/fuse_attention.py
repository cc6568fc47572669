"""Replaces attention in the form of exporters by fused operators, in a rank-generic graph.

Where heads and batches are sharded, an attention has no collective between its nodes, so the graph
of each rank has all of them. It is found there (`onnxpar.ops.attention.recognise`), after
strategies have named the nodes of the model and plans have sharded them.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.graph.body_captures import read_by
from onnxpar.graph.builder import DOMAIN, GENERATED
from onnxpar.graph.local_builder import PLACE, LocalBuilder
from onnxpar.ops.attention.recognise import Attention, FusedNodes, find_attentions
from onnxpar.ops.collective.barrier import is_barrier
from onnxpar.ops.function import Function


def fuse_attention(builder: LocalBuilder, outputs: Collection[ir.Value]) -> bool:
    """Replaces each attention of a training program that may have enough keys.

    Args:
        builder: Holds the graph, in which every node is needed; it is changed.
        outputs: The outputs of the graph, which keep their nodes.

    Returns:
        Whether any was replaced.
    """

    def keys(value: ir.Value) -> int | None:
        shape = builder.shapes.get(value)
        return 0 if not shape else builder.table.bounds(shape[-1])[1]

    found = tuple(find_attentions(builder.nodes, outputs, keys))
    # Without a gradient nothing keeps the scores, and for a few queries the nodes are faster.
    return any(attention.backward for attention in found) and _Fusion(
        builder, frozenset(outputs)
    ).run(found)


@dataclass
class _Fusion:
    builder: LocalBuilder
    outputs: frozenset[ir.Value]
    renewed: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = {node: index for index, node in enumerate(self.builder.nodes)}
        self.read_at: dict[ir.Value, list[int]] = defaultdict(list)
        for node, index in self.place.items():
            for value in read_by(node):
                self.read_at[value].append(index)

    def run(self, found: tuple[Attention, ...]) -> bool:
        """Replaces both parts of each attention, or none; returns whether any was replaced."""
        new: dict[int, list[ir.Node]] = defaultdict(list)
        gone: set[ir.Node] = set()
        awaited: dict[ir.Value, ir.Value] = {}
        for attention in found:
            parts = [
                (part, function)
                for part, function in zip(
                    (attention.forward, attention.backward),
                    (attention.form.forward, attention.form.backward),
                    strict=True,
                )
                if part is not None
            ]
            places = [self._place(part) for part, _ in parts]
            if None in places:
                continue
            for (part, function), place in zip(parts, places, strict=True):
                assert place is not None
                node = self._node(part, function, attention.attributes)
                new[place] += [self._inverse(node), node] if attention.inverted else [node]
                gone.update(part.nodes)
                first = part.inputs[0]
                assert first is not None
                awaited |= {value: first for old in part.nodes for value in old.outputs}
        nodes = []
        for index, node in enumerate(self.builder.nodes):
            nodes += new[index]
            if node not in gone:
                nodes.append(node)
        for node in filter(is_barrier, nodes):
            # What is recomputed behind it waits for the gradient, which still begins there.
            for index, value in enumerate(node.inputs):
                if value in awaited:
                    first = awaited[value]
                    node.replace_input_with(index, self.renewed.get(first, first))
        self.builder.nodes = nodes
        return bool(gone)

    def _place(self, part: FusedNodes) -> int | None:
        """Where the new node goes: behind its operands and before what reads its results.

        None if no place will do, if the old nodes belong to different programs of a pipeline, or if
        a result is an output of the graph.
        """
        made = [v for v in part.outputs if v is not None]
        if len({node.meta[PLACE] for node in part.nodes}) > 1 or not self.outputs.isdisjoint(made):
            return None
        makers = [v.producer() for v in part.inputs if v is not None]
        behind = max((self.place[m] for m in makers if m in self.place), default=-1)
        place = max(min(self.place[node] for node in part.nodes), behind + 1)
        gone = {self.place[node] for node in part.nodes}
        read = [index for v in made for index in self.read_at[v] if index not in gone]
        return place if place <= min(read, default=place) else None

    def _node(
        self, part: FusedNodes, function: Function, attributes: Mapping[str, float]
    ) -> ir.Node:
        """The new node, with name and metadata of the last old one; others read its results."""
        old = part.nodes[-1]
        operands = [None if v is None else self.renewed.get(v, v) for v in part.inputs]
        if operands[-1] is None:
            operands[-1] = self.builder.const(0.0, old.outputs[0].dtype)
        node = ir.Node(
            DOMAIN,
            function.name,
            operands,
            ir.convenience.convert_attributes(attributes),
            outputs=[self._renew(value) for value in part.outputs],
            name=old.name,
        )
        node.metadata_props.update(old.metadata_props)
        node.meta[PLACE] = old.meta[PLACE]
        return node

    def _inverse(self, fused: ir.Node) -> ir.Node:
        """A node that inverts the mask of a new node, which then reads its result."""
        mask = fused.inputs[-1]
        assert mask is not None
        name = self.builder.node_names.fresh(f"{fused.name}/seen")
        seen = ir.Value(name=self.builder.fresh(f"{name}{GENERATED}"))
        self.builder.declare(seen, ir.DataType.BOOL, self.builder.shapes.get(mask))
        fused.replace_input_with(len(fused.inputs) - 1, seen)
        node = ir.Node("", "Not", [mask], outputs=[seen], name=name)
        node.metadata_props.update(fused.metadata_props)
        node.meta[PLACE] = fused.meta[PLACE]
        return node

    def _renew(self, value: ir.Value | None) -> ir.Value:
        """A value of the new node that takes the place of an old one."""
        if value is None:
            return ir.Value(name="")
        new = ir.Value(name=value.name, type=value.type, shape=value.shape)
        new.metadata_props.update(value.metadata_props)
        if value in self.builder.shapes:
            self.builder.shapes[new] = self.builder.shapes[value]
        ir.convenience.replace_all_uses_with(value, new)
        self.renewed[value] = new
        return new

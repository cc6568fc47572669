"""Replaces nodes in the form of exporters by fused operators, in a rank-generic graph.

Attention, RMS norms, rotary positions and gated units have no collective between their nodes where
rows and heads are not sharded, so the graph of each rank has all of them. They are found there,
after strategies have named the nodes of the model and plans have sharded them.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.graph.body_captures import read_by
from onnxpar.graph.builder import GENERATED
from onnxpar.graph.local_builder import PLACE, LocalBuilder
from onnxpar.ops.attention.recognise import find_attentions
from onnxpar.ops.collective.barrier import is_barrier
from onnxpar.ops.fused.fused_nodes import FusedNodes, NodeGraph
from onnxpar.ops.fused.written_nodes import find_gates, find_norms, find_rotations


def fuse_nodes(builder: LocalBuilder, outputs: Collection[ir.Value]) -> bool:
    """Replaces the nodes that are found; only training programs have such nodes.

    Args:
        builder: Holds the graph, in which every node is needed; it is changed.
        outputs: The outputs of the graph, which keep their nodes.

    Returns:
        Whether anything was replaced.
    """

    def keys(value: ir.Value) -> int | None:
        shape = builder.shapes.get(value)
        return 0 if not shape else builder.table.bounds(shape[-1])[1]

    graph, shapes = NodeGraph(builder.nodes, outputs), builder.shapes
    attentions = tuple(find_attentions(graph, keys))
    groups: list[tuple[FusedNodes, ...]] = [
        (part,) for find in (find_norms, find_rotations, find_gates) for part in find(graph, shapes)
    ]
    # Without a gradient nothing keeps the scores, and for a few queries the nodes are faster.
    if any(attention.backward for attention in attentions):
        groups += [attention.parts for attention in attentions]
    return bool(groups) and _Fusion(builder, frozenset(outputs)).run(groups)


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

    def run(self, groups: Sequence[tuple[FusedNodes, ...]]) -> bool:
        """Replaces all parts of each group, or none; returns whether any was replaced."""
        new: dict[int, list[ir.Node]] = defaultdict(list)
        gone: set[ir.Node] = set()
        awaited: dict[ir.Value, ir.Value] = {}
        for parts in groups:
            places = [self._place(part) for part in parts]
            # Two norms may share the deviation: the second one keeps its nodes.
            if None in places or any(not gone.isdisjoint(part.nodes) for part in parts):
                continue
            for part, place in zip(parts, places, strict=True):
                assert place is not None
                node = self._node(part)
                new[place] += [self._inverse(node), node] if part.inverted else [node]
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

    def _node(self, part: FusedNodes) -> ir.Node:
        """The new node, with name and metadata of the last old one; others read its results."""
        old = part.nodes[-1]
        operands = [None if v is None else self.renewed.get(v, v) for v in part.inputs]
        if operands[-1] is None:
            operands[-1] = self.builder.const(0.0, old.outputs[0].dtype)
        node = ir.Node(
            part.domain,
            part.op_type,
            operands,
            ir.convenience.convert_attributes(part.attributes),
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

"""Strategies for nodes that were replaced by a body (see `onnxpar.frontend.expand`).

The user's entry is for the operands and results of the node. The nodes of the body that read or
make these tensors are sharded as the entry shards them; propagation decides the rest of the body.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxpar.core.errors import StrategyError
from onnxpar.core.mesh import Mesh
from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.core.symbols import Dim
from onnxpar.graph.metadata_keys import EXPANDED_OPERANDS
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import factor_sizes, project
from onnxpar.graph.seeds import NodeSeed
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.node_rules import Rules
from onnxpar.strategy.schema import NodeEntry
from onnxpar.strategy.tensor_entry import TensorEntry

ShardingFn = Callable[[Mesh], Sharding]
ReadTensor = Callable[[str, Sequence[Dim], TensorEntry], ShardingFn]


@dataclass(frozen=True)
class Replaced:
    """A strategy for a node that was replaced by its body.

    Attributes:
        where: File and line of the entry.
        views: The nodes of its body.
        inputs: The sharding of its operands, by the name of the value.
        outputs: The sharding of its results, by the name of the value.
    """

    where: str
    views: tuple[NodeView, ...]
    inputs: Mapping[str, ShardingFn]
    outputs: Mapping[str, ShardingFn]

    @staticmethod
    def of(
        name: str,
        where: str,
        entry: NodeEntry,
        views: Sequence[NodeView],
        env: ShapeEnv,
        tensor: ReadTensor,
    ) -> "Replaced":
        """Reads the entry of a node.

        Args:
            name: The node's name.
            where: Place of the entry.
            entry: The entry.
            views: The nodes of its body.
            env: Shapes of the model.
            tensor: Reads the entry of one tensor, given its title, its shape and the entry.

        Raises:
            StrategyError: It does not have an entry for each operand or result.
        """
        values = json.loads(views[0].node.metadata_props[EXPANDED_OPERANDS])
        title = f"{where}: node {name!r}, which was replaced by its body"

        def read(side: str, entries: Sequence[TensorEntry | None] | None) -> dict[str, ShardingFn]:
            names: list[str | None] = values[side]
            if entries is None:
                return {}
            if len(entries) != len(names):
                names = [n for n in names if n]
            if len(entries) != len(names):
                raise StrategyError(
                    f"{title}: expected an entry for each of its {len(names)} tensors under "
                    f"{side!r} (~ for a replicated tensor), got {len(entries)}"
                )
            return {
                n: tensor(f"{title}: {n!r}", env.shapes[n], e)
                for n, e in zip(names, entries, strict=True)
                if n and e is not None and n in env.shapes
            }

        return Replaced(where, tuple(views), read("in", entry.inputs), read("out", entry.out))

    def seeds(self, rules: Rules, mesh: Mesh) -> Iterator[NodeSeed]:
        """The strategies of the nodes of the body that read or make tensors with an entry."""
        inputs = {name: sharding(mesh) for name, sharding in self.inputs.items()}
        outputs = {name: sharding(mesh) for name, sharding in self.outputs.items()}
        for view in self.views:
            factors = _factors(rules.by_node[view.name], view, inputs, outputs, mesh)
            made = tuple(outputs.get(v.name or "") for v in view.node.outputs)
            if factors or any(made):
                yield NodeSeed(view.name, factors, made, self.where)


def bodies_by_results(rules: Rules) -> dict[tuple[str, ...], list[NodeView]]:
    """Returns the nodes of each body, by the result names of the node that it replaces."""
    found: dict[tuple[str, ...], list[NodeView]] = {}
    for view in rules.views.values():
        if view.origin and not view.is_backward:
            operands = json.loads(view.node.metadata_props[EXPANDED_OPERANDS])
            found.setdefault(tuple(name or "" for name in operands["out"]), []).append(view)
    return found


def _factors(
    rule: OpRule,
    view: NodeView,
    inputs: Mapping[str, Sharding],
    outputs: Mapping[str, Sharding],
    mesh: Mesh,
) -> dict[str, DimSharding]:
    """The shardings of a node's factors that layouts imply; the first wins if two contradict."""
    sizes = factor_sizes(rule, view)
    found: dict[str, DimSharding] = {}
    used: set[int] = set()
    sides = [
        *zip(rule.inputs, view.node.inputs, [inputs] * len(rule.inputs), strict=False),
        *zip(rule.outputs, view.node.outputs, [outputs] * len(rule.outputs), strict=True),
    ]
    for operand, value, known in sides:
        sharding = known.get(value.name or "") if value is not None else None
        if sharding is None or operand.mode:
            continue
        parts = project(operand, sharding, sizes, mesh, view.table, rule.scaled)
        for name, dim in parts.items():
            atoms = {a for component in dim for a in component.atoms}
            if name in rule.splittable and name not in found and atoms and not atoms & used:
                found[name] = dim
                used |= atoms
    return found

"""What one round of propagation teaches the next about partial values.

A node is divided by looking at its own operands, which misses two things. A value that is partial
and read twice may be passed on by both readers and end in two reductions where one at its origin
would do (a norm written out in single operators reads the cotangent twice). And a product that
could be left partial for nothing, since it is added to another that is partial anyway (the
cotangents of queries, keys and values), looks as if it cost a reduction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.mesh import Mesh
from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import SymbolTable
from onnxpar.graph.plan import NodePlan


@dataclass(frozen=True)
class Hints:
    """What has been seen of partial values.

    Attributes:
        early: Values whose reduction is best done at once, for all readers.
        joined: For a value the atoms over which it may be partial at no cost: its reader adds it to
            what is partial over them.
    """

    early: frozenset[str] = frozenset()
    joined: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def __or__(self, other: "Hints") -> "Hints":
        """Returns what either has seen."""
        return Hints(self.early | other.early, {**self.joined, **other.joined})


def partial_hints(
    nodes: Sequence[ir.Node],
    rules: Mapping[str, OpRule],
    plans: Mapping[str, NodePlan],
    values: Mapping[str, Sharding],
    mesh: Mesh,
    table: SymbolTable,
) -> Hints:
    """Returns what a plan shows about partial values.

    Args:
        nodes: The nodes, in topological order.
        rules: The rule of each, by name.
        plans: The plan of each, by name.
        values: The sharding in which each value is made.
        mesh: The mesh.
        table: What is known of symbols.
    """
    origins: dict[str, str] = {}
    # For each origin, what is reduced of it: the elements of each value, by name.
    reduced: dict[str, dict[str, int]] = {}
    joined: dict[str, frozenset[int]] = {}
    for node in nodes:
        plan = plans[node.name or ""]
        carried = []
        for value, want in zip(node.inputs, plan.inputs, strict=False):
            name = value.name or "" if value is not None else ""
            made = values.get(name)
            if made is None or want is None or not made.partial:
                continue
            if want.partial:
                carried.append(name)
            elif not set(want.split_atoms) & set(made.partial):
                size = _elements(made, mesh, table)
                reduced.setdefault(origins.get(name, name), {})[name] = size
        for value, made in zip(node.outputs, plan.outputs, strict=True):
            if made.partial:
                name = value.name or ""
                alone = len(carried) == 1 and values[carried[0]].partial == made.partial
                origins[name] = origins.get(carried[0], carried[0]) if alone else name
        joined.update(_joined(node, rules, values))
    early = {
        origin
        for origin, parts in reduced.items()
        if len(parts) > 1 and sum(parts.values()) >= _elements(values[origin], mesh, table)
    }
    return Hints(frozenset(early), joined)


def _joined(
    node: ir.Node, rules: Mapping[str, OpRule], values: Mapping[str, Sharding]
) -> dict[str, frozenset[int]]:
    """The complete operands of a sum that could be partial, as the others of it are."""
    found: dict[str, frozenset[int]] = {}
    for reduction, group in rules[node.name or ""].linear:
        operands = [node.inputs[i] for i in sorted(group)]
        if len(group) < 2 or any(v is None or v.name not in values for v in operands):
            continue
        shardings = {v.name or "": values[v.name or ""] for v in operands if v is not None}
        partials = {(s.partial, s.reduction) for s in shardings.values() if s.partial}
        if len(partials) != 1 or next(iter(partials))[1] != reduction:
            continue
        open_ones = [v for v in operands if v is not None and not values[v.name or ""].partial]
        if all(_contracts(v, rules, reduction) for v in open_ones):
            atoms = frozenset(next(iter(partials))[0])
            found.update({v.name or "": atoms for v in open_ones})
    return found


def _contracts(value: ir.Value, rules: Mapping[str, OpRule], reduction: str) -> bool:
    """Whether a split of its node could leave a value partial."""
    node = value.producer()
    return node is not None and reduction in rules[node.name or ""].kinds.values()


def _elements(sharding: Sharding, mesh: Mesh, table: SymbolTable) -> int:
    total = 1
    for size in sharding.local_shape(mesh, table):
        total *= table.typical(size)
    return total

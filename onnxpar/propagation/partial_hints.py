"""Hints about partial values that one round of propagation gives to the next.

The choice for a node depends only on its own operands, and misses two things. First, a partial
value with two readers may stay partial through both and need two reductions later, where one at its
origin would be enough (a norm written as single operators reads the cotangent twice). Second, a
product that could stay partial at no cost, since it is added to another partial value (the
cotangents of queries, keys and values), seems to cost a reduction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.machine import WIRE
from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.facts.program import Program
from onnxpar.graph.plan import Plan


@dataclass(frozen=True)
class Hints:
    """Hints about partial values.

    Attributes:
        early: Values that are best reduced at once, for all readers.
        joined: For some values the atoms over which they may be partial at no cost, since their
            reader adds them to a value that is partial over these atoms.
    """

    early: frozenset[str] = frozenset()
    joined: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def __or__(self, other: "Hints") -> "Hints":
        """Returns the hints of both."""
        return Hints(self.early | other.early, {**self.joined, **other.joined})


def partial_hints(program: Program, plan: Plan, values: Mapping[str, Sharding]) -> Hints:
    """Returns the hints that follow from a plan.

    Args:
        program: The program.
        plan: Its plan.
        values: The sharding in which each value is computed.
    """
    rules = program.rules.by_node
    elements = CostModel(WIRE, plan.mesh, program.env.table).elements
    origins: dict[str, str] = {}
    # For each origin, the reductions of values that stayed partial: elements, by name.
    reduced: dict[str, dict[str, int]] = {}
    joined: dict[str, frozenset[int]] = {}

    for node in program.graph:
        chosen = plan.nodes[node.name or ""]
        carried = []
        for value, want in zip(node.inputs, chosen.inputs, strict=False):
            name = value.name or "" if value is not None else ""
            made = values.get(name)
            if made is None or want is None or not made.partial:
                continue
            if want.partial:
                carried.append(name)
            elif not set(want.split_atoms) & set(made.partial):
                reduced.setdefault(origins.get(name, name), {})[name] = elements(made)
        for value, made in zip(node.outputs, chosen.outputs, strict=True):
            if made.partial:
                name = value.name or ""
                alone = len(carried) == 1 and values[carried[0]].partial == made.partial
                origins[name] = origins.get(carried[0], carried[0]) if alone else name
        joined.update(_joined(node, rules, values))
    early = {
        origin
        for origin, parts in reduced.items()
        if len(parts) > 1 and sum(parts.values()) >= elements(values[origin])
    }
    return Hints(frozenset(early), joined)


def _joined(
    node: ir.Node, rules: Mapping[str, OpRule], values: Mapping[str, Sharding]
) -> dict[str, frozenset[int]]:
    """The complete operands of a sum that could be partial like the other operands."""
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
    """Whether some sharding of its node would leave a value partial."""
    node = value.producer()
    return node is not None and reduction in rules[node.name or ""].kinds.values()

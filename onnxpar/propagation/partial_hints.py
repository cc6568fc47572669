"""Hints about partial values that one round of propagation gives to the next.

The choice for a node depends only on its own operands, and misses three things. First, a partial
value with two readers may stay partial through both and need two reductions later, where one at its
origin would be enough (a norm written as single operators reads the cotangent twice). Second, a
product that could stay partial at no cost, since it is added to another partial value (the
cotangents of queries, keys and values), seems to cost a reduction. Third, a partial cotangent that
only reaches gradients (of a table of positions, which no sample changes) need not be reduced in the
micro-batch, since gradients are reduced once per step.
"""

from collections.abc import Iterator, Mapping
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
        joined: For some values the atoms over which they may be partial at no cost: their reader
            adds them to a value that is partial over these atoms, or they only reach gradients.
    """

    early: frozenset[str] = frozenset()
    joined: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def __or__(self, other: "Hints") -> "Hints":
        """Returns the hints of both."""
        return Hints(self.early | other.early, {**self.joined, **other.joined})


def partial_hints(
    program: Program,
    plan: Plan,
    values: Mapping[str, Sharding],
    gradients: Mapping[str, Sharding],
) -> Hints:
    """Returns the hints that follow from a plan.

    Args:
        program: The program.
        plan: Its plan.
        values: The sharding in which each value is computed.
        gradients: For each output that is a gradient, the layout of its parameter.
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
    late = _late(program, values, gradients)
    early = {
        origin
        for origin, parts in reduced.items()
        if len(parts) > 1 and sum(parts.values()) >= elements(values[origin])
    }
    return Hints(frozenset(early - late.keys()), joined | late)


def _late(
    program: Program, values: Mapping[str, Sharding], gradients: Mapping[str, Sharding]
) -> dict[str, frozenset[int]]:
    """For some cotangents, the atoms over which they may be partial until the step ends.

    Such a cotangent reaches only gradients, through linear operands. All other operands on the way
    are replicated over these atoms, or may be partial over them, too.
    """
    nodes = [n for n in program.graph if program.rules.views[n.name or ""].is_backward]
    nothing = frozenset[int]()
    # The atoms over which each cotangent would be partial if no cotangent were reduced.
    sums: dict[str, frozenset[int]] = {}
    ways: dict[str, list[tuple[frozenset[int], frozenset[int]]]] = {}
    for node in nodes if gradients else ():
        name = node.name or ""
        ways[name] = list(_ways(node, program.rules.by_node[name], values, sums))
        passed = nothing.union(*(atoms for _, atoms in ways[name]))
        for output in node.outputs:
            made = values[output.name or ""]
            found = passed.union(made.partial) if made.reduction == "sum" else passed
            if found:
                sums[output.name or ""] = found
    late = dict(sums)
    for output in program.graph.outputs:
        name = output.name or ""
        if name in late:
            layout = gradients.get(name)
            late[name] = nothing if layout is None else late[name].difference(layout.split_atoms)
    for node in reversed(nodes if late else ()):
        beyond = [late.get(v.name, nothing) for v in node.outputs if v.name]
        for index, value in enumerate(node.inputs):
            name = value.name or "" if value is not None else ""
            if name in late:
                through = (atoms for group, atoms in ways[node.name or ""] if index in group)
                late[name] &= nothing.union(*through).intersection(*beyond)
    return {name: atoms for name, atoms in late.items() if atoms}


def _ways(
    node: ir.Node,
    rule: OpRule,
    values: Mapping[str, Sharding],
    sums: Mapping[str, frozenset[int]],
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Yields operands that may be partial sums together, and the atoms over which they may be."""
    operands = [v.name or "" if v is not None else "" for v in node.inputs]
    for reduction, group in rule.linear:
        if reduction != "sum" or not all(operands[i] in sums for i in group):
            continue
        split = (
            values[n].split_atoms for i, n in enumerate(operands) if n in values and i not in group
        )
        atoms = frozenset.intersection(*(sums[operands[i]] for i in group)).difference(*split)
        if atoms:
            yield group, atoms


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
    node, index = value.producer(), value.index()
    if node is None or index is None:
        return False
    rule = rules[node.name or ""]
    kept = {name for names in rule.outputs[index].dims for name in names}
    return any(kind == reduction and name not in kept for name, kind in rule.kinds.items())

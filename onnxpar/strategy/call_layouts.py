"""The arguments of `onnxpar.shard`, applied to the graph of the function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from onnxpar.core.errors import StrategyError
from onnxpar.core.layout import TensorLayout
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.graph.plan import factor_sizes, operand_sharding, project
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.ops.node_rules import Rules
from onnxpar.strategy.factor_splits import (
    Site,
    counts_of,
    crossed_factors,
    is_named,
    numeric_factors,
    show,
)
from onnxpar.strategy.schema import NodeEntry
from onnxpar.strategy.tensor_entry import TensorEntry, read_tensor


@dataclass(frozen=True)
class Given:
    """The arguments of `onnxpar.shard`, checked without a graph.

    Attributes:
        inputs: An entry for each input, or None if it is derived.
        outputs: An entry for each output, or None if it is derived.
        parameters: Entries of initializers, by name or pattern.
        level: The objective of the search.
        devices: Number of devices.
        sliced: For each input, whether a rank gets only its slice of dim 0.
        machine: A preset or a machine file, for the search.
    """

    inputs: tuple[TensorEntry | None, ...]
    outputs: tuple[TensorEntry | None, ...]
    parameters: Mapping[str, TensorEntry]
    level: int
    devices: int
    sliced: tuple[bool, ...]
    machine: str


def read_entry(value: Any, title: str) -> TensorEntry:
    """Returns the entry given for one tensor: numbers of shards, or a layout.

    Raises:
        StrategyError: It is something else; the message begins with `title`.
    """
    try:
        entry = read_tensor(value)
    except ValueError as error:
        raise StrategyError(f"{title}: {error}") from None
    if not isinstance(entry, TensorLayout) and is_named(entry):
        raise StrategyError(
            f"{title}: expected numbers of shards, or a Layout with named axes, got {show(entry)}"
        )
    return entry


def matrix_of(entry: TensorEntry) -> tuple[int, ...]:
    """Returns the device matrix of an entry."""
    return entry.device_matrix if isinstance(entry, TensorLayout) else counts_of(entry)


def read_together(
    rules: Rules, entries: Mapping[str, TensorEntry], devices: int
) -> tuple[dict[str, NodeEntry], frozenset[str]]:
    """Returns strategies for nodes that read several tensors with entries of the caller.

    Only together do numbers of shards say which devices hold a shard: (2, 2) and (2, 1) on the
    operands of a product are one device matrix (2, 2, 1) of its dims, as in MindSpore. A node that
    cannot be sharded like this is left out; its operands are then resolved separately.

    Args:
        rules: The rule of each node, in the order of the graph.
        entries: The entries of values, by name.
        devices: Number of devices, which the product of the numbers must divide.

    Returns:
        Entries by node, and the names of the values whose layouts these entries decide.
    """
    nodes: dict[str, NodeEntry] = {}
    taken: set[str] = set()
    for name, view in rules.views.items():
        rule = rules.by_node[name]
        given: dict[int, TensorEntry] = {}
        for index, (value, operand) in enumerate(zip(view.node.inputs, rule.inputs, strict=False)):
            entry = entries.get((value.name or "") if value is not None else "")
            if value is None or value.name in taken or operand.mode:
                continue
            if entry is not None and not isinstance(entry, TensorLayout):
                given[index] = entry
        if len(given) < 2 or name in rules.reasons:
            continue
        site = Site(view, rule, name)
        numbers = [(index, counts_of(entry)) for index, entry in given.items()]
        try:
            counts = numeric_factors(site, numbers, devices)
        except StrategyError:
            continue
        if crossed_factors(site, numbers, 1).keys() - counts.keys():
            continue
        product = prod(counts.values())
        if product > 1 and devices % product == 0:
            listed = [given.get(index) for index in range(view.arity)]
            nodes[name] = NodeEntry.model_validate({"in": listed})
            taken |= {v.name or "" for i in given if (v := view.node.inputs[i]) is not None}
    return nodes, frozenset(taken)


def followed(
    seeds: Seeds, rules: Rules, shapes: Mapping[str, Any], pinned: Mapping[str, Sharding]
) -> Seeds:
    """Adds strategies that make the readers of pinned values take them in their current layout.

    Otherwise a search might gather a tensor before its first reader, and the caller's entry would
    have no effect. A node whose rule cannot take the layout is left to the search. If two operands
    of a node contradict each other, the first one wins.

    Args:
        seeds: What is fixed already; nodes with a strategy keep it.
        rules: The rule of each node.
        shapes: The shape of each value.
        pinned: Shardings of the values that the caller laid out, by name.
    """
    nodes: dict[str, NodeSeed] = {}
    for name, view in rules.views.items():
        if name in seeds.nodes or name in rules.reasons:
            continue
        rule = rules.by_node[name]
        sizes = factor_sizes(rule, view)
        factors: dict[str, DimSharding] = {}
        for value, operand in zip(view.node.inputs, rule.inputs, strict=False):
            wanted = pinned.get((value.name or "") if value is not None else "")
            if value is None or wanted is None or operand.mode:
                continue
            shape = shapes[value.name or ""]
            split = project(operand, wanted, sizes, seeds.mesh, view.table, rule.scaled)
            merged = {**split, **factors}
            sharding = operand_sharding(operand, shape, merged, sizes, rule.scaled)
            atoms = [a for parts in merged.values() for c in parts for a in c.atoms]
            if (
                sharding.canonical(seeds.mesh, view.table)
                == wanted.canonical(seeds.mesh, view.table)
                and len(set(atoms)) == len(atoms)
                and all(factor in rule.splittable for factor in split)
            ):
                factors = merged
        if factors:
            nodes[name] = NodeSeed(name, factors)
    return replace(seeds, nodes={**nodes, **seeds.nodes})


def made_by(seeds: Seeds, rules: Rules, gate: str) -> Sharding:
    """Returns the layout of the output of a node that has a strategy and passes one value on."""
    view, rule = rules.views[gate], rules.by_node[gate]
    sizes = factor_sizes(rule, view)
    return operand_sharding(rule.outputs[0], view.out_shape(0), seeds.nodes[gate].factors, sizes)


def left_as_given(seeds: Seeds, rules: Rules, gates: Sequence[str], *, sliced: bool) -> Seeds:
    """Adds strategies for nodes without one that make the outputs.

    Args:
        seeds: What is fixed already.
        rules: The rule of each node.
        gates: Names of the nodes; each passes one value on.
        sliced: Whether each rank gets only its slice of dim 0.
    """
    nodes: dict[str, NodeSeed] = {}
    for name in gates:
        view, rule = rules.views[name], rules.by_node[name]
        factors: dict[str, DimSharding] = {}
        shape = rule.inputs[0].dims and view.shape(0)
        if sliced and shape and shape[0] != 1 and name not in rules.reasons:
            everything = tuple(range(len(seeds.mesh.atoms)))
            sharding = Sharding.of(shape, [everything, *([()] * (len(shape) - 1))])
            factors = project(
                rule.inputs[0], sharding, factor_sizes(rule, view), seeds.mesh, view.table
            )
        nodes[name] = NodeSeed(name, factors)
    return replace(seeds, nodes={**nodes, **seeds.nodes})

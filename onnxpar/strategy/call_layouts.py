"""What the caller of `onnxpar.shard` gives, met with the graph that was called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from pydantic_core import PydanticCustomError

from onnxpar.core.errors import StrategyError
from onnxpar.core.layout import TensorLayout
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.graph.plan import factor_sizes, operand_sharding, project
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.ops.node_rules import Rules
from onnxpar.strategy.factor_splits import Site, counts_of, numeric_factors, show
from onnxpar.strategy.schema import NodeEntry
from onnxpar.strategy.tensor_entry import TensorEntry, read_tensor


@dataclass(frozen=True)
class Given:
    """The arguments of `onnxpar.shard`, checked for themselves.

    Attributes:
        inputs: An entry for each input, None where it is derived.
        outputs: An entry for each output, None where it is derived.
        parameters: Entry of the initializers that a name or pattern holds for.
        level: The objective of the search.
        devices: Number of devices.
        sliced: For each input whether a rank is given its slice of dim 0.
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
    """Returns what was given for one tensor: numbers of pieces, or a layout.

    Raises:
        StrategyError: It is something else; `title` begins the message.
    """
    try:
        entry = read_tensor(value)
    except PydanticCustomError as error:
        raise StrategyError(f"{title}: {error.message()}") from None
    if not isinstance(entry, TensorLayout):
        for dim in entry:
            if isinstance(dim, tuple):
                raise StrategyError(
                    f"{title}: expected numbers of shards, or a Layout with named axes, got "
                    f"{show(entry)}"
                )
    return entry


def matrix_of(entry: TensorEntry) -> tuple[int, ...]:
    """Returns the device matrix that an entry uses."""
    return entry.device_matrix if isinstance(entry, TensorLayout) else counts_of(entry)


def read_together(
    rules: Rules, entries: Mapping[str, TensorEntry], devices: int
) -> tuple[dict[str, NodeEntry], frozenset[str]]:
    """Returns strategies for nodes that read several of the tensors that the caller laid out.

    Numbers of pieces say which devices hold a piece only together: (2, 2) and (2, 1) on the
    operands of a product are one device matrix (2, 2, 1) of its dims, as in MindSpore. A node that
    cannot be sharded so is left out; each tensor then has its own numbers.

    Args:
        rules: The rule of each node, in the order of the graph.
        entries: By name of a value, what was given for it.
        devices: Number of devices, which the product of the pieces has to divide.

    Returns:
        Entries by node, and the values whose layout they say.
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
        try:
            counts = numeric_factors(Site(view, rule, name), list(given.items()))
        except StrategyError:
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

    A search that is free may gather a tensor before it is read for the first time, and what the
    caller said of it would come to nothing. A node whose rule cannot take the layout is left to
    the search; where two operands of it contradict one another, the first one holds.

    Args:
        seeds: What is fixed already; nodes that are keep their strategy.
        rules: The rule of each node.
        shapes: The shape of each value.
        pinned: Sharding of the values that the caller laid out, by name.
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
    """Returns the layout of the output of a node that has a strategy and hands one value on."""
    view, rule = rules.views[gate], rules.by_node[gate]
    sizes = factor_sizes(rule, view)
    return operand_sharding(rule.outputs[0], view.out_shape(0), seeds.nodes[gate].factors, sizes)


def left_as_given(seeds: Seeds, rules: Rules, gates: Sequence[str], *, sliced: bool) -> Seeds:
    """Adds strategies for the nodes through which outputs leave and that have none.

    Args:
        seeds: What is fixed already.
        rules: The rule of each node.
        gates: Names of the nodes; each hands one value on.
        sliced: Whether each rank gets its slice of dim 0, or everything.
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

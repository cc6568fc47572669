"""The ways to shard one node: each mesh axis shards one part of one factor, or nothing."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import onnx_ir as ir

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms
from onnxpar.core.rule import REPLICATED
from onnxpar.core.sharding import Component, DimSharding, Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.graph.plan import NodePlan, factor_sizes, shardings
from onnxpar.graph.seeds import NodeSeed
from onnxpar.graph.view_parts import Part
from onnxpar.search.value_flow import Item, Saved

Place = tuple[str, int]
"""A factor and the number of one of its parts. `("", k)` means that the k-th group of linear
operands stays partial over the axis."""


@dataclass(frozen=True)
class Option:
    """One way to shard a node.

    Attributes:
        plan: The shardings that follow.
        places: For each axis the place that it shards, or None.
    """

    plan: NodePlan
    places: tuple[Place | None, ...]


def factor_parts(item: Item) -> dict[str, tuple[Part, ...]]:
    """Returns the parts of each factor to shard, as later views of its dims show them."""
    rule, sizes = item.rule, factor_sizes(item.rule, item.view)
    # A rule may have a factor that is in no operand, for its local form.
    found: dict[str, tuple[Part, ...]] = {
        f: (Part(sizes[f], kind != REPLICATED),) for f, kind in rule.kinds.items() if f in sizes
    }
    for operand, dims in zip(rule.inputs, item.parts, strict=False):
        if dims is None or operand.mode:
            continue
        for names, parts in zip(operand.dims, dims, strict=True):
            if len(names) == 1 and len(parts) > len(found[names[0]]):
                found[names[0]] = parts
    return {f: parts for f, parts in found.items() if rule.kinds[f] != REPLICATED}


def options(
    item: Item,
    axes: Sequence[Atoms],
    cost: CostModel,
    before: Option | None = None,
    *,
    batch: Collection[str] | None = None,
) -> tuple[Option, ...]:
    """Returns every way to shard the parts of a node's factors over mesh axes.

    A part is sharded only if it has at least one element for each shard, at the sizes that the cost
    model assumes. Padding costs what the shards then take. If no way keeps the earlier decision, it
    is the only option.

    Args:
        item: The node.
        axes: The runs of atoms that are decided together.
        cost: The cost model, with the mesh and the sizes.
        before: The decision for earlier axes, which is kept.
        batch: The factors whose first part is the batch. If given, the other axes shard neither
            these parts nor any part with a symbolic size.
    """
    parts = {} if item.fixed else factor_parts(item)
    places: list[Place | None] = [None]
    places += [
        (f, i)
        for f, ps in parts.items()
        for i, p in enumerate(ps)
        if p.splittable
        and (batch is None or (isinstance(p.size, int) and not (i == 0 and f in batch)))
    ]
    if not item.fixed:
        # With a single linear operand, reducing the sum before the node seldom costs more.
        least = 2 if batch is None else 1
        groups = [k for k, (r, s) in enumerate(item.rule.linear) if r == "sum" and len(s) >= least]
        places += [("", k) for k in groups]
    held: tuple[tuple[Place | None, Atoms], ...] = ()
    earlier: tuple[Place | None, ...] = ()
    if before is not None:
        earlier = before.places
        held = tuple(zip(earlier, axes[: len(earlier)], strict=True))
        axes = axes[len(earlier) :]
    found: list[Option] = []
    seen: set[tuple[object, ...]] = set()
    for chosen in product(places, repeat=len(axes)):
        plan = _plan(item, (*held, *zip(chosen, axes, strict=True)), parts, cost)
        if plan is None:
            continue
        key = (plan.inputs, plan.outputs)
        if key not in seen:
            seen.add(key)
            found.append(Option(plan, (*earlier, *chosen)))
    if not found and before is not None:
        # What was decided need not be an option: propagation may shard a dim over more devices than
        # it has elements, if the user shards a parameter in this way.
        return (Option(before.plan, (*earlier, *(None for _ in axes))),)
    return tuple(found)


def given_option(
    item: Item, seed: NodeSeed, axes: Sequence[Atoms], cost: CostModel
) -> tuple[Option, ...]:
    """Returns the only way to shard a node that the user decided."""
    plan = shardings(
        item.rule, item.view, seed.factors, cost.mesh, carried=seed.carried, pinned=True
    )
    return (Option(plan, (None,) * len(axes)),)


def _plan(
    item: Item,
    chosen: Sequence[tuple[Place | None, Atoms]],
    parts: Mapping[str, tuple[Part, ...]],
    cost: CostModel,
) -> NodePlan | None:
    atoms: dict[Place, Atoms] = {}
    for place, run in chosen:
        if place is not None:
            atoms[place] = (*atoms.get(place, ()), *run)
    factors: dict[str, DimSharding] = {}
    for (name, index), run in atoms.items():
        if name and not _fits(parts[name][index], cost.mesh.count(run), cost):
            return None
    for name in dict.fromkeys(name for name, _ in atoms if name):
        factors[name] = tuple(
            Component(part.size, atoms.get((name, i), ())) for i, part in enumerate(parts[name])
        )
    carried: dict[int, tuple[Atoms, str]] = {}
    groups = [(k, run) for (name, k), run in atoms.items() if not name]
    if len(groups) > 1:
        return None
    for k, run in groups:
        carried = dict.fromkeys(sorted(item.rule.linear[k][1]), (tuple(sorted(run)), "sum"))
        if not all(_summed(item, i) for i in carried):
            return None
    try:
        return shardings(item.rule, item.view, factors, cost.mesh, carried=carried)
    except ShardingError:
        return None


def _summed(item: Item, operand: int) -> bool:
    """Whether an operand may be partial: parameters and inputs of the graph are complete."""
    value = item.view.node.inputs[operand] if item.view.has(operand) else None
    return value is not None and value.producer() is not None and not item.rule.inputs[operand].mode


def _fits(part: Part, count: int, cost: CostModel) -> bool:
    return cost.value(part.size) >= count


def saved(item: Item, option: Option, cost: CostModel) -> Iterator[tuple[Saved, float]]:
    """Yields what the backward of a node reads, with the bytes of its share on a device."""
    node, plan = item.view.node, option.plan
    for one in item.saved:
        value = (node.outputs if one.made else node.inputs)[one.index]
        sharding = (plan.outputs if one.made else plan.inputs)[one.index]
        yield one, one.share * bytes_of(value, sharding, cost)


def bytes_of(value: ir.Value | None, sharding: Sharding | None, cost: CostModel) -> int:
    """Returns the bytes of a device's shard of a value; 0 if it is absent."""
    if value is None or value.dtype is None or sharding is None:
        return 0
    return cost.elements(sharding) * int(value.dtype.itemsize)

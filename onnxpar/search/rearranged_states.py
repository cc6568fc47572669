"""Optimizer parallel of parameters that are rearranged before a product reads them.

A sum of terms knows the memory of a parameter from its first reader. If this reader rearranges the
parameter (Transpose, Cast), it does not say over which atoms the gradient is partial: the product
does. Once an option of each node is chosen, the states that optimizer parallel shards are known.
"""

from collections.abc import Sequence

from onnxpar.cost.cost_model import CostModel
from onnxpar.search.cost_weights import CostWeights
from onnxpar.search.node_options import Option
from onnxpar.search.value_flow import Flow, Item


def partial_atoms(item: Item, option: Option, operand: int) -> tuple[int, ...]:
    """Returns the atoms over which the cotangent of a node's operand is partial."""
    rule = item.rule
    mine = {f for names in rule.inputs[operand].dims for f in names}
    made = {f for o in rule.outputs for names in o.dims for f in names}
    partials = {
        a
        for name, parts in option.plan.factors.items()
        if name in made and name not in mine
        for c in parts
        for a in c.atoms
    }
    return tuple(sorted(partials))


def saved_behind(
    seen: Flow,
    options: Sequence[Option],
    cost: CostModel,
    weights: CostWeights,
    moments: int,
) -> float:
    """Returns the bytes of states that optimizer parallel saves behind rearrangements.

    Args:
        seen: The nodes and values.
        options: The option of each node.
        cost: The cost model.
        weights: Its optimizer parallel and micro-batches count.
        moments: How many tensors of a parameter's shape the optimizer keeps.
    """
    parallel = weights.parallel
    if not parallel.level:
        return 0.0
    stored = {v.producer[0]: v for v in seen.values if v.producer is not None and v.stored}
    saved = 0.0
    for value in seen.values:
        if value.producer is not None or not value.parameter or not value.trained:
            continue
        last = value
        while len(last.uses) == 1 and (behind := stored.get(last.uses[0].item)) is not None:
            last = behind
        if last is value or len(last.uses) != 1:
            continue
        use, first = last.uses[0], value.uses[0]
        target = options[first.item].plan.inputs[first.operand]
        assert target is not None
        size = cost.elements(target) * value.itemsize
        partial = partial_atoms(seen.items[use.item], options[use.item], use.operand)
        # A product may gather a parameter over atoms that shard it.
        atoms = set(partial) - set(target.split_atoms)
        replicas = cost.mesh.count(parallel.shared(size, atoms, cost.mesh))
        complete, part = (parallel.kept(size, n, moments) for n in (1, replicas))
        saved += value.count * (complete - part)
    return saved

"""Recursion over the devices: halve them again and again, deciding all nodes in each halving.

The atoms of the mesh are taken one by one. In each halving a node has as many options as it has
factors, so that the least sum over all nodes, moving their values included, is found exactly in
time linear in the number of nodes; what earlier halvings split stays. (After Cai, Wu et al.,
"D-Rec", Euro-Par 2021, whose inner recursion decides nodes greedily by falling weight, at costs
that count elements of 2-way cuts; ours are seconds of a cost model, and atoms need not be 2.)
"""

from collections.abc import Callable, Mapping, Sequence

from onnxpar.core.mesh import Atoms
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.search.node_options import Option
from onnxpar.search.problem import CostWeights, Problem, build
from onnxpar.search.solution import Solution
from onnxpar.search.value_flow import Flow, Item

OptionsOf = Callable[[Item, Sequence[Atoms], Option | None], tuple[Option, ...]]
Solve = Callable[[Problem, int], Solution]


def recurse(
    flow: Flow,
    axes: Sequence[Atoms],
    cost: CostModel,
    options_of: OptionsOf,
    solve: Solve,
    *,
    pins: Mapping[str, Sharding],
    weights: CostWeights,
) -> tuple[Problem, Solution]:
    """Returns the problem of the last halving, and what was chosen in it.

    Nothing is proved of the choice: its bound is 0.

    Args:
        flow: The model.
        axes: The runs of atoms in the order in which they are decided.
        cost: The cost model.
        options_of: Returns the options of a node that keep what earlier axes were decided to split.
        solve: Decides one halving; it is told into how many pieces later ones may cut memory.
        pins: How parameters and inputs lie that the user fixed.
        weights: What the sum weighs.

    Raises:
        ShardingError: Nothing is within the limit on memory.
    """
    chosen: list[Option | None] = [None] * len(flow.items)
    levels = [axes[: level + 1] for level in range(len(axes))] or [axes]
    for level in levels:
        known: dict[object, tuple[Option, ...]] = {}
        found: list[tuple[Option, ...]] = []
        for item, before in zip(flow.items, chosen, strict=True):
            key = (item.kind, item.pin, before.places if before is not None else None)
            if key not in known:
                known[key] = options_of(item, level, before)
            found.append(known[key])
        problem = build(flow, found, cost, pins, weights)
        later = cost.mesh.count(atom for axis in axes[len(level) :] for atom in axis)
        solution = solve(problem, later)
        chosen = [f[c] for f, c in zip(found, solution.choice, strict=False)]
    return problem, Solution(solution.choice, solution.seconds, solution.memory, 0.0)

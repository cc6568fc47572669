"""Mesh axes are decided one after another, each for all nodes at once; earlier decisions stay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.graph.seeds import NodeSeed
from onnxpar.search.cost_weights import CostWeights
from onnxpar.search.memory_bounded import least
from onnxpar.search.node_options import Option, given_option, options
from onnxpar.search.problem import Problem, build
from onnxpar.search.solution import Solution
from onnxpar.search.value_flow import Flow, Item

Solve = Callable[[Problem, int], Solution]
"""Solves the problem of some axes; all later axes together may split memory into this number."""


@dataclass(frozen=True)
class Halving:
    """What the problems of all halvings share.

    Attributes:
        flow: The model.
        cost: The cost model, with the mesh.
        pins: The shardings of parameters and inputs that the user fixed, by name.
        weights: The weights of the sum.
        given: The nodes that the user fixed, by name.
        batch: For each node, the factors whose first part is the batch, which is not sharded; None
            if every factor may be sharded.
        outputs: The shardings to which outputs of the graph are brought.
    """

    flow: Flow
    cost: CostModel
    pins: Mapping[str, Sharding]
    weights: CostWeights
    given: Mapping[str, NodeSeed]
    batch: Mapping[str, frozenset[str]] | None = None
    outputs: Mapping[str, Sharding] = field(default_factory=dict)

    def problem(self, axes: Sequence[Atoms], chosen: Sequence[Option | None]) -> Problem:
        """Returns the problem of the options that keep what was chosen for the first axes.

        Args:
            axes: The runs of atoms.
            chosen: For each node, the option for the first of the axes; None for none of them.
        """
        known: dict[object, tuple[Option, ...]] = {}
        found = []
        for item, before in zip(self.flow.items, chosen, strict=True):
            batch = None if self.batch is None else self.batch[item.name]
            key = (item.kind, item.pin, before and before.places, batch)
            if key not in known:
                known[key] = self._options(item, axes, before, batch)
            found.append(known[key])
        return build(self.flow, found, self.cost, self.pins, self.weights, self.outputs)

    def run(
        self,
        axes: Sequence[Atoms],
        solve: Solve,
        chosen: Sequence[Option | None] | None = None,
        decided: int = 0,
    ) -> tuple[Problem, Solution]:
        """Returns the problem of the last halving and its solution.

        If no choice is within the limit on memory in an earlier halving, the one of least memory is
        taken.

        Args:
            axes: The runs of atoms in the order in which they are decided.
            solve: Solves the problem of one halving.
            chosen: For each node, the option for the axes that are decided.
            decided: Number of axes that are decided already.

        Raises:
            ShardingError: No choice is within the limit on memory.
        """
        chosen = [None] * len(self.flow.items) if chosen is None else chosen
        for number in range(decided + 1, max(len(axes), decided + 1) + 1):
            problem = self.problem(axes[:number], chosen)
            later = self.cost.mesh.count(atom for axis in axes[number:] for atom in axis)
            try:
                solution = solve(problem, later)
            except ShardingError:
                if later == 1:
                    raise
                solution = least(problem)
            chosen = problem.chosen(solution.choice)
        return problem, solution

    def _options(
        self,
        item: Item,
        axes: Sequence[Atoms],
        before: Option | None,
        batch: frozenset[str] | None,
    ) -> tuple[Option, ...]:
        seed = self.given.get(item.name)
        if seed is None:
            return options(item, axes, self.cost, before, batch=batch)
        return given_option(item, seed, axes, self.cost)

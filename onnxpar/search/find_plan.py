"""From a model and a machine to the plans of all its nodes.

The exact search (`ilp`) decides all mesh axes at once. The recursive one halves the devices again
and again. It takes the atoms of the mesh one by one and decides all nodes in each halving. There, a
node has as many options as it has factors, so the least sum over all nodes, including reshards, is
found exactly in time linear in the number of nodes; earlier halvings stay as they were decided.
(After Cai, Wu et al., "D-Rec", Euro-Par 2021. Their inner recursion decides nodes greedily by
falling weight and counts elements of 2-way splits. Ours adds up seconds of a cost model, and atoms
need not be 2.)
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from math import inf
from operator import mul
from time import perf_counter

from onnxpar.core.errors import ShardingError
from onnxpar.core.machine import Machine
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL, OptimizerParallel
from onnxpar.facts.program import Program
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.search.cost_weights import WORKING, CostWeights
from onnxpar.search.halving import Halving
from onnxpar.search.memory_bounded import THOROUGH, Effort, best, least, priced
from onnxpar.search.node_options import Option
from onnxpar.search.problem import Problem
from onnxpar.search.repeated_layers import fold
from onnxpar.search.solution import Solution, gap
from onnxpar.search.value_flow import Flow, flow

LEVELS = {
    0: CostWeights(communication=10.0),
    1: CostWeights(memory_first=True),
    2: CostWeights(),
}
"""The weights of each level of the objective; see `SearchSpec`."""


UNLIMITED = 1 << 62
"""Bytes of a device without a limit on memory."""
GAP = 0.01
"""The exact search stops if no other plan can be better by more than this share."""
HALVING = Effort(total=1 << 28)
"""A few seconds for each halving whose least time is above the limit on memory."""
OnProgress = Callable[[str, int, int], None]
"""Called with the name of what is tried next, and its number n of m; 0 of 0 without a count."""

# Later halvings cannot halve all memory; this share of what they could halve is assumed.
_SHARES = (1.0, 0.75, 0.5, 0.0)


def silent(name: str, number: int, count: int) -> None:
    """Reports no progress."""


@dataclass(frozen=True)
class SearchSpec:
    """How to search.

    Attributes:
        machine: The machine that runs the plan.
        algorithm: "recursive" or "ilp".
        level: The objective. 0: little communication; a second of it counts as ten of computing.
            1: least memory, then least time. 2: least time of a step.
        memory: Bytes that a device may hold; None for the machine's memory.
        sizes: Sizes of symbols to plan for.
        gap: The exact search stops if no other plan can be better by more than this share.
        parallel: Optimizer parallel, in training.
        micro_batches: Micro-batches of a step of training.
        stage: As in `CostWeights`, like the next two.
        kept: In a pipeline, the share of what the backward reads that one device keeps.
        working: The share of every result that counts as held.
        price: If not 0, the sum counts a price for each byte, as `memory_bounded.priced` says.
    """

    machine: Machine
    algorithm: str = "recursive"
    level: int = 2
    memory: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    gap: float = GAP
    parallel: OptimizerParallel = NOT_PARALLEL
    micro_batches: int = 1
    stage: float = 1.0
    kept: float = 1.0
    working: float = WORKING
    price: float = 0.0

    @property
    def weights(self) -> CostWeights:
        """The weights of the sum that is minimised."""
        return replace(
            LEVELS[self.level],
            parallel=self.parallel,
            micro_batches=self.micro_batches,
            stage=self.stage,
            kept=self.kept,
            working=self.working,
        )

    @property
    def limit(self) -> float:
        """Bytes that a device may hold."""
        return float(self.machine.memory if self.memory is None else self.memory)


@dataclass(frozen=True)
class Candidate:
    """One mesh that was tried.

    Attributes:
        axes: Its axes.
        seconds: Time of a step of the best plan on it; infinite if none fits.
        memory: Bytes of one device.
        bound: No plan on this mesh takes fewer seconds; 0 if nothing is proved.
        elapsed: Seconds that the search took.
        reason: Why there is no plan, or empty.
        limit: Bytes that a device could hold in this search; the bound is for plans that fit.
    """

    axes: tuple[tuple[str, int], ...]
    seconds: float
    memory: float
    bound: float
    elapsed: float
    reason: str = ""
    limit: float = UNLIMITED

    @property
    def gap(self) -> float:
        """How much less another plan on this mesh may cost, as a share."""
        return gap(self.seconds, self.bound)


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        seeds: The plan of every node, for propagation to carry out.
        chosen: The best candidate.
        candidates: All candidates, in the order in which they were tried.
    """

    seeds: Seeds
    chosen: Candidate
    candidates: tuple[Candidate, ...]


def find(
    program: Program,
    seeds: Seeds,
    spec: SearchSpec,
    *,
    named: bool,
    free_inputs: bool,
    trained: Collection[str] = (),
    progress: OnProgress = silent,
) -> Found:
    """Searches for the strategy of every forward node that the user did not fix.

    Args:
        program: A forward program, or one with its backward; it is not changed.
        seeds: What the user fixed, on the user's mesh.
        spec: How to search.
        named: Whether the user fixed the shape of the mesh; else it is searched, too.
        free_inputs: Whether the search may shard graph inputs.
        trained: Names of the parameters that are trained; none for a forward program.
        progress: Called for each mesh, or for each halving of the devices, as it begins.

    Raises:
        ShardingError: No plan fits into the memory of a device.
    """
    seen = flow(program, trained, seeds.nodes)
    tried: list[Candidate] = []
    winner: tuple[float, Candidate, Seeds] | None = None
    pinned = replace(seeds, inputs={} if free_inputs else seeds.inputs)
    fixed = bool(pinned.nodes or pinned.inputs or pinned.parameters or pinned.outputs)
    meshes = list(_meshes(seeds.mesh, spec, named, fixed))
    for number, mesh in enumerate(meshes, 1):
        if spec.algorithm != "recursive":
            progress("mesh " + "x".join(str(n) for _, n in mesh.axes), number, len(meshes))
        started = perf_counter()
        cost = CostModel(spec.machine, mesh, program.env.table, spec.sizes)
        run = MeshSearch(seen, cost, replace(pinned, mesh=mesh), spec, progress)
        try:
            problem, solution, chosen = run.solve()
        except ShardingError as error:
            elapsed = perf_counter() - started
            tried.append(Candidate(mesh.axes, inf, 0.0, 0.0, elapsed, str(error)))
            continue
        tried.append(
            Candidate(
                mesh.axes,
                problem.seconds(solution.choice),
                solution.memory,
                solution.bound,
                perf_counter() - started,
                limit=spec.limit,
            )
        )
        if winner is None or solution.seconds < winner[0]:
            layouts = problem.layouts(solution.choice)
            winner = solution.seconds, tried[-1], seeds_of(seen, chosen, layouts, run.seeds)
    if winner is None:
        raise ShardingError(tried[0].reason)
    return Found(winner[2], winner[1], tuple(tried))


def _meshes(mesh: Mesh, spec: SearchSpec, named: bool, fixed: bool) -> Iterator[Mesh]:
    """The meshes to try: the user's; or all pairs of axes; or, for halving, one axis for each atom.

    If the user fixed anything, it is in terms of the atoms of the user's mesh. Then these atoms are
    kept, and pairs of axes that need others are left out.
    """
    if named or mesh.size == 1:
        yield mesh
        return
    if spec.algorithm == "recursive":
        atoms = mesh.atoms if fixed else tuple(reversed(Mesh.of(two_axes(mesh.size, 1)).atoms))
        yield Mesh.of({f"x{i}": n for i, n in enumerate(atoms)})
        return
    firsts = [n for n in range(2, mesh.size) if mesh.size % n == 0]
    if fixed:
        # An axis is a run of atoms.
        firsts = [n for n in firsts if n in accumulate(mesh.atoms, mul)]
    for axes in [two_axes(n, mesh.size // n) for n in firsts or [mesh.size]]:
        yield Mesh.refine(mesh.size, [mesh.atoms], axes) if fixed else Mesh.of(axes)


def two_axes(outer: int, inner: int) -> dict[str, int]:
    """The axes of a mesh that a search chooses, without those of one device; at least one."""
    axes = {"outer": outer, "inner": inner}
    return {name: size for name, size in axes.items() if size > 1} or {"outer": 1}


@dataclass
class MeshSearch:
    """Searches for the strategy on one mesh.

    Attributes:
        flow: The model.
        cost: The cost model, on the mesh.
        seeds: What the user fixed, on the mesh.
        spec: How to search.
        progress: As in `find`.
    """

    flow: Flow
    cost: CostModel
    seeds: Seeds
    spec: SearchSpec
    progress: OnProgress

    def solve(self) -> tuple[Problem, Solution, tuple[Option, ...]]:
        """Returns a problem, its solution, and the option of every node in the solution."""
        mesh = self.cost.mesh
        axes = [mesh.axis_atoms(name) for name, size in mesh.axes if size > 1]
        if not mesh.axes:
            axes = [(atom,) for atom in range(len(mesh.atoms))]
        if self.spec.algorithm == "recursive":
            return self._recurse(axes)
        problem = self._halving(self.flow).problem(axes, [None] * len(self.flow.items))
        solution = self._best(problem, self.spec.limit)
        return problem, solution, problem.chosen(solution.choice)

    def _recurse(self, axes: Sequence[Atoms]) -> tuple[Problem, Solution, tuple[Option, ...]]:
        """Halves, assuming that later halvings save less and less memory, until the plan fits."""
        if not self.spec.weights.memory_first:
            folded = fold(self.flow, self._pins)
            if folded is not None:
                problem, solution = self._halve(folded.flow, axes, UNLIMITED)
                # If the limit binds, it may be better to shard only some of the repeated layers.
                if solution.memory <= self.spec.limit:
                    return problem, solution, folded.unfold(problem.chosen(solution.choice))
        for share in _SHARES:
            try:
                problem, solution = self._halve(self.flow, axes, self.spec.limit, share)
            except ShardingError:
                if share == _SHARES[-1]:
                    raise
            else:
                return problem, solution, problem.chosen(solution.choice)
        raise AssertionError

    def _halve(
        self, flow: Flow, axes: Sequence[Atoms], limit: float, share: float = 1.0
    ) -> tuple[Problem, Solution]:
        """Returns the problem of the last halving and its solution, whose bound is 0.

        Args:
            flow: The model, or a smaller one.
            axes: The runs of atoms in the order in which they are decided.
            limit: Bytes of one device.
            share: The share of the memory that later halvings could save and that is assumed saved.

        Raises:
            ShardingError: No plan is within the limit.
        """
        number = count(1)

        def solve(problem: Problem, later: int) -> Solution:
            self.progress("halving", next(number), len(axes))
            return self._best(problem, limit if later == 1 else share * later * limit)

        problem, solution = self._halving(flow).run(axes, solve)
        return problem, replace(solution, bound=0.0)

    def _halving(self, flow: Flow) -> Halving:
        return Halving(flow, self.cost, self._pins, self.spec.weights, self.seeds.nodes)

    def _best(self, problem: Problem, limit: float) -> Solution:
        if self.spec.weights.memory_first:
            return least(problem, limit)
        if self.spec.price:
            return priced(problem, self.spec.price)
        effort = HALVING if self.spec.algorithm == "recursive" else THOROUGH
        return best(problem, limit, gap=self.spec.gap, effort=effort)

    @property
    def _pins(self) -> Mapping[str, Sharding]:
        return {**self.seeds.inputs, **self.seeds.parameters}


def seeds_of(
    flow: Flow, chosen: Sequence[Option], layouts: Mapping[str, Sharding], seeds: Seeds
) -> Seeds:
    """Returns seeds with the plan of every node and the shardings of inputs and parameters.

    Args:
        flow: The model.
        chosen: The option of each of its nodes.
        layouts: The shardings of parameters and inputs.
        seeds: What the user fixed, on the mesh of the options; it is kept.
    """
    nodes: dict[str, NodeSeed] = {}
    for item, option in zip(flow.items, chosen, strict=True):
        if not item.fixed:
            plan = option.plan
            nodes[item.name] = NodeSeed(item.name, plan.factors, carried=plan.carried, pinned=False)
    parameters = {v.name for v in flow.values if v.parameter}
    inputs = {n: s for n, s in layouts.items() if n not in parameters}
    # A parameter with one reader follows it.
    several = {v.name for v in flow.values if v.parameter and len(v.uses) > 1}
    shared = {n: s for n, s in layouts.items() if n in several}
    return replace(
        seeds,
        inputs={**inputs, **seeds.inputs},
        parameters={**shared, **seeds.parameters},
        parameter_axes=(),
        nodes={**nodes, **seeds.nodes},
        rest="propagate",
    )

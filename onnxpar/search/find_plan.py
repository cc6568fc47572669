"""From a model and a machine to the plans of all its nodes."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter

from onnxpar.core.errors import ShardingError
from onnxpar.core.machine import Machine
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL, OptimizerParallel
from onnxpar.facts.program import Program
from onnxpar.graph.plan import shardings
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.search.memory_bounded import best, least
from onnxpar.search.node_options import Option, options
from onnxpar.search.problem import CostWeights, Problem, build
from onnxpar.search.recursive import recurse
from onnxpar.search.repeated_layers import fold
from onnxpar.search.solution import Solution
from onnxpar.search.value_flow import Flow, Item, flow

LEVELS = {
    0: CostWeights(communication=10.0),
    1: CostWeights(memory_first=True),
    2: CostWeights(),
}
"""What each level of the objective weighs; see `SearchSpec`."""


UNLIMITED = 1 << 62
"""Bytes of a device that holds whatever there is."""
GAP = 0.01
"""The exact search stops where no plan is better by more than this share."""
Told = Callable[[str, int, int], None]
"""Is told what is tried, and that it is number n of m."""

# Later halvings cannot halve all memory: how much of what would remain is counted on.
_SHARES = (1.0, 0.75, 0.5, 0.0)


@dataclass(frozen=True)
class SearchSpec:
    """How to search.

    Attributes:
        machine: What computes and communicates.
        algorithm: "recursive" or "ilp".
        level: 0 keeps communication small against computing (a second of it counts ten), 1 memory
            (the least first, time among equals), 2 the time of a step.
        memory: Bytes that a device may hold; the machine's where it is None.
        sizes: Sizes of symbols to plan for.
        gap: The exact search stops where no better plan than this share is possible.
        integer: Whether an integer program follows where prices of memory prove too little.
        parallel: What replicas of a parameter share in training.
        micro_batches: Micro-batches of a step of training.
    """

    machine: Machine
    algorithm: str = "recursive"
    level: int = 2
    memory: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    gap: float = GAP
    integer: bool = True
    parallel: OptimizerParallel = NOT_PARALLEL
    micro_batches: int = 1

    @property
    def weights(self) -> CostWeights:
        """What the sum weighs."""
        return replace(LEVELS[self.level], parallel=self.parallel, micro_batches=self.micro_batches)

    @property
    def limit(self) -> float:
        """Bytes that a device may hold."""
        return float(self.machine.memory if self.memory is None else self.memory)


@dataclass(frozen=True)
class Candidate:
    """One mesh that was tried.

    Attributes:
        axes: Its axes.
        seconds: Time of a step of the best plan on it; infinite where none fits.
        memory: Bytes of one device.
        bound: No plan on this mesh takes less time; 0 where nothing was proved.
        elapsed: Seconds that the search took.
        reason: Why there is no plan, or empty.
        limit: Bytes that a device could hold in this search; its bound is for plans that fit.
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
        """How much less another plan on this mesh may cost, as a share, where there is a bound."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        seeds: The plan of every node, for propagation to carry out.
        chosen: The candidate that won.
        candidates: All that were tried, in order.
        timed: Whether the clock stopped a search that this follows from: another machine may find
            another.
    """

    seeds: Seeds
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    timed: bool = False


def find(
    program: Program,
    seeds: Seeds,
    spec: SearchSpec,
    *,
    named: bool,
    free_inputs: bool,
    trained: Collection[str] = (),
    told: Told | None = None,
) -> Found:
    """Searches for the strategy of every forward node that the user did not fix.

    Args:
        program: A forward program, or one with its backward; it is not changed.
        seeds: What the user fixed, on the mesh that the user gave.
        spec: How to search.
        named: Whether the mesh is the user's; else its shape is searched, too.
        free_inputs: Whether graph inputs may be split as suits the nodes best.
        trained: Names of the parameters that are trained; none for a forward program.
        told: Is told of each mesh, or of each halving of the devices, as it begins.

    Raises:
        ShardingError: Nothing fits into the memory of a device.
    """
    seen = flow(program, trained, seeds.nodes)
    tried: list[Candidate] = []
    winner: tuple[float, Candidate, Seeds] | None = None
    timed = False
    pinned = replace(seeds, inputs={} if free_inputs else seeds.inputs)
    fixed = bool(pinned.nodes or pinned.inputs or pinned.parameters or pinned.outputs)
    told = told or (lambda what, number, count: None)
    meshes = list(_meshes(seeds.mesh, spec, named, fixed))
    for number, mesh in enumerate(meshes, 1):
        if spec.algorithm != "recursive":
            told("mesh " + "x".join(str(n) for _, n in mesh.axes), number, len(meshes))
        started = perf_counter()
        cost = CostModel(spec.machine, mesh, program.env.table, spec.sizes)
        run = _Search(seen, cost, replace(pinned, mesh=mesh), spec, told)
        try:
            problem, solution, chosen = run.solve()
        except ShardingError as error:
            timed |= run.timed
            spent = perf_counter() - started
            tried.append(Candidate(mesh.axes, inf, 0.0, 0.0, spent, str(error)))
            continue
        timed |= run.timed
        plain = problem.seconds(solution.choice)
        candidate = Candidate(
            mesh.axes,
            plain,
            solution.memory,
            solution.bound,
            perf_counter() - started,
            limit=spec.limit,
        )
        tried.append(candidate)
        if winner is None or solution.seconds < winner[0]:
            lying = problem.lying(solution.choice)
            winner = solution.seconds, candidate, seeds_of(seen, chosen, lying, run.seeds)
    if winner is None:
        raise ShardingError(tried[0].reason)
    return Found(winner[2], winner[1], tuple(tried), timed)


def _meshes(mesh: Mesh, spec: SearchSpec, named: bool, fixed: bool) -> Iterator[Mesh]:
    """The meshes to try: the user's; every pair of axes; or, halving, the row of all atoms.

    What the user fixed is said in the atoms of the user's mesh, so where anything is fixed these
    are kept, and pairs of axes that would need others are left out.
    """
    if named or mesh.size == 1:
        yield mesh
        return
    if spec.algorithm == "recursive":
        atoms = mesh.atoms if fixed else tuple(reversed(Mesh.of({"x": mesh.size}).atoms))
        yield Mesh.of({f"x{i}": n for i, n in enumerate(atoms)})
        return
    sizes = [n for n in range(1, mesh.size) if mesh.size % n == 0]
    tried = 0
    for first in sizes:
        if first == 1 and len(sizes) > 1:
            continue
        axes = {"x": first, "y": mesh.size // first} if first > 1 else {"x": mesh.size}
        if not fixed or _cuts(mesh, first):
            tried += 1
            yield Mesh.refine(mesh.size, [mesh.atoms], axes) if fixed else Mesh.of(axes)
    if not tried:
        yield Mesh.refine(mesh.size, [mesh.atoms], {"x": mesh.size})


def _cuts(mesh: Mesh, size: int) -> bool:
    """Whether a row of atoms makes up an axis of a size, and the next ones the other axis."""
    position = 1
    for atom in mesh.atoms:
        if position >= size:
            break
        position *= atom
    return position == size


@dataclass
class _Search:
    flow: Flow
    cost: CostModel
    seeds: Seeds
    spec: SearchSpec
    told: Told
    timed: bool = False

    def solve(self) -> tuple[Problem, Solution, tuple[Option, ...]]:
        """Returns a problem, its solution, and the option of every node that it means."""
        mesh = self.cost.mesh
        axes = [mesh.axis_atoms(name) for name, size in mesh.axes if size > 1]
        if not mesh.axes:
            axes = [(atom,) for atom in range(len(mesh.atoms))]
        if self.spec.algorithm == "recursive":
            return self._recurse(axes)
        known: dict[object, tuple[Option, ...]] = {}
        for item in self.flow.items:
            key = (item.kind, item.pin)
            if key not in known:
                known[key] = self._options(item, axes, None)
        found = [known[item.kind, item.pin] for item in self.flow.items]
        problem = build(self.flow, found, self.cost, self._pins, self.spec.weights)
        solution = self._best(problem, self.spec.limit)
        return problem, solution, problem.chosen(solution.choice)

    def _recurse(self, axes: Sequence[Atoms]) -> tuple[Problem, Solution, tuple[Option, ...]]:
        """Halves with less and less memory left to later halvings, until all fits at the end."""
        if not self.spec.weights.memory_first:
            folded = fold(self.flow, self._pins)
            if folded is not None:
                problem, solution = self._halve(folded.flow, axes, UNLIMITED)
                # Under a limit that binds it may be better to divide only some of alike layers.
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
        """Halves until nothing is left to halve.

        Args:
            flow: The model, or a smaller one.
            axes: The runs of atoms in the order in which they are decided.
            limit: Bytes of one device.
            share: Of what a later halving may still cut, so much counts as if it did.
        """
        done = 0

        def decide(problem: Problem, later: int) -> Solution:
            nonlocal done
            done += 1
            self.told("halving", done, len(axes))
            if later == 1:
                return self._best(problem, limit)
            try:
                return self._best(problem, share * later * limit)
            except ShardingError:
                return least(problem)

        pins, weights = self._pins, self.spec.weights
        return recurse(flow, axes, self.cost, self._options, decide, pins=pins, weights=weights)

    def _best(self, problem: Problem, limit: float) -> Solution:
        if self.spec.weights.memory_first:
            return least(problem, limit)
        found = best(problem, limit, gap=self.spec.gap, integer=self.spec.integer)
        self.timed |= found.timed
        return found

    @property
    def _pins(self) -> Mapping[str, Sharding]:
        return {**self.seeds.inputs, **self.seeds.parameters}

    def _options(
        self, item: Item, axes: Sequence[Atoms], before: Option | None
    ) -> tuple[Option, ...]:
        seed = self.seeds.nodes.get(item.name)
        if seed is None:
            return options(item, axes, self.cost, before)
        plan = shardings(
            item.rule,
            item.view,
            seed.factors,
            self.cost.mesh,
            carried=seed.carried,
            pinned=True,
        )
        return (Option(plan, (None,) * len(axes)),)


def seeds_of(
    flow: Flow, chosen: Sequence[Option], lying: Mapping[str, Sharding], seeds: Seeds
) -> Seeds:
    """Returns what propagation is given: the plan of every node, how inputs and parameters lie.

    Args:
        flow: The model.
        chosen: The option of each of its nodes.
        lying: How parameters and inputs lie.
        seeds: What the user fixed, kept; on the mesh of the options.
    """
    nodes: dict[str, NodeSeed] = {}
    for item, option in zip(flow.items, chosen, strict=True):
        if not item.fixed:
            plan = option.plan
            nodes[item.name] = NodeSeed(item.name, plan.factors, carried=plan.carried, pinned=False)
    parameters = {v.name for v in flow.values if v.parameter}
    inputs = {n: s for n, s in lying.items() if n not in parameters}
    # One that is read once follows its reader.
    several = {v.name for v in flow.values if len(v.uses) > 1}
    laid = {n: s for n, s in lying.items() if n in parameters & several}
    return replace(
        seeds,
        inputs={**inputs, **seeds.inputs},
        parameters={**laid, **seeds.parameters},
        parameter_axes=(),
        nodes={**nodes, **seeds.nodes},
        rest="propagate",
    )

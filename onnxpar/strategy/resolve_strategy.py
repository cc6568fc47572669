"""A strategy file or preset, including MindSpore's tuples, applied to a program: mesh and seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx_ir as ir

from onnxpar.core.errors import MeshError, StrategyError
from onnxpar.core.layout import TensorLayout
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.name_patterns import match, nearest
from onnxpar.core.rule import REPLICATED, SPECIAL
from onnxpar.core.sharding import Component, DimSharding, Sharding
from onnxpar.core.symbols import Dim, symbols_of
from onnxpar.facts.program import Program
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import Plan, factor_sizes, may_stay_partial
from onnxpar.graph.seeds import SPREAD, NodeSeed, Seeds
from onnxpar.strategy.annotation_seeds import annotated_seeds
from onnxpar.strategy.divided_weights import divided_nodes, match_parameters, spread_nodes
from onnxpar.strategy.expanded_nodes import Replaced
from onnxpar.strategy.factor_splits import (
    FactorSplit,
    Site,
    Unit,
    aligned,
    atoms_of,
    axis_units,
    check_rank,
    counts_of,
    gathered_operands,
    is_named,
    is_numeric,
    named_factors,
    numeric_factors,
    show,
    splits_of,
)
from onnxpar.strategy.output_layouts import factors_from_outputs, wanted
from onnxpar.strategy.schema import DATA_AXIS, NodeEntry, Strategy
from onnxpar.strategy.tensor_entry import TensorEntry, names_in


@dataclass(frozen=True)
class _Choice:
    """How each factor of a node is sharded, and the operands that the node gathers, by index."""

    site: Site
    entry: NodeEntry
    factors: Mapping[str, FactorSplit]
    gathered: Mapping[int, tuple[FactorSplit, ...]]


def resolve(strategy: Strategy, program: Program) -> Seeds:
    """Resolves a strategy to the nodes, inputs and parameters of a model.

    Args:
        strategy: The strategy.
        program: The program of one device; it is not changed.

    Raises:
        StrategyError: An entry matches nothing, contradicts another one or does not fit its tensor;
            or device matrices do not divide the devices or exclude one another.
    """
    if strategy.annotation is not None:
        return annotated_seeds(strategy.annotation, program)
    return _Resolver(strategy, program).run()


class _Resolver:
    def __init__(self, strategy: Strategy, program: Program) -> None:
        self.strategy = strategy
        self.model, self.env, self.rules = program.model, program.env, program.rules
        self.axes = axis_units(strategy.axes, strategy.devices)
        # The device matrices that the strategy uses, each with the first entry that uses it.
        self.matrices: dict[tuple[int, ...], str] = {}
        if strategy.atoms:
            self.matrices[strategy.atoms] = f"{strategy.where('atoms')}: 'atoms'"

    def run(self) -> Seeds:
        strategy, graph = self.strategy, self.model.graph
        bodies = self.bodies()
        entries = self.entries(bodies)
        choices = [self.choose(*item) for item in entries if item[0] in self.rules.views]
        replaced = [
            Replaced.of(*item, bodies[item[0]], self.env, self.tensor)
            for item in entries
            if item[0] not in self.rules.views
        ]
        inputs, parameters = self.inputs(), self.parameters()
        self.mesh = self.build_mesh()
        nodes = {seed.node: seed for r in replaced for seed in r.seeds(self.rules, self.mesh)}
        nodes |= {c.site.view.name: self.seed(c) for c in choices}
        if strategy.rest == "data_parallel":
            nodes = {**self.data_parallel_nodes(nodes), **nodes}
        if strategy.rest == SPREAD and not nodes:
            raise StrategyError(
                f"{strategy.where('rest')}: 'rest' {SPREAD!r}: expected at least one entry under "
                "'nodes', from which strategies spread, got none"
            )
        shardings = self.data_parallel() if strategy.dataset == "data_parallel" else {}
        shardings |= {n: make(self.mesh) for n, make in inputs.items()}
        return Seeds(
            self.mesh,
            nodes,
            shardings,
            {**self.gathered(choices), **{n: make(self.mesh) for n, make in parameters.items()}},
            tuple(atoms for n in strategy.parameter_axes if (atoms := self.mesh.axis_atoms(n))),
            strategy.rest if strategy.rest in ("replicate", SPREAD) else "propagate",
            held=frozenset(v.name or "" for v in graph.inputs)
            if strategy.dataset == "full_batch"
            else frozenset(inputs),
        )

    # -- nodes -----------------------------------------------------------------------------------

    def bodies(self) -> dict[str, list[NodeView]]:
        """The nodes of each body, by the name of the node that it replaces."""
        found: dict[str, list[NodeView]] = {}
        for view in self.rules.views.values():
            if view.origin and not view.is_backward:
                found.setdefault(view.origin, []).append(view)
        return found

    def entries(self, bodies: Mapping[str, Sequence[NodeView]]) -> list[tuple[str, str, NodeEntry]]:
        """Name, place and entry of every node that has one, in the order of the graph.

        If a pattern matches a node and also the nodes of its body, because their names begin with
        its name, it applies to the node.
        """
        where = {key: self.strategy.where("nodes", key) for key in self.strategy.nodes}
        views = self.rules.views.values()
        resolved = self.strategy.given is not None
        names = [view.name for view in views if resolved or not view.is_backward]
        divided = divided_nodes(self.model.graph)
        wholes = dict.fromkeys(divided.values())
        found = match(self.strategy.nodes, [*names, *bodies, *wholes], "node", where)
        found = spread_nodes(found, divided, self.rules.views)
        for origin, inner in bodies.items():
            for view in inner:
                if origin in found and view.name in found and found[view.name][0] != view.name:
                    del found[view.name]
        return [(name, where[key], entry) for name, (key, entry) in found.items()]

    def choose(self, name: str, where: str, entry: NodeEntry) -> _Choice:
        site = Site(self.rules.views[name], self.rules.by_node[name], where)
        tensors = [t for t in (*(entry.inputs or ()), *(entry.out or ())) if t is not None]
        if name in self.rules.reasons and any(
            is_named(t) or prod(counts_of(t)) > 1 for t in tensors
        ):
            raise site.fail(f"it cannot be sharded and is replicated: {self.rules.reasons[name]}")
        operands = aligned(site, entry.inputs) if entry.inputs is not None else []
        numeric = [t for _, t in operands if is_numeric(t)]
        named = [t for _, t in operands if is_named(t)]
        if numeric and named:
            raise site.fail(
                "expected all operands to use numbers of shards, or all to use mesh axes, got "
                f"{show(numeric[0])} and {show(named[0])}"
            )
        for tensor in tensors:
            self.use_names(tensor, site.title)
        if entry.partial is not None:
            self.use_names((tuple(entry.partial.axes),), site.title)
        if named:
            splits = [(i, splits_of(entry, self.axes)) for i, entry in operands]
            factors = named_factors(site, splits)
            gathered = gathered_operands(site, splits, factors, FactorSplit())
        else:
            numbers = [(i, counts_of(entry)) for i, entry in operands]
            counts = numeric_factors(site, numbers, self.strategy.devices)
            self.use(tuple(counts.values()), site.title)
            factors, before = {}, 1
            for factor, count in counts.items():
                factors[factor] = FactorSplit(
                    (Unit(before, count, str(count)),) if count > 1 else ()
                )
                before *= count
            gathered = gathered_operands(site, numbers, factors, 1)
        factors |= self.further(site, entry, factors)
        return _Choice(site, entry, factors, gathered)

    def further(
        self, site: Site, entry: NodeEntry, known: Mapping[str, FactorSplit]
    ) -> dict[str, FactorSplit]:
        """How the factors under `split` are sharded, which no operand has."""
        found = {}
        for name, dim in (entry.split or {}).items():
            if name not in site.rule.splittable or name in known:
                free = [n for n in site.rule.splittable if n not in known]
                raise site.fail(
                    f"'split': expected a factor that is in no operand, got {name!r}"
                    f"{nearest(name, free)}"
                )
            self.use_names((dim,), site.title)
            (found[name],) = splits_of((dim,), self.axes)
        return found

    def seed(self, choice: _Choice) -> NodeSeed:
        site = choice.site
        sizes = factor_sizes(site.rule, site.view)
        factors: dict[str, DimSharding] = {}
        owner: dict[int, str] = {}
        for name, split in choice.factors.items():
            atoms = atoms_of(split.units, self.mesh)
            for atom in atoms:
                if atom in owner:
                    raise site.fail(
                        f"expected distinct mesh axes for its dims {owner[atom]} and {name}, got "
                        f"{self.mesh.describe((atom,))} for both"
                    )
                owner[atom] = name
            if atoms:
                what = f"{site.title}: dim {name}"
                factors[name] = split.components(sizes[name], self.mesh, site.view.table, what)
        out = wanted(site, choice.entry.out or (), factors, self.mesh, self.axes)
        if choice.entry.inputs is None:
            factors = factors_from_outputs(site, out, self.mesh)
        carried = self.carried(choice, owner)
        given = self.strategy.given
        pinned = given is None or site.view.name in given
        return NodeSeed(site.view.name, factors, out, site.where, carried, pinned)

    def gathered(self, choices: Sequence[_Choice]) -> dict[str, Sharding]:
        """The layouts of the parameters that nodes with an entry gather."""
        found: dict[str, Sharding] = {}
        for choice in choices:
            view = choice.site.view
            for index, splits in choice.gathered.items():
                value = view.node.inputs[index]
                name = (value.name or "") if value is not None else ""
                if name in self.model.graph.initializers:
                    atoms = [atoms_of(split.units, self.mesh) for split in splits]
                    found.setdefault(name, Sharding.of(view.shape(index), atoms))
        return found

    def carried(self, choice: _Choice, owner: Mapping[int, str]) -> dict[int, tuple[Atoms, str]]:
        """The operands that stay partial through a node."""
        entry, site = choice.entry.partial, choice.site
        if entry is None:
            return {}
        units = tuple(self.axes[name] for name in entry.axes)
        atoms = tuple(sorted(atoms_of(units, self.mesh)))
        taken = [a for a in atoms if a in owner]
        if taken:
            raise site.fail(
                "'partial': expected mesh axes that shard none of its dims, got "
                f"{self.mesh.describe(taken)}, which shards {owner[taken[0]]}"
            )
        reduction = entry.reduction
        if not may_stay_partial(site.rule, frozenset(entry.operands), reduction):
            groups = [sorted(s) for r, s in site.rule.linear if r == reduction]
            none = f"none, since its rule allows no partial {reduction}"
            legal = " or ".join(map(str, groups)) or none
            raise site.fail(f"'partial': 'operands': expected {legal}, got {entry.operands}")
        return dict.fromkeys(entry.operands, (atoms, reduction))

    # -- tensors ---------------------------------------------------------------------------------

    def inputs(self) -> dict[str, Callable[[Mesh], Sharding]]:
        """For each input with an entry a function from the mesh to its sharding."""
        entries = self.strategy.dataset
        if not isinstance(entries, Mapping):
            return {}
        where = {key: self.strategy.where("dataset", key) for key in entries}
        names = [v.name or "" for v in self.model.graph.inputs]
        return self.tensors(match(entries, names, "graph input", where), "graph input", where)

    def parameters(self) -> dict[str, Callable[[Mesh], Sharding]]:
        """For each parameter with an entry a function from the mesh to its sharding."""
        entries = self.strategy.parameters
        where = {key: self.strategy.where("parameters", key) for key in entries}
        found = match_parameters(entries, self.model.graph, where)
        return self.tensors(found, "parameter", where)

    def tensors(
        self, found: Mapping[str, tuple[str, TensorEntry]], what: str, where: Mapping[str, str]
    ) -> dict[str, Callable[[Mesh], Sharding]]:
        return {
            name: self.tensor(f"{where[key]}: {what} {name!r}", self.env.shapes[name], entry)
            for name, (key, entry) in found.items()
        }

    def tensor(
        self, title: str, shape: Sequence[Dim], entry: TensorEntry
    ) -> Callable[[Mesh], Sharding]:
        check_rank(title, shape, entry)
        self.use_names(entry, title)
        if is_numeric(entry):
            counts = counts_of(entry)
            self.use(counts, title)
            return lambda mesh: Sharding.of(shape, mesh.matrix(counts))
        splits = splits_of(entry, self.axes)
        table = self.env.table
        return lambda mesh: Sharding(
            tuple(
                split.components(size, mesh, table, title)
                for size, split in zip(shape, splits, strict=True)
            )
        )

    # -- mesh ------------------------------------------------------------------------------------

    def use(self, matrix: tuple[int, ...], owner: str) -> None:
        """Records a device matrix that the mesh must contain."""
        devices = self.strategy.devices
        if devices % prod(matrix):
            product = "·".join(map(str, matrix))
            raise StrategyError(
                f"{owner}: expected numbers of shards whose product divides the {devices} devices, "
                f"got {product} = {prod(matrix)}"
            )
        self.matrices.setdefault(matrix, owner)

    def use_names(self, entry: TensorEntry, owner: str) -> None:
        """Records the device matrices of a layout, or of runs without a name such as `4@2`."""
        if isinstance(entry, TensorLayout):
            self.use(entry.device_matrix, owner)
        for name in names_in(entry):
            if name not in self.strategy.axes:
                unit = self.axes[name]
                self.use((unit.before, unit.size), owner)

    def build_mesh(self) -> Mesh:
        devices, axes = self.strategy.devices, dict(self.strategy.axes)
        try:
            return Mesh.refine(devices, list(self.matrices), axes)
        except MeshError:
            # The divisors of all matrices must form one chain, so two matrices contradict.
            used = list(self.matrices.items())
            if axes:
                where = self.strategy.where("mesh")
                used.insert(0, (tuple(axes.values()), f"{where}: the mesh {axes}"))
            for index, (second, later) in enumerate(used):
                for first, earlier in used[:index]:
                    try:
                        Mesh.refine(devices, [first, second])
                    except MeshError as error:
                        raise StrategyError(
                            f"{later}: cannot be used with {earlier}: {error}"
                        ) from None
            raise

    # -- data parallel ---------------------------------------------------------------------------

    def data_atoms(self) -> Atoms:
        """The atoms that shard the batch: of the axis dp, or all if no axis has a name."""
        if not self.strategy.axes:
            return tuple(range(len(self.mesh.atoms)))
        return self.mesh.axis_atoms(DATA_AXIS) if DATA_AXIS in self.strategy.axes else ()

    def data_parallel(self) -> dict[str, Sharding]:
        """The shardings of inputs with the batch over the data axes, unless its size is 1.

        The batch is dim 0. If the size of dim 0 is a number, as that of position ids for time, row
        and column is, it is the one dim that has a symbol of another input's dim 0.
        """
        found = {}
        shapes = {v.name or "": self.env.shapes[v.name or ""] for v in self.model.graph.inputs}
        batches = {shape[0] for shape in shapes.values() if shape and symbols_of(shape[0])}
        for name, shape in shapes.items():
            if shape and shape[0] != 1:
                others = [dim for dim, size in enumerate(shape) if size in batches]
                batch = others[0] if shape[0] not in batches and len(others) == 1 else 0
                if self.env.table.may_be_empty(shape[batch]):
                    continue
                atoms = [self.data_atoms() if dim == batch else () for dim in range(len(shape))]
                found[name] = Sharding.of(shape, atoms)
        return found

    def data_parallel_nodes(self, fixed: Mapping[str, NodeSeed]) -> dict[str, NodeSeed]:
        """Shards the batch in every node that has no entry of its own.

        The batch is followed from dim 0 of the graph inputs. It is the leading factor of dim 0 of
        an operand that has it, and is passed on to outputs whose dim 0 begins with that factor.
        """
        atoms = self.data_atoms()
        where = self.strategy.where("rest")
        carries = {v.name for v in self.model.graph.inputs if self.env.shapes[v.name or ""]}
        seeds = {}
        for node in self.model.graph:
            name = node.name or ""
            rule = self.rules.by_node[name]
            batch = None
            for value, operand in zip(node.inputs, rule.inputs, strict=False):
                if value is not None and value.name in carries and operand.dims:
                    batch = batch or next(iter(operand.dims[0]), None)
            if batch is None:
                continue
            for value, operand in zip(node.outputs, rule.outputs, strict=True):
                if operand.dims and operand.dims[0][:1] == (batch,):
                    carries.add(value.name)
            if atoms and name not in fixed and rule.kinds[batch] not in (REPLICATED, SPECIAL):
                size = factor_sizes(rule, self.rules.views[name])[batch]
                seeds[name] = NodeSeed(name, {batch: (Component(size, atoms),)}, (), where)
        return seeds


def resolved(plan: Plan, model: ir.Model) -> dict[str, Any]:
    """Returns the strategy of a plan, as plain data for the manifest.

    `{"mesh": {"devices", "axes", "atoms"}, "inputs": {name: layout}, "parameters": {…}, "nodes":
    {name: {"in": [layout | None, …], "out": […]}}}` with layouts as `{"pieces": [2, 1], "text":
    "[dp, ~]"}`; None is an operand that is absent or taken in its current layout.
    """
    mesh = plan.mesh
    known: dict[Sharding | None, dict[str, Any] | None] = {None: None}

    def show_layout(sharding: Sharding | None) -> dict[str, Any] | None:
        if sharding is not None and sharding not in known:
            pieces = list(sharding.strategy(mesh))
            known[sharding] = {"pieces": pieces, "text": sharding.describe(mesh)}
        return known[sharding]

    nodes = {}
    for node in model.graph:
        found = plan.nodes.get(node.name or "")
        if found is not None:
            nodes[node.name or ""] = {
                "in": [show_layout(s) for s in found.inputs],
                "out": [show_layout(s) for s in found.outputs],
            }
    return {
        "mesh": {"devices": mesh.size, "axes": dict(mesh.axes), "atoms": list(mesh.atoms)},
        "inputs": {name: show_layout(s) for name, s in plan.inputs.items()},
        "parameters": {name: show_layout(s) for name, s in plan.parameters.items()},
        "nodes": nodes,
    }

"""ONNX annotations applied to a program: the mesh, and the seeds from which propagation starts.

The shards of every tensor must follow from one order of the devices: along each axis of a mesh
whose last axis varies fastest, the devices of neighbouring shards are equally far apart. The mesh
is the coarsest one for which this holds for all tensors.

A partial value cannot be annotated, so it is derived. If the sharding of a node makes a result
partial, and the result has no spec, it stays partial. If the next node's results have no spec
either, and its operator is linear in the operand, it takes the operand partial. A result with a
spec is reduced at once.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

import onnx_ir as ir

from onnxpar.core.errors import MeshError, ShardingError, StrategyError, SymbolError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.name_patterns import nearest
from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import Component, DimSharding, Sharding, canonical_dim
from onnxpar.core.symbols import Dim, as_dim, dim_str
from onnxpar.facts.program import Program
from onnxpar.graph.metadata_keys import ANNOTATION, EXPANDED_OPERANDS
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import factor_sizes, may_stay_partial, operand_sharding, project, shardings
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.strategy.annotation_reader import Annotation, DeviceRuns, NodeSpec, Piece, TensorSpec
from onnxpar.strategy.expanded_nodes import Replaced, bodies_by_results
from onnxpar.strategy.output_layouts import check_sizes

Run = tuple[int, int]
"""A number of shards, and the distance between the devices of neighbouring shards."""

AnnotatedPart = tuple[Dim, tuple[Run, ...]]
"""A part of a dim: its size and the runs over which it is sharded, outermost first."""

AnnotatedDims = tuple[tuple[AnnotatedPart, ...], ...]

PartialSum = tuple[Atoms, str]
"""The atoms over which a value is partial, and the reduction."""

SHOWN = 4


def annotated_seeds(annotation: Annotation, program: Program) -> Seeds:
    """Resolves an annotation to the nodes, inputs and parameters of a model.

    Args:
        annotation: The annotation.
        program: The program of one device; it is not changed.

    Raises:
        StrategyError: An annotation does not fit its tensor or its node's operator, or no mesh has
            the order of the devices.
    """
    return _Reader(annotation, program).run()


def annotated_virtual_stages(annotation: Annotation, graph: ir.Graph) -> dict[str, int]:
    """Returns the virtual stages of an annotation, by the names of the graph's nodes.

    The nodes of a body have the virtual stage of the node that the body replaces.
    """
    stages = {n: s.stage for s in annotation.nodes if s.stage is not None for n in s.outputs if n}
    found = {}
    for node in graph:
        replaced = node.metadata_props.get(EXPANDED_OPERANDS)
        made = json.loads(replaced)["out"] if replaced else [v.name for v in node.outputs]
        virtual = next((stages[name] for name in made if name in stages), None)
        if virtual is not None:
            found[node.name or ""] = virtual
    return found


def runs_of(sharding: Sharding, mesh: Mesh) -> DeviceRuns:
    """Returns a layout as in the metadata of a model, without the axes over which it is partial."""
    return [
        [
            (
                part.size if isinstance(part.size, int) else dim_str(part.size),
                [(mesh.atoms[a], mesh.strides[a]) for a in part.atoms],
            )
            for part in dim
        ]
        if any(part.atoms for part in dim)
        else []
        for dim in sharding.dims
    ]


@dataclass(frozen=True)
class _Tensor:
    """An annotated tensor: its name in messages, and the parts of its dims."""

    title: str
    dims: AnnotatedDims

    def sharding(self, mesh: Mesh) -> Sharding:
        """Returns its sharding; raises StrategyError if two parts use the same devices."""

        def atoms(runs: tuple[Run, ...]) -> Atoms:
            rows = (mesh.run(mesh.size // (n * apart), n) for n, apart in runs if n > 1)
            return tuple(atom for row in rows for atom in row)

        dims = tuple(tuple(Component(s, atoms(runs)) for s, runs in parts) for parts in self.dims)
        sharding = Sharding(dims)
        try:
            sharding.validate(mesh, self.title)
        except ShardingError as error:
            raise StrategyError(str(error)) from None
        return sharding


@dataclass(frozen=True)
class _Annotated:
    """An annotated node, its tensors resolved to the mesh."""

    spec: NodeSpec
    title: str
    tensors: Mapping[str, Sharding]


@dataclass
class _Reader:
    annotation: Annotation
    program: Program
    # The tensor with which each run was first read, for messages.
    found_in: dict[Run, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.env, self.rules = self.program.env, self.program.rules
        self.pinned = frozenset(self.annotation.extras.pinned or ())

    def is_pinned(self, node: str) -> bool:
        """Whether a node's strategy comes from the user."""
        return self.annotation.extras.pinned is None or node in self.pinned

    def run(self) -> Seeds:
        source, extras = self.annotation.source, self.annotation.extras
        read = []
        for spec in self.annotation.nodes:
            title = f"{source}: {spec.title}"
            tensors = {
                n: self.tensor(f"{title}: tensor {n!r}", self.env.shapes[n], tensor)
                for n, tensor in spec.tensors.items()
                if n in self.env.shapes
            }
            read.append((spec, title, tensors))
        inputs = self.layouts("input", extras.inputs, [v.name or "" for v in self.graph.inputs])
        parameters = self.layouts("parameter", extras.parameters, list(self.graph.initializers))
        mesh = self.build_mesh()
        nodes = [
            _Annotated(spec, title, {n: t.sharding(mesh) for n, t in tensors.items()})
            for spec, title, tensors in read
        ]
        return Seeds(
            mesh,
            self.nodes(mesh, nodes),
            self.entering(nodes, {n: t.sharding(mesh) for n, t in inputs.items()}),
            {n: t.sharding(mesh) for n, t in parameters.items()},
        )

    @property
    def graph(self) -> ir.Graph:
        return self.program.graph

    # -- tensors ---------------------------------------------------------------------------------

    def tensor(self, title: str, shape: Sequence[Dim], spec: TensorSpec) -> _Tensor:
        rank = len(shape)
        dims: dict[int, Sequence[Piece]] = {}
        for axis, pieces in spec.dims:
            if not -rank <= axis < rank:
                raise StrategyError(
                    f"{title}: expected an axis from {-rank} to {rank - 1} for the shape "
                    f"({', '.join(map(dim_str, shape))}), got {axis}"
                )
            if axis % rank in dims:
                raise StrategyError(f"{title}: axis {axis}: expected it once, got it twice")
            dims[axis % rank] = pieces
        counts = [n for axis in sorted(dims) for _, n in dims[axis]]
        runs = iter(self.runs(title, counts, spec.groups))
        found = []
        for axis, size in enumerate(shape):
            given = [s for s, _ in dims.get(axis, ())]
            sizes = self.sizes(f"{title}: axis {axis}", size, given)
            found.append(tuple((s, next(runs) if given else ()) for s in sizes))
        return _Tensor(title, tuple(found))

    def sizes(self, title: str, size: Dim, given: Sequence[int | str | None]) -> list[Dim]:
        """The sizes of the parts of a dim of `size`."""
        if len(given) <= 1:
            # The tensor has the size; another tool may have another name for it.
            if given and isinstance(given[0], int) and isinstance(size, int) and given[0] != size:
                raise StrategyError(f"{title}: expected the size {size}, got {given[0]}")
            return [size]
        try:
            sizes = [as_dim(s) for s in given]
        except SymbolError as error:
            raise StrategyError(f"{title}: expected the size of each component: {error}") from None
        if not self.env.table.equal(as_dim(prod(sizes)), size):
            raise StrategyError(
                f"{title}: expected components whose product is {dim_str(size)}, got "
                f"{' x '.join(map(dim_str, sizes))}"
            )
        return sizes

    def runs(
        self, title: str, counts: Sequence[int], groups: Sequence[tuple[int, ...]]
    ) -> list[tuple[Run, ...]]:
        """Returns for each number of shards the runs of devices over which they are."""
        firsts = [group[0] for group in groups]
        offsets, step = [], len(groups)
        for count in counts:
            step //= count
            offsets.append([firsts[i * step] - firsts[0] for i in range(count)])
        held = [device - firsts[0] for device in groups[0]]
        found = [_decompose(row) for row in (*offsets, held)]
        parts = [run for runs in found if runs is not None for run in runs]
        end = 1
        for count, stride in sorted(parts, key=lambda run: run[1]):
            # Runs of one order of the devices begin where the smaller runs end.
            end = stride * count if stride == end else 0
        if (
            None in found
            or end != self.annotation.devices
            or firsts != [sum(corner) for corner in product(*offsets)]
            or any([d - g[0] for d in g] != held for g in groups)
        ):
            shown = ", ".join(str(list(g)) if len(g) > 1 else str(g[0]) for g in groups[:SHOWN])
            more = ", ..." if len(groups) > SHOWN else ""
            raise StrategyError(
                f"{title}: expected shards in mesh order (devices numbered row by row from 0, "
                f"each dim sharded over mesh axes), got {shown}{more}"
            )
        for run in parts:
            self.found_in.setdefault(run, title)
        return [runs or () for runs in found[:-1]]

    def layouts(
        self, kind: str, layouts: Mapping[str, DeviceRuns], known: Sequence[str]
    ) -> dict[str, _Tensor]:
        """Reads the layouts of graph inputs or parameters from the metadata."""
        found = {}
        for name, layout in layouts.items():
            title = f"{self.annotation.source}: metadata {ANNOTATION!r}: {kind} {name!r}"
            if name not in known:
                raise StrategyError(
                    f"{title}: expected a name from the model{nearest(name, known)}"
                )
            shape = self.env.shapes[name]
            if len(layout) != len(shape):
                raise StrategyError(f"{title}: expected {len(shape)} dims, got {len(layout)}")
            dims = []
            for axis, (size, parts) in enumerate(zip(shape, layout, strict=True)):
                sizes = self.sizes(f"{title}: axis {axis}", size, [s for s, _ in parts])
                runs = [tuple(r) for _, r in parts] or [()]
                dims.append(tuple(zip(sizes, runs, strict=True)))
                for run in (run for row in runs for run in row):
                    self.found_in.setdefault(run, title)
            found[name] = _Tensor(title, tuple(dims))
        return found

    def build_mesh(self) -> Mesh:
        devices, extras = self.annotation.devices, self.annotation.extras
        rows = [tuple(extras.atoms)] if extras.atoms else []
        title = f"{self.annotation.source}: metadata {ANNOTATION!r}"
        for row, where in [((), title), *((r, t) for r, t in self.found_in.items() if r[0] > 1)]:
            if row:
                count, stride = row
                rows.append((devices // (count * stride), count, stride))
            try:
                mesh = Mesh.refine(devices, rows, extras.axes)
            except MeshError as error:
                raise StrategyError(
                    f"{where}: expected a device order that is compatible with the tensors "
                    f"before it: {error}"
                ) from None
        return mesh

    # -- nodes -----------------------------------------------------------------------------------

    def nodes(self, mesh: Mesh, annotated: Sequence[_Annotated]) -> dict[str, NodeSeed]:
        made_by = {v.name: node.name or "" for node in self.graph for v in node.outputs if v.name}
        bodies = bodies_by_results(self.rules)
        seeds: dict[str, NodeSeed] = {}
        partials: dict[str, PartialSum] = {}
        for item in annotated:
            if item.spec.outputs in bodies:
                seeds |= {s.node: s for s in self.body(mesh, item, bodies[item.spec.outputs])}
                continue
            name = next((made_by[n] for n in item.spec.outputs if n in made_by), None)
            # Constants, and nodes whose results nothing reads, have been removed.
            if name is not None and item.tensors:
                seeds[name] = self.node(mesh, item, self.rules.views[name], partials)
        return seeds

    def body(self, mesh: Mesh, item: _Annotated, views: Sequence[NodeView]) -> Iterator[NodeSeed]:
        """The strategies of the nodes of a body that read or make annotated tensors."""
        names = {n: (lambda _, s=s: s) for n, s in item.tensors.items()}
        inputs = {n: names[n] for n in item.spec.inputs if n in names}
        outputs = {n: names[n] for n in item.spec.outputs if n in names}
        for seed in Replaced(item.title, tuple(views), inputs, outputs).seeds(self.rules, mesh):
            yield replace(seed, pinned=self.is_pinned(seed.node))

    def node(
        self, mesh: Mesh, item: _Annotated, view: NodeView, partials: dict[str, PartialSum]
    ) -> NodeSeed:
        rule = self.rules.by_node[view.name]
        if view.name in self.rules.reasons and any(s.split_atoms for s in item.tensors.values()):
            raise StrategyError(
                f"{item.title}: it cannot be sharded and is replicated: "
                f"{self.rules.reasons[view.name]}"
            )
        factors = {
            n: parts
            for n, parts in self.factors(mesh, item, view, rule).items()
            if any(c.atoms for c in parts)
        }
        outputs = [v.name or "" for v in view.node.outputs]
        taken = {a for parts in factors.values() for c in parts for a in c.atoms}
        carried: dict[int, PartialSum] = {}
        known = self.annotation.extras.carried
        if not any(n in item.tensors for n in outputs) and (known is None or view.name in known):
            carried = _carried(rule, view, partials, taken)
        try:
            made = shardings(rule, view, factors, mesh, carried=carried, pinned=True).outputs
        except ShardingError as error:
            raise StrategyError(f"{item.title}: {error}") from None
        out: list[Sharding | None] = []
        for index, (name, sharding) in enumerate(zip(outputs, made, strict=True)):
            want = item.tensors.get(name)
            if want is not None:
                check_sizes(view, index, want, mesh, f"{item.title}: tensor {name!r}")
                want = want.canonical(mesh, self.env.table)
            out.append(None if want == sharding else want)
            if want is None and sharding.partial:
                partials[name] = (sharding.partial, sharding.reduction)
        pinned = self.is_pinned(view.name)
        return NodeSeed(view.name, factors, tuple(out), item.title, carried, pinned)

    def factors(
        self, mesh: Mesh, item: _Annotated, view: NodeView, rule: OpRule
    ) -> dict[str, DimSharding]:
        """The shardings of a node's factors: from its operands; of others, from its results."""
        table, sizes = self.env.table, factor_sizes(rule, view)
        found: dict[str, DimSharding] = {}
        sources: dict[str, str] = {}
        for index, value in enumerate(view.node.inputs):
            name = value.name or "" if value is not None else ""
            want = item.tensors.get(name)
            if want is None or index >= len(rule.inputs):
                continue
            operand, title = rule.inputs[index], f"{item.title}: tensor {name!r}"
            shape = self.env.shapes[name]
            parts = project(operand, want, sizes, mesh, table, rule.scaled)
            implied = operand_sharding(operand, shape, parts, sizes, rule.scaled)
            if implied.canonical(mesh, table) != want.canonical(mesh, table):
                raise StrategyError(
                    f"{title}: expected a sharding that the operator accepts, such as "
                    f"{implied.describe(mesh)}, got {want.describe(mesh)}"
                )
            for factor in {f for names in operand.dims for f in names}:
                part = canonical_dim(parts.get(factor, (Component(sizes[factor]),)), mesh, table)
                if any(c.atoms for c in part) and factor not in rule.splittable:
                    raise StrategyError(
                        f"{title}: expected its dim {factor} replicated, because the operator "
                        f"needs all of it, got {want.describe(mesh)}"
                    )
                if _atoms(found.get(factor, part)) != _atoms(part):
                    raise StrategyError(
                        f"{title}: expected dim {factor} sharded over "
                        f"{mesh.describe(_atoms(found[factor])) or 'nothing'} as tensor "
                        f"{sources[factor]!r} is, got {mesh.describe(_atoms(part)) or 'nothing'}"
                    )
                found.setdefault(factor, part)
                sources.setdefault(factor, name)
        used = {a for part in found.values() for a in _atoms(part)}
        for operand, value in zip(rule.outputs, view.node.outputs, strict=True):
            want = item.tensors.get(value.name or "")
            if want is not None:
                parts = project(operand, want, sizes, mesh, table, rule.scaled)
                for factor, part in parts.items():
                    if factor in rule.splittable and not used & set(_atoms(part)):
                        found.setdefault(factor, part)
        return found

    # -- inputs ----------------------------------------------------------------------------------

    def entering(
        self, nodes: Sequence[_Annotated], known: Mapping[str, Sharding]
    ) -> dict[str, Sharding]:
        """The shardings of graph inputs: as annotated, or as the first reader wants them.

        An input that no annotated node reads, such as labels, has its dim 0 sharded like dim 0 of
        the same size of another input.
        """
        found = dict(known)
        for value in self.graph.inputs:
            name = value.name or ""
            for item in nodes:
                if name in item.spec.inputs and name in item.tensors:
                    found.setdefault(name, item.tensors[name])
        batches = {s.dims[0][0].size: s.dims[0] for s in found.values() if s.dims and s.split_atoms}
        for value in self.graph.inputs:
            shape = self.env.shapes[value.name or ""]
            if value.name not in found and shape and len(batches.get(shape[0], ())) == 1:
                rest = tuple((Component(size),) for size in shape[1:])
                found[value.name or ""] = Sharding((batches[shape[0]], *rest))
        return found


def _atoms(parts: DimSharding) -> Atoms:
    return tuple(a for c in parts for a in c.atoms)


def _decompose(offsets: Sequence[int]) -> tuple[Run, ...] | None:
    """Returns the runs, outermost first, whose steps add up to the offsets; None if there are none.

    `[0, 1, 4, 5]` is `((2, 4), (2, 1))`: 2 shards 4 apart, each of 2 shards 1 apart.
    """
    if len(offsets) == 1:
        return ()
    stride, count = offsets[1], 2
    while count < len(offsets) and offsets[count] == count * stride:
        count += 1
    if stride < 1 or len(offsets) % count:
        return None
    outer = _decompose(offsets[::count])
    return None if outer is None else (*outer, (count, stride))


def _carried(
    rule: OpRule, view: NodeView, partials: Mapping[str, PartialSum], taken: set[int]
) -> dict[int, PartialSum]:
    """The largest group of operands that can stay partial through the node together."""
    partial = {
        i: partials[v.name or ""]
        for i, v in enumerate(view.node.inputs)
        if v is not None and v.name in partials
    }
    best: dict[int, PartialSum] = {}
    for chosen in sorted({p for p in partial.values() if not taken & set(p[0])}):
        alike = frozenset(i for i, p in partial.items() if p == chosen)
        for reduction, operands in sorted(rule.linear, key=lambda item: sorted(item[1])):
            together = operands <= alike and len(operands) > len(best)
            if together and reduction == chosen[1] and may_stay_partial(rule, operands, reduction):
                best = dict.fromkeys(sorted(operands), chosen)
    return best

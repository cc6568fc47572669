"""A plan: the sharding of every operand of every node, and the algebra between rules and shardings.

`shardings` goes from the components of each sharded factor to the shardings of operands and
results; `project` goes from the sharding of one operand back to the components of factors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from onnxpar.core.errors import ShardingError
from onnxpar.core.html import table
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.rule import ANY, REPLICATED, Operand, OpRule
from onnxpar.core.sharding import (
    REDUCTIONS,
    Component,
    DimSharding,
    Sharding,
    atoms_of,
    canonical_dim,
    is_even,
)
from onnxpar.core.symbols import Dim, SymbolTable, exact_div, symbols_of
from onnxpar.graph.node_view import NodeView

Factors = Mapping[str, DimSharding]
"""The components of each sharded factor of a rule."""
Carried = Mapping[int, tuple[Atoms, str]]
"""For each operand that stays partial through a node, by index: its atoms and reduction."""


@dataclass(frozen=True)
class NodePlan:
    """How one node is sharded.

    Attributes:
        rule: The node's sharding rule.
        factors: Components of each sharded factor; others are replicated.
        inputs: Sharding that each input must have (None: absent, or taken in its current layout).
        outputs: Sharding in which each output is computed.
        reason: Empty, or why the node is replicated.
        pinned: Whether the user set it.
        carried: The operands that stay partial.
    """

    rule: OpRule
    factors: Factors
    inputs: tuple[Sharding | None, ...]
    outputs: tuple[Sharding, ...]
    reason: str = ""
    pinned: bool = False
    carried: Carried = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A plan for a program.

    Attributes:
        mesh: The device mesh.
        nodes: Plan of each node, by node name.
        inputs: Sharding of each graph input.
        parameters: Sharding of each initializer.
        outputs: Sharding of each graph output.
        resharded: For some outputs of nodes, the sharding into which they are resharded after the
            node.
        stages: Pipeline stage of each node, by name, if there are several; all stages have the same
            mesh.
    """

    mesh: Mesh
    nodes: Mapping[str, NodePlan]
    inputs: Mapping[str, Sharding]
    parameters: Mapping[str, Sharding]
    outputs: Mapping[str, Sharding]
    resharded: Mapping[str, Sharding] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """Shows the layouts of every node's operands and results, in a notebook."""
        rows = [
            (
                name,
                " ".join(s.describe(self.mesh) if s else "-" for s in node.inputs),
                " ".join(s.describe(self.mesh) for s in node.outputs),
                node.reason,
            )
            for name, node in self.nodes.items()
        ]
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.axes)
        title = f"Plan for {self.mesh.size} devices" + (f" ({axes})" if axes else "")
        return table(title, ["node", "operands", "results", "replicated because"], rows)


def varying(inputs: Mapping[str, Sharding], table: SymbolTable) -> dict[str, frozenset[int]]:
    """Returns the atoms along which each per-rank symbol has different values.

    Ranks that hold different shards of a graph input may get different sizes of it; replicas get
    the same size.

    Args:
        inputs: Sharding of each graph input.
        table: The symbols and their constraints.
    """
    found: dict[str, frozenset[int]] = {}
    for sharding in inputs.values():
        for symbol in {name for size in sharding.shape for name in symbols_of(size)}:
            if table[symbol].per_rank:
                found[symbol] = found.get(symbol, frozenset()) | set(sharding.split_atoms)
    return found


def factor_sizes(rule: OpRule, view: NodeView) -> Mapping[str, Dim]:
    """Returns the global size of each factor of a node's rule.

    Raises:
        ShardingError: The rule does not have the rank of an operand.
    """
    if rule not in view.sizes:
        view.sizes[rule] = MappingProxyType(_factor_sizes(rule, view))
    return view.sizes[rule]


def _factor_sizes(rule: OpRule, view: NodeView) -> dict[str, Dim]:
    sizes: dict[str, Dim] = dict(rule.sizes)
    operands = [(i, op, view.shape) for i, op in enumerate(rule.inputs)]
    operands += [(i, op, view.out_shape) for i, op in enumerate(rule.outputs)]
    for index, operand, shape_of in operands:
        if operand.mode:
            continue
        shape = shape_of(index)
        if len(shape) != len(operand.dims):
            raise ShardingError(
                f"node {view.name!r}: its rule has {len(operand.dims)} dims for operand "
                f"{index}, but the operand has shape {shape}"
            )
        for size, names in zip(shape, operand.dims, strict=True):
            # Dims that must be equal may have different expressions; a number is preferred.
            known = sizes.get(names[0]) if len(names) == 1 else 1
            if names and names[0] in rule.scaled:
                known = None if operand is rule.outputs[0] or known is None else 1
            if known is None or (isinstance(size, int) and not isinstance(known, int)):
                sizes[names[0]] = size
    return sizes


def operand_sharding(
    operand: Operand,
    shape: tuple[Dim, ...],
    factors: Factors,
    sizes: Mapping[str, Dim],
    scaled: frozenset[str] = frozenset(),
) -> Sharding:
    """Returns the sharding of one operand that follows from the components of the factors.

    Args:
        operand: The operand in the rule.
        shape: Its global shape.
        factors: Components of each sharded factor.
        sizes: Size of each factor.
        scaled: The rule's scaled factors.
    """
    if operand.mode:
        return Sharding.replicated(shape)
    dims: list[DimSharding] = []
    for size, names in zip(shape, operand.dims, strict=True):
        if names and names[0] in scaled:
            dims.append((Component(size, atoms_of(factors.get(names[0], ()))),))
            continue
        if factors.keys().isdisjoint(names):
            dims.append((Component(size),))
            continue
        parts = tuple(c for f in names for c in factors.get(f, (Component(sizes[f]),)))
        dims.append(parts if atoms_of(parts) else (Component(size),))
    return Sharding(tuple(dims))


def shardings(
    rule: OpRule,
    view: NodeView,
    factors: Factors,
    mesh: Mesh,
    *,
    carried: Carried | None = None,
    pinned: bool = False,
    reason: str = "",
) -> NodePlan:
    """Returns the plan of a node from the components of its factors.

    Args:
        rule: The node's rule.
        view: The node.
        factors: Components of each sharded factor.
        mesh: The mesh.
        carried: The operands that stay partial; the caller has checked them with
            `may_stay_partial`.
        pinned: Whether the user set it.
        reason: Why it is replicated, if it is.

    Raises:
        ShardingError: A sharded factor must be replicated, an atom is used twice, or the outputs
            would be partial over two reductions.
    """
    sizes = factor_sizes(rule, view)
    # The operands of a scaled factor have the atoms in common, but not the components.
    factors = {
        name: (Component(sizes[name], atoms_of(parts)),) if name in rule.scaled else parts
        for name, parts in factors.items()
    }
    used: list[int] = []
    for name, parts in factors.items():
        atoms = atoms_of(parts)
        if atoms and rule.kinds[name] == REPLICATED:
            raise ShardingError(
                f"node {view.name!r}: its dim {name!r} must be replicated, got "
                f"{mesh.count(atoms)} shards"
            )
        used += atoms
    if len(set(used)) != len(used):
        twice = {a for a in used if used.count(a) > 1}
        names = [n for n, parts in factors.items() if twice & set(atoms_of(parts))]
        raise ShardingError(
            f"node {view.name!r}: expected mesh axes that each shard one of its dims, got "
            f"{mesh.describe(tuple(sorted(twice)))} for {' and '.join(names)}"
        )
    table = view.table
    carried = carried or {}
    inputs: list[Sharding | None] = []
    for index, operand in enumerate(rule.inputs):
        if not view.has(index) or operand.mode == ANY:
            inputs.append(None)
            continue
        if operand.mode:
            inputs.append(Sharding.replicated(view.known_shape(index)))
            continue
        sharding = operand_sharding(operand, view.shape(index), factors, sizes, rule.scaled)
        held, reduction = carried.get(index, ((), "sum"))
        inputs.append(sharding.with_partial(held, reduction).canonical(mesh, table))
    reduced = {
        name: atoms_of(parts) for name, parts in factors.items() if rule.kinds[name] in REDUCTIONS
    }
    reductions = {rule.kinds[name] for name, atoms in reduced.items() if atoms}
    reductions |= {kind for _, kind in carried.values()}
    if len(reductions) > 1:
        raise ShardingError(
            f"node {view.name!r}: its outputs would be partial over two reductions, "
            f"{' and '.join(sorted(reductions))}"
        )
    reduction = reductions.pop() if reductions else "sum"
    outputs = []
    for index, operand in enumerate(rule.outputs):
        shape = view.env.shapes.get(view.node.outputs[index].name or "", ())
        sharding = operand_sharding(operand, shape, factors, sizes, rule.scaled)
        has = {name for names in operand.dims for name in names}
        partial = {a for name, atoms in reduced.items() if name not in has for a in atoms}
        partial |= {a for held, _ in carried.values() for a in held}
        if operand.mode:
            partial = set()
        outputs.append(sharding.with_partial(partial, reduction).canonical(mesh, table))
    kept = {f: parts for f, parts in factors.items() if atoms_of(parts)}
    return NodePlan(rule, kept, tuple(inputs), tuple(outputs), reason, pinned, dict(carried))


def used_atoms(factors: Factors) -> set[int]:
    """Returns the atoms that shard some factor."""
    return {a for parts in factors.values() for a in atoms_of(parts)}


def may_stay_partial(rule: OpRule, operands: frozenset[int], reduction: str) -> bool:
    """Whether exactly these operands may be partial together through the node."""
    return (reduction, operands) in rule.linear


def project(
    operand: Operand,
    sharding: Sharding,
    sizes: Mapping[str, Dim],
    mesh: Mesh,
    table: SymbolTable,
    scaled: frozenset[str] = frozenset(),
) -> dict[str, DimSharding]:
    """Returns the components of factors that follow from the sharding of one operand.

    Where the components of a dim do not line up with its factors, only the leading components that
    do are kept, so a caller compares the result with the sharding to see what would be resharded. A
    scaled factor gets the atoms of a dim that has one component.
    """
    factors: dict[str, DimSharding] = {}
    if operand.mode:
        return factors
    for dim, names in zip(sharding.dims, operand.dims, strict=True):
        if not atoms_of(dim):
            continue
        if names and names[0] in scaled:
            if len(dim) == 1:
                factors[names[0]] = (Component(sizes[names[0]], dim[0].atoms),)
        elif len(names) == 1:
            factors[names[0]] = dim
        elif names:
            factors.update(_match(dim, [(n, sizes[n]) for n in names], mesh, table))
    return factors


def _filling(size: Dim, atoms: Atoms, mesh: Mesh) -> int:
    """The number of leading atoms that split a size into single elements; 0 if there are none."""
    counts = (mesh.count(atoms[:number]) for number in range(1, len(atoms) + 1))
    return next((number for number, count in enumerate(counts, 1) if count == size), 0)


def _match(
    dim: DimSharding, names: list[tuple[str, Dim]], mesh: Mesh, table: SymbolTable
) -> dict[str, DimSharding]:
    """Divides the components of a merged dim among its factors, as far as they line up."""
    found: dict[str, DimSharding] = {}
    parts = list(dim)
    for name, size in names:
        taken: list[Component] = []
        left: Dim = size
        while parts and left != 1:
            part = parts[0]
            if table.equal(part.size, left):
                taken.append(parts.pop(0))
                left = 1
            elif (inside := exact_div(left, part.size)) is not None:
                taken.append(parts.pop(0))
                left = inside
            elif (beyond := exact_div(part.size, left)) is not None and is_even(
                Component(left, part.atoms), mesh, table
            ):
                taken.append(Component(left, part.atoms))
                parts[0] = Component(beyond)
                left = 1
            elif beyond is not None and (first := _filling(left, part.atoms, mesh)):
                taken.append(Component(left, part.atoms[:first]))
                parts[0] = Component(beyond, part.atoms[first:])
                left = 1
            else:
                break
        if left != 1:
            if atoms_of(taken):
                found[name] = (*taken, Component(left))
            return found
        if atoms_of(taken):
            found[name] = canonical_dim(tuple(taken), mesh, table)
    return found

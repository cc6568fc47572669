"""A plan: the sharding of every operand of every node, and the algebra between rules and shardings.

`shardings` goes from a choice of splits per factor to shardings of operands and results; `project`
goes from the sharding of one operand back to splits per factor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.rule import ANY, REPLICATED, Operand, OpRule
from onnxpar.core.sharding import REDUCTIONS, Component, DimSharding, Sharding, canonical_dim
from onnxpar.core.symbols import Dim, SymbolTable, exact_div, symbols_of
from onnxpar.graph.node_view import NodeView

Factors = Mapping[str, DimSharding]


@dataclass(frozen=True)
class NodePlan:
    """How one node is sharded.

    Attributes:
        rule: The node's sharding rule.
        factors: Components of each factor that is split; others are replicated.
        inputs: Sharding that each input must have (None: absent, or taken in its current layout).
        outputs: Sharding in which each output is made.
        reason: Empty, or why the node is replicated.
        pinned: Whether the user set it.
        carried: For operands that stay partial: their atoms and reduction.
    """

    rule: OpRule
    factors: Factors
    inputs: tuple[Sharding | None, ...]
    outputs: tuple[Sharding, ...]
    reason: str = ""
    pinned: bool = False
    carried: Mapping[int, tuple[Atoms, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A plan for a whole model.

    Attributes:
        mesh: The device mesh.
        nodes: Plan of each node, by node name.
        inputs: Sharding of each graph input.
        parameters: Sharding of each initializer.
        outputs: Sharding in which each graph output leaves; never partial.
        resharded: Sharding that the user asked an output of a node to have after it was made.
        stages: Pipeline stage of each node, by name, where there are several: all have the same
            mesh.
    """

    mesh: Mesh
    nodes: Mapping[str, NodePlan]
    inputs: Mapping[str, Sharding]
    parameters: Mapping[str, Sharding]
    outputs: Mapping[str, Sharding]
    resharded: Mapping[str, Sharding] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)


def varying(inputs: Mapping[str, Sharding], table: SymbolTable) -> dict[str, frozenset[int]]:
    """Returns along which atoms each per-rank symbol has different values.

    Ranks that hold different parts of a graph input may be given different sizes of it; ranks that
    hold the same part are given the same.

    Args:
        inputs: Sharding of each graph input.
        table: What is known of the symbols.
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
            # Operands that must agree may say it differently: a number tells more than a symbol.
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
    """Returns the split of one operand that a choice of splits per factor implies.

    Args:
        operand: The operand in the rule.
        shape: Its global shape.
        factors: Components of each split factor.
        sizes: Size of each factor.
        scaled: The rule's scaled factors.
    """
    if operand.mode:
        return Sharding.replicated(shape)
    dims: list[DimSharding] = []
    for size, names in zip(shape, operand.dims, strict=True):
        if names and names[0] in scaled:
            dims.append((Component(size, _atoms(factors.get(names[0], ()))),))
            continue
        parts = [c for f in names for c in factors.get(f, (Component(sizes[f]),))]
        dims.append(tuple(parts) if any(c.atoms for c in parts) else (Component(size),))
    return Sharding(tuple(dims))


def shardings(
    rule: OpRule,
    view: NodeView,
    factors: Factors,
    mesh: Mesh,
    *,
    carried: Mapping[int, tuple[Atoms, str]] | None = None,
    pinned: bool = False,
    reason: str = "",
) -> NodePlan:
    """Returns the plan of a node from the splits of its factors.

    Args:
        rule: The node's rule.
        view: The node.
        factors: Components of each split factor.
        mesh: The mesh.
        carried: For operands that stay partial: their atoms and reduction. The caller has checked
            with `may_stay_partial`.
        pinned: Whether the user set it.
        reason: Why it is replicated, if it is.

    Raises:
        ShardingError: A factor must be replicated or an atom is used twice.
    """
    sizes = factor_sizes(rule, view)
    # The operands of a scaled factor agree in atoms alone: a component of one is not one of
    # another.
    factors = {
        name: (Component(sizes[name], _atoms(parts)),) if name in rule.scaled else parts
        for name, parts in factors.items()
    }
    used: list[int] = []
    for name, parts in factors.items():
        atoms = [a for c in parts for a in c.atoms]
        if atoms and rule.kinds[name] == REPLICATED:
            raise ShardingError(
                f"node {view.name!r}: its dim {name!r} must be replicated, got "
                f"{mesh.count(atoms)} shards"
            )
        used += atoms
    if len(set(used)) != len(used):
        twice = {a for a in used if used.count(a) > 1}
        names = [n for n, parts in factors.items() if twice & set(_atoms(parts))]
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
        name: tuple(a for c in parts for a in c.atoms)
        for name, parts in factors.items()
        if rule.kinds[name] in REDUCTIONS
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
        pending = {a for name, atoms in reduced.items() if name not in has for a in atoms}
        pending |= {a for held, _ in carried.values() for a in held}
        partial = () if operand.mode else pending
        outputs.append(sharding.with_partial(partial, reduction).canonical(mesh, table))
    kept = {f: parts for f, parts in factors.items() if any(c.atoms for c in parts)}
    return NodePlan(rule, kept, tuple(inputs), tuple(outputs), reason, pinned, dict(carried))


def _atoms(parts: DimSharding) -> Atoms:
    return tuple(a for c in parts for a in c.atoms)


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
    """Returns the splits per factor that a sharding of one operand implies.

    Where a dim's components do not line up with its factors, the longest prefix of atoms that does
    is kept, so the caller compares the result with the sharding to see what would be resharded. A
    scaled factor takes the atoms of a dim that is one component.
    """
    factors: dict[str, DimSharding] = {}
    if operand.mode:
        return factors
    for dim, names in zip(sharding.dims, operand.dims, strict=True):
        if not any(c.atoms for c in dim):
            continue
        if names and names[0] in scaled:
            if len(dim) == 1:
                factors[names[0]] = (Component(sizes[names[0]], _atoms(dim)),)
        elif len(names) == 1:
            factors[names[0]] = dim
        elif names:
            factors.update(_match(dim, [(n, sizes[n]) for n in names], mesh, table))
    return factors


def _match(
    dim: DimSharding, names: list[tuple[str, Dim]], mesh: Mesh, table: SymbolTable
) -> dict[str, DimSharding]:
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
                break
            inside = exact_div(left, part.size)
            if inside is not None:
                taken.append(parts.pop(0))
                left = inside
                continue
            beyond = exact_div(part.size, left)
            if beyond is None:
                return _closed(found, name, taken, left)
            if part.atoms and not table.divisible(left, mesh.count(part.atoms)):
                return _closed(found, name, taken, left)
            taken.append(Component(left, part.atoms))
            parts[0] = Component(beyond)
            left = 1
        if left != 1:
            return _closed(found, name, taken, left)
        if any(c.atoms for c in taken):
            found[name] = canonical_dim(tuple(taken), mesh, table)
    return found


def _closed(
    found: dict[str, DimSharding], name: str, taken: list[Component], left: Dim
) -> dict[str, DimSharding]:
    if any(c.atoms for c in taken):
        found[name] = (*taken, Component(left)) if left != 1 else tuple(taken)
    return found

"""From the entries of a node's operands, including MindSpore's tuples, to shardings of its factors.

A *unit* is a factor of a device matrix: a mesh axis, a dim of a `Layout`, or the number of shards
of a factor in a numeric strategy. A factor is sharded over a sequence of units, outermost first.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import TypeVar

from onnxpar.core.errors import StrategyError, SymbolError
from onnxpar.core.layout import TensorLayout
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.rule import REPLICATED, OpRule
from onnxpar.core.sharding import REDUCTIONS, Component, DimSharding
from onnxpar.core.symbols import Dim, SymbolTable, as_dim, dim_str
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import factor_sizes
from onnxpar.graph.view_parts import take_parts
from onnxpar.strategy.tensor_entry import DimPart, TensorEntry, run_of


@dataclass(frozen=True)
class Unit:
    """A factor `size` of a device matrix; the product of the factors before it is `before`."""

    before: int
    size: int
    name: str = field(compare=False)


Units = tuple[Unit, ...]


@dataclass(frozen=True)
class FactorSplit:
    """How a dim or factor is sharded.

    Attributes:
        units: The units over which it is sharded, outermost first.
        parts: If it has several parts: the size and the units of each part, major first.
    """

    units: Units = ()
    parts: tuple[tuple[str, Units], ...] = ()

    @property
    def count(self) -> int:
        """Number of shards."""
        return count_of(self.units)

    def components(self, size: Dim, mesh: Mesh, table: SymbolTable, what: str) -> DimSharding:
        """Returns the components of a dim of this size; `what` names it in messages.

        Raises:
            StrategyError: The parts do not make up the dim.
        """
        if not self.parts:
            return (Component(size, atoms_of(self.units, mesh)),)
        try:
            parts = tuple(Component(as_dim(n), atoms_of(u, mesh)) for n, u in self.parts)
        except SymbolError as error:
            raise StrategyError(f"{what}: {error}") from None
        if not table.equal(as_dim(prod(part.size for part in parts)), size):
            raise StrategyError(
                f"{what}: expected components whose product is {dim_str(size)}, got "
                f"{_split_text(self)}"
            )
        return parts


def atoms_of(units: Units, mesh: Mesh) -> Atoms:
    """Returns the atoms of a sequence of units, outermost first."""
    return tuple(atom for unit in units for atom in mesh.run(unit.before, unit.size))


def count_of(units: Units) -> int:
    """Returns the number of shards over a sequence of units."""
    return prod(unit.size for unit in units)


class _Units(dict[str, Unit]):
    """The unit of each named mesh axis, and of `4@2`: 4 shards on devices that are 2 apart."""

    def __init__(self, devices: int) -> None:
        super().__init__()
        self.devices = devices

    def __missing__(self, name: str) -> Unit:
        size, apart = run_of(name) or (0, 0)
        if not size:
            raise KeyError(name)
        return Unit(self.devices // (size * apart), size, name)


def axis_units(axes: Mapping[str, int], devices: int) -> dict[str, Unit]:
    """Returns the unit of each named mesh axis, and of runs without a name (`4@2`)."""
    units, before = _Units(devices), 1
    for name, size in axes.items():
        units[name] = Unit(before, size, name)
        before *= size
    return units


def is_numeric(entry: TensorEntry) -> bool:
    """Whether an entry has numbers of shards."""
    return not isinstance(entry, TensorLayout) and any(isinstance(d, int) for d in entry)


def is_named(entry: TensorEntry) -> bool:
    """Whether an entry names mesh axes or is a layout."""
    return isinstance(entry, TensorLayout) or any(isinstance(d, tuple) for d in entry)


def rank_of(entry: TensorEntry) -> int:
    """Returns the number of dims of an entry."""
    return len(entry.dims) if isinstance(entry, TensorLayout) else len(entry)


def counts_of(entry: TensorEntry) -> tuple[int, ...]:
    """Returns the number of shards of each dim of a numeric entry."""
    assert not isinstance(entry, TensorLayout)
    return tuple(d if isinstance(d, int) else 1 for d in entry)


def splits_of(entry: TensorEntry, axes: Mapping[str, Unit]) -> tuple[FactorSplit, ...]:
    """Returns how an entry of mesh axes, or a layout, shards each dim."""
    if isinstance(entry, TensorLayout):
        return tuple(
            FactorSplit(tuple(Unit(*entry.axis(name), name) for name in names))
            for names in entry.dims
        )
    return tuple(_split(d if isinstance(d, tuple) else (), axes) for d in entry)


def _split(dim: tuple[str | DimPart, ...], axes: Mapping[str, Unit]) -> FactorSplit:
    parts = tuple((p.size, tuple(axes[n] for n in p.axes)) for p in dim if isinstance(p, DimPart))
    if parts:
        return FactorSplit(tuple(unit for _, units in parts for unit in units), parts)
    return FactorSplit(tuple(axes[n] for n in dim if isinstance(n, str)))


@dataclass(frozen=True)
class Site:
    """A node with an entry of the user.

    Attributes:
        view: The node.
        rule: Its rule.
        where: `file:line` of the entry.
    """

    view: NodeView
    rule: OpRule
    where: str

    @property
    def title(self) -> str:
        """Beginning of a message about the node."""
        return f"{self.where}: node {self.view.name!r} ({self.view.node.op_type})"

    def operand(self, index: int) -> str:
        """Names an operand in messages."""
        value = self.view.node.inputs[index]
        return f"operand {index} ({value.name if value is not None else ''!r})"

    def fail(self, message: str) -> StrategyError:
        """Returns an error about the node."""
        return StrategyError(f"{self.title}: {message}")


def aligned(site: Site, entries: Sequence[TensorEntry | None]) -> list[tuple[int, TensorEntry]]:
    """Returns the entries with the indices of their operands.

    Operands that cannot be sharded (the target of a Reshape, scalars), or that the node does not
    have, may be left out.

    Raises:
        StrategyError: The number of entries is wrong, or the rank of one of them.
    """
    rule, view = site.rule, site.view
    data = [i for i, o in enumerate(rule.inputs) if not o.mode and view.has(i)]
    needed = [i for i in data if rule.inputs[i].dims]
    everything = list(range(view.arity))
    given = [i for i in everything if view.has(i)]
    for indices in (needed, data, given, everything):
        if len(entries) == len(indices):
            break
    else:
        names = ", ".join(site.operand(i) for i in needed)
        raise site.fail(
            f"expected an entry for each of its {len(needed)} operands that can be sharded"
            f"{': ' if names else ''}{names}; got {len(entries)}"
        )
    found = []
    for index, entry in zip(indices, entries, strict=True):
        if entry is None:
            continue
        if index not in data:
            if is_named(entry) or prod(counts_of(entry)) > 1:
                raise site.fail(f"{site.operand(index)}: expected ~, since it cannot be sharded")
            continue
        check_rank(f"{site.title}: {site.operand(index)}", view.shape(index), entry)
        found.append((index, entry))
    return found


def check_rank(title: str, shape: Sequence[Dim], entry: TensorEntry) -> None:
    """Raises StrategyError unless an entry has the rank of its tensor, which `title` names."""
    if rank_of(entry) != len(shape):
        raise StrategyError(
            f"{title}: expected {len(shape)} entries for the shape "
            f"({', '.join(map(dim_str, shape))}), got {rank_of(entry)}: {show(entry)}"
        )


def show(entry: TensorEntry) -> str:
    """Returns an entry as text for messages."""
    dims = entry.dims if isinstance(entry, TensorLayout) else entry
    texts = []
    for dim in dims:
        if isinstance(dim, tuple):
            texts.append(_dim_text(dim))
        else:
            texts.append("~" if dim is None else str(dim))
    return f"[{', '.join(texts)}]"


def _dim_text(dim: tuple[str | DimPart, ...]) -> str:
    names = [n for n in dim if isinstance(n, str)]
    if len(names) < len(dim):
        parts = [p for p in dim if isinstance(p, DimPart)]
        return f"({' '.join(p.size + (':' + '.'.join(p.axes) if p.axes else '') for p in parts)})"
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]" if names else "~"


S = TypeVar("S", int, FactorSplit)
"""How a factor is sharded: a number of shards, or a split."""


def numeric_factors(
    site: Site, operands: Sequence[tuple[int, Sequence[int]]], devices: int
) -> dict[str, int]:
    """Returns the number of shards of each factor, in the order of the rule's factors.

    Crossed factors (see `crossed_factors`) are left out if their two numbers differ, or if there
    are too few devices to shard them beside the other factors.

    Raises:
        StrategyError: A factor has two numbers, a dim cannot be sharded, or the number of a merged
            dim cannot be distributed to its factors.
    """
    crossed = crossed_factors(site, operands, 1)
    found = _factors(site, operands, lambda count: count, _count_text, _merged_counts, crossed)
    for factor, takes in crossed.items():
        counts = {found.get(source, 1) for source in takes.values()}
        if len(counts) == 1 and devices % (prod(found.values()) * max(counts)) == 0:
            found[factor] = counts.pop()
    return {name: found[name] for name in site.rule.factors if name in found}


def named_factors(
    site: Site, operands: Sequence[tuple[int, Sequence[FactorSplit]]]
) -> dict[str, FactorSplit]:
    """Returns how each factor is sharded, in the order of the rule's factors.

    Crossed factors (see `crossed_factors`) are left out.

    Raises:
        StrategyError: A factor is sharded in two ways, a dim cannot be sharded, or the axes of a
            merged dim cannot be distributed to its factors.
    """
    apart = crossed_factors(site, operands, FactorSplit())
    return _factors(site, operands, lambda split: split.count, _split_text, _merged_units, apart)


def crossed_factors(
    site: Site, operands: Sequence[tuple[int, Sequence[S]]], unsplit: S
) -> dict[str, dict[int, str]]:
    """Returns the reduced factors that each of two operands shards as the other shards its own dim.

    The operands of such a product, and its result, are blocks of one device matrix: in `[[8, 4],
    [8, 4]]` for [m, k] and [k, n], the 4 that shard k in the first operand shard n in the second,
    and the 8 that shard k in the second shard m in the first. Each device gathers k in both.

    Args:
        site: The node.
        operands: Indices of operands, each with how its dims are sharded.
        unsplit: How a dim that is not sharded is written.

    Returns:
        By reduced factor: for each of the two operands, by index, the other operand's factor that
        is sharded in the same way; "" if it has none, so that k is not sharded either.
    """
    held = {
        index: {
            names[0]: split
            for names, split in zip(site.rule.inputs[index].dims, splits, strict=True)
            if len(names) == 1
        }
        for index, splits in operands
    }
    found = {}
    for factor in site.rule.factors:
        pair = [index for index, splits in held.items() if factor in splits]
        if site.rule.kinds[factor] not in REDUCTIONS or len(pair) != 2:
            continue
        takes = {}
        for mine, other in (pair, reversed(pair)):
            own = [n for n, s in held[other].items() if n not in held[mine] and s != unsplit]
            if held[mine][factor] == (held[other][own[0]] if len(own) == 1 else unsplit):
                takes[mine] = own[0] if len(own) == 1 else ""
        if len(takes) == 2 and any(takes.values()):
            found[factor] = takes
    return found


def gathered_operands(
    site: Site,
    operands: Sequence[tuple[int, Sequence[S]]],
    factors: Mapping[str, FactorSplit],
    unsplit: S,
) -> dict[int, tuple[FactorSplit, ...]]:
    """Returns how the operands are sharded that the node gathers over a crossed factor, by index.

    Args:
        site: The node.
        operands: Indices of operands, each with how its dims are sharded.
        factors: How the node's factors are sharded, without those that it gathers.
        unsplit: How a dim that is not sharded is written.
    """
    found = {}
    for factor, takes in crossed_factors(site, operands, unsplit).items():
        for index, source in takes.items() if factor not in factors else ():
            mine = {**factors, factor: factors.get(source, FactorSplit())}
            dims = site.rule.inputs[index].dims
            if source and all(len(names) <= 1 for names in dims):
                found[index] = tuple(
                    mine.get(names[0], FactorSplit()) if names else FactorSplit() for names in dims
                )
    return found


def _factors(
    site: Site,
    operands: Sequence[tuple[int, Sequence[S]]],
    count: Callable[[S], int],
    text: Callable[[S], str],
    distribute: Callable[[Site, str, Sequence[str], S, dict[str, S]], None],
    apart: Collection[str],
) -> dict[str, S]:
    """How each factor is sharded, given how the dims of operands are.

    Args:
        site: The node.
        operands: Indices of operands, each with how its dims are sharded.
        count: Returns the number of shards.
        text: Shows how a dim is sharded, in messages.
        distribute: Distributes the shards of a merged dim to its factors.
        apart: Factors that operands may shard in different ways; they are left out.
    """
    found: dict[str, S] = {}
    sources: dict[str, str] = {}
    merged = []
    for index, splits in operands:
        dims = site.rule.inputs[index].dims
        for position, (names, split) in enumerate(zip(dims, splits, strict=True)):
            tensor = f"{site.operand(index)}, dim {position}{_factor(names)}"
            if len(names) > 1:
                merged.append((tensor, names, split))
            elif not names:
                if count(split) > 1:
                    raise site.fail(
                        f"{tensor}: expected 1 shard, since it is replicated; got {text(split)}"
                    )
            elif names[0] in apart:
                continue
            elif names[0] in found:
                if found[names[0]] != split:
                    raise site.fail(
                        f"{tensor}: expected {text(found[names[0]])}, as {sources[names[0]]} has, "
                        f"got {text(split)}"
                    )
            else:
                _check_shardable(site, tensor, names[0], count(split))
                found[names[0]], sources[names[0]] = split, tensor
    for tensor, names, split in merged:
        distribute(site, tensor, names, split, found)
    return {name: found[name] for name in site.rule.factors if name in found}


def _count_text(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"


def _merged_counts(
    site: Site, tensor: str, names: Sequence[str], count: int, counts: dict[str, int]
) -> None:
    """Distributes the shards of a merged dim to its factors, major first."""
    sizes = factor_sizes(site.rule, site.view)
    left = count
    for position, name in enumerate(names):
        size = sizes[name]
        if name in counts:
            if left % counts[name]:
                raise site.fail(
                    f"{tensor}: expected a multiple of the {counts[name]} shards that "
                    f"another operand has, got {count}"
                )
            left //= counts[name]
            continue
        if position == len(names) - 1 or not isinstance(size, int) or size % left == 0:
            taken = left
        elif left % size == 0:
            taken = size
        else:
            raise _not_contiguous(site, tensor, count, [sizes[n] for n in names])
        _check_shardable(site, tensor, name, taken)
        counts[name] = taken
        left //= taken
    if left > 1:
        raise site.fail(
            f"{tensor}: expected {count // left} shards, as other operands have, got {count}"
        )


def _not_contiguous(site: Site, tensor: str, count: int, sizes: Sequence[Dim]) -> StrategyError:
    shape = " x ".join(map(dim_str, sizes))
    return site.fail(
        f"{tensor}: expected a number of shards that shards each of the merged dims {shape} "
        f"completely before the next one, got {count}"
    )


def _check_shardable(site: Site, tensor: str, factor: str, count: int) -> None:
    if count > 1 and site.rule.kinds[factor] == REPLICATED:
        raise site.fail(
            f"{tensor}: expected 1 shard, since the operator needs all of it; got {count}"
        )


def _merged_units(
    site: Site, tensor: str, names: Sequence[str], split: FactorSplit, found: dict[str, FactorSplit]
) -> None:
    """Distributes the axes, or the parts, of a merged dim to its factors, major first."""
    if split.parts:
        _merged_parts(site, tensor, names, split, found)
        return
    sizes = factor_sizes(site.rule, site.view)
    left = list(split.units)
    for position, name in enumerate(names):
        size = sizes[name]
        known = found.get(name)
        if known is not None:
            if tuple(left[: len(known.units)]) != known.units:
                raise site.fail(
                    f"{tensor}: expected it to begin with {_split_text(known)}, as another "
                    f"operand does, got {_split_text(split)}"
                )
            found_here = known
        elif position == len(names) - 1 or not isinstance(size, int):
            found_here = FactorSplit(tuple(left))
        else:
            taken, room = [], size
            for unit in left:
                if room == 1:
                    break
                if gcd(room, unit.size) != unit.size:
                    raise _not_contiguous(site, tensor, split.count, [sizes[n] for n in names])
                taken.append(unit)
                room //= unit.size
            found_here = FactorSplit(tuple(taken))
        _check_shardable(site, tensor, name, found_here.count)
        found[name] = found_here
        left = left[len(found_here.units) :]
    if left:
        raise site.fail(
            f"{tensor}: expected no more axes than other operands have, got {_split_text(split)}"
        )


def _merged_parts(
    site: Site, tensor: str, names: Sequence[str], split: FactorSplit, found: dict[str, FactorSplit]
) -> None:
    sizes, table = factor_sizes(site.rule, site.view), site.view.table
    left = list(split.parts)
    for name in names:
        mine = take_parts(left, sizes[name], lambda part: as_dim(part[0]), table)
        if mine is None:
            merged = " x ".join(dim_str(sizes[n]) for n in names)
            raise site.fail(
                f"{tensor}: expected components whose products are the merged dims {merged}, "
                f"in order, got {_split_text(split)}"
            )
        units = tuple(unit for _, part in mine for unit in part)
        given = FactorSplit(units, tuple(mine) if len(mine) > 1 else ())
        if name in found and found[name] != given:
            raise site.fail(
                f"{tensor}: expected {_split_text(found[name])} for {name}, as another operand "
                f"has, got {_split_text(split)}"
            )
        _check_shardable(site, tensor, name, given.count)
        found[name] = given


def _split_text(split: FactorSplit) -> str:
    if split.parts:
        parts = (n + (":" + ".".join(x.name for x in u) if u else "") for n, u in split.parts)
        return f"({' '.join(parts)})"
    return "[" + ", ".join(unit.name for unit in split.units) + "]" if split.units else "~"


def _factor(names: Sequence[str]) -> str:
    return f" ({' '.join(names)})" if names else ""

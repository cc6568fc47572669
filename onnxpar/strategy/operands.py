"""From the entries of a node's operands to the splits of its factors.

A *unit* is a factor of a device matrix: a mesh axis, a dim of a `Layout`, or the number of pieces
of a factor in a numeric strategy. A factor is split by a row of units, outermost first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from onnxpar.analysis.plan import factor_sizes
from onnxpar.analysis.shapes import NodeView
from onnxpar.errors import StrategyError
from onnxpar.layout import TensorLayout
from onnxpar.mesh import Atoms, Mesh
from onnxpar.ops.rule import WHOLE, OpRule
from onnxpar.strategy.schema import TensorEntry
from onnxpar.symbols import Dim, dim_str


@dataclass(frozen=True)
class Unit:
    """A factor of a device matrix: `size` devices-blocks, after `before` of them."""

    before: int
    size: int
    name: str = field(compare=False)


Units = tuple[Unit, ...]


def atoms_of(units: Units, mesh: Mesh) -> Atoms:
    """Returns the atoms of a row of units, outermost first."""
    return tuple(atom for unit in units for atom in mesh.run(unit.before, unit.size))


def count_of(units: Units) -> int:
    """Returns the number of pieces that a row of units makes."""
    return prod(unit.size for unit in units)


def axis_units(axes: Mapping[str, int]) -> dict[str, Unit]:
    """Returns the unit of each named mesh axis."""
    units, before = {}, 1
    for name, size in axes.items():
        units[name] = Unit(before, size, name)
        before *= size
    return units


def is_numeric(entry: TensorEntry) -> bool:
    """Whether an entry counts pieces."""
    return not isinstance(entry, TensorLayout) and any(isinstance(d, int) for d in entry)


def is_named(entry: TensorEntry) -> bool:
    """Whether an entry names mesh axes or is a layout."""
    return isinstance(entry, TensorLayout) or any(isinstance(d, tuple) for d in entry)


def rank_of(entry: TensorEntry) -> int:
    """Returns the number of dims that an entry is for."""
    return len(entry.dims) if isinstance(entry, TensorLayout) else len(entry)


def counts_of(entry: TensorEntry) -> tuple[int, ...]:
    """Returns the number of pieces of each dim of a numeric entry."""
    assert not isinstance(entry, TensorLayout)
    return tuple(d if isinstance(d, int) else 1 for d in entry)


def units_of(entry: TensorEntry, axes: Mapping[str, Unit]) -> tuple[Units, ...]:
    """Returns the units of each dim of an entry of mesh axes or of a layout."""
    if isinstance(entry, TensorLayout):
        return tuple(tuple(Unit(*entry.axis(name), name) for name in names) for names in entry.dims)
    return tuple(tuple(axes[n] for n in d) if isinstance(d, tuple) else () for d in entry)


@dataclass(frozen=True)
class Site:
    """A node that the user wrote a strategy for, as its rule sees it.

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
    """Returns the operand that each entry is for.

    Operands that are not divided (the target of a Reshape, scalars) may be left out.

    Raises:
        StrategyError: Another number of entries, or another rank than the operand's.
    """
    rule, view = site.rule, site.view
    data = [i for i, o in enumerate(rule.inputs) if not o.mode and view.has(i)]
    needed = [i for i in data if rule.inputs[i].dims]
    everything = list(range(view.arity))
    for indices in (needed, data, everything):
        if len(entries) == len(indices):
            break
    else:
        names = ", ".join(site.operand(i) for i in needed)
        raise site.fail(
            f"expected an entry for each of its {len(needed)} operands that can be divided"
            f"{': ' if names else ''}{names}; got {len(entries)}"
        )
    found = []
    for index, entry in zip(indices, entries, strict=True):
        if entry is None:
            continue
        if index not in data:
            if is_named(entry) or prod(counts_of(entry)) > 1:
                raise site.fail(f"{site.operand(index)}: expected ~, it cannot be divided")
            continue
        check_rank(site, site.operand(index), view.shape(index), entry)
        found.append((index, entry))
    return found


def check_rank(site: Site, tensor: str, shape: Sequence[Dim], entry: TensorEntry) -> None:
    """Raises StrategyError unless an entry has the rank of its tensor."""
    if rank_of(entry) != len(shape):
        raise site.fail(
            f"{tensor}: expected {len(shape)} entries for the shape "
            f"({', '.join(map(dim_str, shape))}), got {rank_of(entry)}: {show(entry)}"
        )


def show(entry: TensorEntry) -> str:
    """Returns an entry as text for messages."""
    dims = entry.dims if isinstance(entry, TensorLayout) else entry
    texts = []
    for dim in dims:
        if isinstance(dim, tuple):
            texts.append(dim[0] if len(dim) == 1 else f"[{', '.join(dim)}]" if dim else "~")
        else:
            texts.append("~" if dim is None else str(dim))
    return f"[{', '.join(texts)}]"


def numeric_factors(site: Site, operands: Sequence[tuple[int, TensorEntry]]) -> dict[str, int]:
    """Returns the number of pieces of each factor, in the order of the rule's factors.

    Raises:
        StrategyError: A factor with two counts, a dim that must not be split, or a merged dim
            whose pieces cannot be given to its factors.
    """
    counts: dict[str, int] = {}
    sources: dict[str, str] = {}
    merged = []
    for index, entry in operands:
        dims = site.rule.inputs[index].dims
        for position, (names, count) in enumerate(zip(dims, counts_of(entry), strict=True)):
            tensor = f"{site.operand(index)}, dim {position}{_factor(names)}"
            if len(names) > 1:
                merged.append((tensor, names, count))
            elif not names:
                if count > 1:
                    raise site.fail(f"{tensor}: expected 1 piece, it is not divided; got {count}")
            elif names[0] in counts:
                if counts[names[0]] != count:
                    raise site.fail(
                        f"{tensor}: expected {counts[names[0]]} pieces as {sources[names[0]]} "
                        f"has, got {count}"
                    )
            else:
                _check_whole(site, tensor, names[0], count)
                counts[names[0]], sources[names[0]] = count, tensor
    for tensor, names, count in merged:
        _merged_counts(site, tensor, names, count, counts)
    return {name: counts[name] for name in site.rule.factors if name in counts}


def _merged_counts(
    site: Site, tensor: str, names: Sequence[str], count: int, counts: dict[str, int]
) -> None:
    """Gives the pieces of a merged dim to its factors, major first."""
    sizes = factor_sizes(site.rule, site.view)
    left = count
    for position, name in enumerate(names):
        size = sizes[name]
        if name in counts:
            if left % counts[name]:
                raise site.fail(
                    f"{tensor}: expected a multiple of {counts[name]} pieces as another operand "
                    f"has, got {count}"
                )
            left //= counts[name]
            continue
        if position == len(names) - 1 or not isinstance(size, int) or size % left == 0:
            taken = left
        elif left % size == 0:
            taken = size
        else:
            raise _not_contiguous(site, tensor, count, [sizes[n] for n in names])
        _check_whole(site, tensor, name, taken)
        counts[name] = taken
        left //= taken
    if left > 1:
        raise site.fail(
            f"{tensor}: expected {count // left} pieces as other operands have, got {count}"
        )


def _not_contiguous(site: Site, tensor: str, count: int, sizes: Sequence[Dim]) -> StrategyError:
    shape = " x ".join(map(dim_str, sizes))
    return site.fail(
        f"{tensor}: expected a number of pieces that cuts the merged dims {shape} one after "
        f"another, got {count}"
    )


def _check_whole(site: Site, tensor: str, factor: str, count: int) -> None:
    if count > 1 and site.rule.kinds[factor] == WHOLE:
        raise site.fail(f"{tensor}: expected 1 piece, this operator needs it whole; got {count}")


def named_factors(
    site: Site, operands: Sequence[tuple[int, TensorEntry]], axes: Mapping[str, Unit]
) -> dict[str, Units]:
    """Returns the units that split each factor.

    Raises:
        StrategyError: A factor split in two ways, a dim that must not be split, or a merged dim
            whose axes cannot be given to its factors.
    """
    found: dict[str, Units] = {}
    sources: dict[str, str] = {}
    merged = []
    for index, entry in operands:
        dims = site.rule.inputs[index].dims
        for position, (names, units) in enumerate(zip(dims, units_of(entry, axes), strict=True)):
            tensor = f"{site.operand(index)}, dim {position}{_factor(names)}"
            if len(names) > 1:
                merged.append((tensor, names, units))
            elif not names:
                if count_of(units) > 1:
                    raise site.fail(
                        f"{tensor}: expected ~, it is not divided; got {_units_text(units)}"
                    )
            elif names[0] in found:
                if found[names[0]] != units:
                    raise site.fail(
                        f"{tensor}: expected {_units_text(found[names[0]])} as "
                        f"{sources[names[0]]} has, got {_units_text(units)}"
                    )
            else:
                _check_whole(site, tensor, names[0], count_of(units))
                found[names[0]], sources[names[0]] = units, tensor
    for tensor, names, units in merged:
        _merged_units(site, tensor, names, units, found)
    return {name: found[name] for name in site.rule.factors if name in found}


def _merged_units(
    site: Site, tensor: str, names: Sequence[str], units: Units, found: dict[str, Units]
) -> None:
    """Gives the axes of a merged dim to its factors, major first."""
    sizes = factor_sizes(site.rule, site.view)
    left = list(units)
    for position, name in enumerate(names):
        size = sizes[name]
        known = found.get(name)
        if known is not None:
            if tuple(left[: len(known)]) != known:
                raise site.fail(
                    f"{tensor}: expected it to begin with {_units_text(known)} as another operand "
                    f"has, got {_units_text(units)}"
                )
            taken = list(known)
        elif position == len(names) - 1 or not isinstance(size, int):
            taken = list(left)
        else:
            taken, room = [], size
            for unit in left:
                if room == 1:
                    break
                if gcd(room, unit.size) != unit.size:
                    raise _not_contiguous(site, tensor, count_of(units), [sizes[n] for n in names])
                taken.append(unit)
                room //= unit.size
        _check_whole(site, tensor, name, count_of(tuple(taken)))
        found[name] = tuple(taken)
        left = left[len(taken) :]
    if left:
        raise site.fail(
            f"{tensor}: expected no more axes than other operands have, got {_units_text(units)}"
        )


def _units_text(units: Units) -> str:
    return "[" + ", ".join(unit.name for unit in units) + "]" if units else "~"


def _factor(names: Sequence[str]) -> str:
    return f" ({' '.join(names)})" if names else ""

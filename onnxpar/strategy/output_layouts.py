"""The layouts of a node's outputs that the user wants."""

from collections.abc import Mapping, Sequence

from onnxpar.core.errors import ShardingError, StrategyError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import REDUCTIONS, DimSharding, Sharding
from onnxpar.core.symbols import Dim, dim_str
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import factor_sizes, operand_sharding, project
from onnxpar.ops.fallback import readable
from onnxpar.strategy.factor_splits import (
    Site,
    Unit,
    check_rank,
    counts_of,
    is_named,
    show,
    splits_of,
)
from onnxpar.strategy.tensor_entry import TensorEntry

Factors = Mapping[str, DimSharding]


def wanted(
    site: Site,
    entries: Sequence[TensorEntry | None],
    factors: Factors,
    mesh: Mesh,
    axes: Mapping[str, Unit],
) -> tuple[Sharding | None, ...]:
    """Returns the sharding wanted for each output; None if it stays as it was made.

    Raises:
        StrategyError: There are more entries than outputs; an entry does not have the rank of its
            output; an axis shards two dims; the node's devices cannot hold the number of shards; or
            a dim whose size depends on data would be sharded.
    """
    outputs = site.view.node.outputs
    if len(entries) > len(outputs):
        raise site.fail(f"expected at most {len(outputs)} entries under 'out', got {len(entries)}")
    found: list[Sharding | None] = []
    for index, entry in enumerate(entries):
        if entry is None:
            found.append(None)
            continue
        tensor = f"output {index} ({outputs[index].name!r})"
        shape = site.view.out_shape(index)
        check_rank(f"{site.title}: {tensor}", shape, entry)
        if is_named(entry):
            sharding = Sharding(
                tuple(
                    split.components(size, mesh, site.view.table, f"{site.title}: {tensor}")
                    for size, split in zip(shape, splits_of(entry, axes), strict=True)
                )
            )
        else:
            sharding = _numeric(site, tensor, index, entry, factors, mesh)
        try:
            sharding.validate(mesh, f"{tensor}, {show(entry)}")
        except ShardingError as error:
            raise site.fail(str(error)) from None
        check_sizes(site.view, index, sharding, mesh, f"{site.title}: {tensor}")
        found.append(sharding)
    return tuple(found)


def check_sizes(view: NodeView, index: int, sharding: Sharding, mesh: Mesh, what: str) -> None:
    """Checks that no sharded dim of an output has a size that depends on data.

    No rank would know its part of such a dim.

    Args:
        view: The node.
        index: Index of the output.
        sharding: The sharding that is wanted.
        mesh: The mesh.
        what: Names the output, for the message.

    Raises:
        StrategyError: Such a dim is sharded.
    """
    for dim, size in enumerate(view.out_shape(index)):
        pieces = mesh.count(sharding.dim_atoms(dim))
        if pieces > 1 and not readable(view, (size,)):
            raise StrategyError(
                f"{what}, dim {dim}: expected 1 shard, since its size {dim_str(size)} depends "
                f"on data, got {pieces}"
            )


def factors_from_outputs(
    site: Site, shardings: Sequence[Sharding | None], mesh: Mesh
) -> dict[str, DimSharding]:
    """Returns the shardings of a node's factors if the user gives only layouts of outputs.

    Outputs are made in their layouts, earlier outputs first. An output that contradicts an earlier
    one is resharded afterwards. Factors that no output has are replicated.
    """
    sizes = factor_sizes(site.rule, site.view)
    factors: dict[str, DimSharding] = {}
    taken: set[int] = set()
    for operand, sharding in zip(site.rule.outputs, shardings, strict=False):
        if sharding is not None:
            found = project(operand, sharding, sizes, mesh, site.view.table, site.rule.scaled)
            for name, dim in found.items():
                atoms = {a for c in dim for a in c.atoms}
                if name in site.rule.splittable and name not in factors and not atoms & taken:
                    factors[name] = dim
                    taken |= atoms
    return factors


def _numeric(
    site: Site, tensor: str, index: int, entry: TensorEntry, factors: Factors, mesh: Mesh
) -> Sharding:
    """Finds the atoms for numbers of shards.

    A dim keeps the atoms that shard it when it is made. If it needs fewer shards, it gives up its
    minor atoms. If it needs more, it takes, in this order: atoms over which the output is partial
    (so that the AllReduce becomes a ReduceScatter, as in MindSpore), atoms that other dims give up
    (AllToAll), and atoms over which the node is replicated.
    """
    shape = site.view.out_shape(index)
    sizes = factor_sizes(site.rule, site.view)
    made = operand_sharding(site.rule.outputs[index], shape, factors, sizes, site.rule.scaled)
    counts = counts_of(entry)
    kept: list[Atoms] = []
    released: list[int] = []
    for dim, count in enumerate(counts):
        atoms = made.dim_atoms(dim)
        length = _prefix(atoms, count, mesh)
        kept.append(atoms[:length])
        released += atoms[length:]
    partials = [
        a
        for name, parts in factors.items()
        if site.rule.kinds[name] in REDUCTIONS
        for c in parts
        for a in c.atoms
    ]
    used = {a for parts in factors.values() for c in parts for a in c.atoms}
    pool = [*partials, *released, *(a for a in range(len(mesh.atoms)) if a not in used)]
    dims: list[DimSharding] = []
    for dim, count in enumerate(counts):
        atoms = kept[dim]
        missing = count // mesh.count(atoms)
        taken = _take(pool, missing, mesh) if missing * mesh.count(atoms) == count else None
        if taken is None:
            raise site.fail(
                f"{tensor}, dim {dim}: expected a number of shards that can be made from those "
                f"that the node computes ({mesh.count(made.dim_atoms(dim))}), got {count}"
            )
        pool = [a for a in pool if a not in taken]
        dims.append(_dim(made, dim, shape[dim], (*atoms, *taken)))
    return Sharding(tuple(dims))


def _dim(made: Sharding, dim: int, size: Dim, atoms: Atoms) -> DimSharding:
    if atoms == made.dim_atoms(dim):
        return made.dims[dim]
    return Sharding.of([size], [atoms]).dims[0]


def _prefix(atoms: Atoms, count: int, mesh: Mesh) -> int:
    """Returns how many of the leading atoms a dim with `count` shards keeps."""
    length = 0
    while length < len(atoms) and count % mesh.count(atoms[: length + 1]) == 0:
        length += 1
    return length


def _take(pool: Sequence[int], missing: int, mesh: Mesh) -> Atoms | None:
    """Returns the first atoms of the pool that give `missing` shards; None if there are none."""
    taken: list[int] = []
    for atom in pool:
        if missing == 1:
            break
        if missing % mesh.atoms[atom] == 0:
            taken.append(atom)
            missing //= mesh.atoms[atom]
    return tuple(taken) if missing == 1 else None

"""Which file holds which weight shard, at which offset, and which ranks read it.

A parameter that is split by atoms a, b, … has one shard for each position along them; the ranks
that differ in other atoms only hold the same shard. All shards held by one set of ranks share a
file in the safetensors format (https://huggingface.co/docs/safetensors: eight bytes of header
length, a JSON header, the tensors without gaps), and the rank graphs point into it as ONNX external
data.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import onnx_ir as ir

from onnxpar.core.errors import ArtifactError
from onnxpar.core.mesh import Mesh
from onnxpar.partition.partitioned_model import Parameter
from onnxpar_format.boxes import Block

ALIGNMENT = 64
"""Bytes; what vector units load at once and what onnxruntime's own allocator aligns to."""

SAFETENSORS = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.DOUBLE: "F64",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.FLOAT8E4M3FN: "F8_E4M3",
    ir.DataType.FLOAT8E5M2: "F8_E5M2",
    ir.DataType.INT8: "I8",
    ir.DataType.INT16: "I16",
    ir.DataType.INT32: "I32",
    ir.DataType.INT64: "I64",
    ir.DataType.UINT8: "U8",
    ir.DataType.UINT16: "U16",
    ir.DataType.UINT32: "U32",
    ir.DataType.UINT64: "U64",
    ir.DataType.BOOL: "BOOL",
}
"""Names of the element types that the format knows; others are stored as their bytes (U8)."""


@dataclass(frozen=True)
class Shard:
    """One distinct shard of a parameter.

    Attributes:
        ranks: The ranks that hold it, ascending.
        file: Name of the file that has it.
        offset: Bytes from the beginning of the file.
        length: Bytes.
        shape: Local shape, padding included.
        sizes: Elements of each component of the global tensor, dims and components in order.
        blocks: This shard's part of each component.
    """

    ranks: tuple[int, ...]
    file: str
    offset: int
    length: int
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class WeightFile:
    """One file of weights.

    Attributes:
        name: File name.
        ranks: The ranks that read it.
        header: The bytes before the first tensor.
        size: Bytes of the whole file.
    """

    name: str
    ranks: tuple[int, ...]
    header: bytes
    size: int


@dataclass(frozen=True)
class WeightLayout:
    """All weight files and what is stored where in them.

    Attributes:
        files: By name.
        shards: Of each parameter, by parameter name. The order of the parameters is their order in
            every file, so that one pass over them writes every file from front to back.
    """

    files: Mapping[str, WeightFile]
    shards: Mapping[str, tuple[Shard, ...]]

    @cached_property
    def _placed(self) -> dict[str, dict[int, Shard]]:
        return {
            name: {rank: shard for shard in shards for rank in shard.ranks}
            for name, shards in self.shards.items()
        }

    def shard(self, parameter: str, rank: int) -> Shard:
        """Returns the shard of a parameter that a rank holds."""
        return self._placed[parameter][rank]


def stored_dtype(dtype: ir.DataType) -> tuple[int, bool]:
    """Returns the bytes of the unit in which an element type is copied, and if that is one element.

    Types below eight bits are packed, several elements to a byte, so that only bytes can be copied.
    """
    return (dtype.bitwidth // 8, True) if dtype.bitwidth >= 8 else (1, False)


def layout(
    parameters: Iterable[Parameter], mesh: Mesh, stages: Mapping[str, Sequence[int]] | None = None
) -> WeightLayout:
    """Places every shard of the given parameters.

    Each tensor is aligned to 64 bytes or to the largest power of two that divides its length: the
    format admits no gaps, so tensors are ordered by that power, descending, and otherwise as given.
    Text has no place: neither this format nor ONNX's external data holds it.

    Args:
        parameters: The parameters, each once.
        mesh: The mesh of a stage.
        stages: The pipeline stages that hold each parameter, by name; by default there is one.

    Raises:
        ArtifactError: A parameter is of a packed type and split, or has no known shape.
    """
    stored = [p for p in parameters if p.source.dtype != ir.DataType.STRING]
    on = stages or {}
    cut = {p.name: (_kind(p), _cut(p, mesh, on.get(p.name, (0,)))) for p in stored}
    order = sorted(cut, key=lambda name: -_power(cut[name][1][0][3]))
    held: dict[tuple[int, ...], list[str]] = {}
    for name in order:
        for ranks, *_ in cut[name][1]:
            held.setdefault(ranks, []).append(name)
    lengths = {name: cut[name][1][0][3] for name in order}
    files: dict[str, WeightFile] = {}
    begin: dict[tuple[int, ...], dict[str, int]] = {}
    names: dict[tuple[int, ...], str] = {}
    # The widest sets first: weights.0000 is what most ranks read, and names do not depend on order.
    for index, ranks in enumerate(sorted(held, key=lambda r: (-len(r), r))):
        names[ranks] = f"weights.{index:04d}.safetensors"
        header, begin[ranks] = _header(
            [(name, cut[name][0], cut[name][1][0][1], lengths[name]) for name in held[ranks]]
        )
        size = len(header) + sum(lengths[name] for name in held[ranks])
        files[names[ranks]] = WeightFile(names[ranks], ranks, header, size)
    shards = {
        name: tuple(
            Shard(ranks, names[ranks], begin[ranks][name], length, shape, sizes, blocks)
            for ranks, shape, blocks, length, sizes in cut[name][1]
        )
        for name in order
    }
    return WeightLayout(files, shards)


_Cut = tuple[tuple[int, ...], tuple[int, ...], tuple[Block, ...], int, tuple[int, ...]]


def _kind(parameter: Parameter) -> ir.DataType:
    dtype = parameter.source.dtype
    if dtype is None:
        raise ArtifactError(f"parameter {parameter.name!r}: its element type is unknown")
    if not stored_dtype(dtype)[1] and parameter.sharding.split_atoms:
        raise ArtifactError(
            f"parameter {parameter.name!r}: its elements of type {dtype.name.lower()} are packed "
            f"{8 // dtype.bitwidth} to a byte and cannot be sharded, got strategy "
            f"{parameter.sharding.dims}; replicate it"
        )
    return dtype


def _cut(parameter: Parameter, mesh: Mesh, stages: Sequence[int]) -> list[_Cut]:
    """Returns `(ranks, local shape, blocks, bytes, component sizes)` of each distinct shard."""
    sharding = parameter.sharding
    if sharding.partial or not all(
        isinstance(c.size, int) or c.size.is_Integer for dim in sharding.dims for c in dim
    ):
        raise ArtifactError(
            f"parameter {parameter.name!r}: expected a sharding with known sizes that is not "
            f"partial, got {sharding.describe(mesh)} of {sharding.shape}"
        )
    dtype = _kind(parameter)
    sized = sharding.sized(mesh)
    shape = sized.local_shape
    length = -(-prod(shape) * dtype.bitwidth // 8)
    cut = []
    for ranks in _holders(mesh, frozenset(sharding.split_atoms)):
        blocks = tuple(sized.blocks(ranks[0]))
        sizes = tuple(n for dim in sized.dims for n, _ in dim)
        if not stored_dtype(dtype)[1]:
            sizes, blocks = (length,), (Block(0, length, length),)
        holders = tuple(stage * mesh.size + rank for stage in stages for rank in ranks)
        cut.append((holders, shape, blocks, length, sizes))
    return cut


@lru_cache(1024)
def _holders(mesh: Mesh, atoms: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Returns, for each position along `atoms`, the ranks that are there, ordered by first rank."""
    others = [a for a in range(len(mesh.atoms)) if a not in atoms]
    return tuple(tuple(sorted(group)) for group in mesh.groups(others))


def _power(length: int) -> int:
    return min(length & -length, ALIGNMENT) if length else ALIGNMENT


def _header(
    tensors: Sequence[tuple[str, ir.DataType, tuple[int, ...], int]],
) -> tuple[bytes, dict[str, int]]:
    """Returns a file's header and the offset of each `(name, dtype, shape, bytes)` in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "onnxpar"}}
    position, begin = 0, {}
    for name, dtype, shape, length in tensors:
        known = SAFETENSORS.get(dtype)
        entries[name] = {
            "dtype": known or "U8",
            "shape": list(shape) if known else [length],
            "data_offsets": [position, position + length],
        }
        begin[name] = position
        position += length
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in begin.items()}

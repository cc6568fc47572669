"""Decides which file holds which weight shard, at which offset, and which ranks read it.

A parameter that is sharded over atoms a, b, … has one shard for each position along them; ranks
that differ only in other atoms hold the same shard. All shards of one set of ranks share a file in
the safetensors format (https://huggingface.co/docs/safetensors: eight bytes of header length, a
JSON header, the tensors without gaps). The rank graphs refer to it as ONNX external data.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import onnx_ir as ir

from onnxpar.core.errors import DirectoryError
from onnxpar.core.mesh import Mesh
from onnxpar.partition.partitioned_model import Parameter
from onnxpar_format.boxes import Block

ALIGNMENT = 64
"""Bytes that vector units load at once, and to which onnxruntime's own allocator aligns."""

SAFETENSORS_DTYPES = {
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
"""Names of the element types that the format has; others are stored as bytes (U8)."""


@dataclass(frozen=True)
class Shard:
    """One distinct shard of a parameter.

    Attributes:
        ranks: The ranks that hold it, ascending.
        file: Name of its file.
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
        size: Bytes of the file.
    """

    name: str
    ranks: tuple[int, ...]
    header: bytes
    size: int


@dataclass(frozen=True)
class WeightLayout:
    """All weight files, and where each shard is stored.

    Attributes:
        files: By name.
        shards: The shards of each parameter, by name. Parameters have the same order in every file,
            so one pass over them writes every file from front to back.
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
    """Returns the bytes that are copied at a time, and whether they are one element.

    Types with less than eight bits are packed, so their unit is a byte with several elements.
    """
    return (dtype.bitwidth // 8, True) if dtype.bitwidth >= 8 else (1, False)


def layout(
    parameters: Iterable[Parameter], mesh: Mesh, stages: Mapping[str, Sequence[int]] | None = None
) -> WeightLayout:
    """Places every shard of the given parameters.

    Each tensor is aligned to 64 bytes, or to the largest power of two that divides its length. The
    format allows no gaps, so tensors are ordered by that power, descending, and otherwise as given.
    Parameters of text are left out: neither this format nor ONNX's external data can hold them.

    Args:
        parameters: The parameters, each once.
        mesh: The mesh of a stage.
        stages: The pipeline stages that hold each parameter, by name; by default there is one.

    Raises:
        DirectoryError: A parameter of a packed type is sharded, or a shape is unknown.
    """
    stored = [p for p in parameters if p.source.dtype != ir.DataType.STRING]
    on = stages or {}
    kinds = {p.name: _kind(p, mesh) for p in stored}
    unplaced = {p.name: _shards(p, kinds[p.name], mesh, on.get(p.name, (0,))) for p in stored}
    lengths = {name: shards[0].length for name, shards in unplaced.items()}
    order = sorted(unplaced, key=lambda name: -_power(lengths[name]))
    held: dict[tuple[int, ...], list[str]] = {}
    for name in order:
        for shard in unplaced[name]:
            held.setdefault(shard.ranks, []).append(name)
    files: dict[str, WeightFile] = {}
    begin: dict[tuple[int, ...], dict[str, int]] = {}
    names: dict[tuple[int, ...], str] = {}
    # The widest sets first: weights.0000 is what most ranks read, and names do not depend on order.
    for index, ranks in enumerate(sorted(held, key=lambda r: (-len(r), r))):
        names[ranks] = f"weights.{index:04d}.safetensors"
        header, begin[ranks] = _header(
            [(name, kinds[name], unplaced[name][0].shape, lengths[name]) for name in held[ranks]]
        )
        size = len(header) + sum(lengths[name] for name in held[ranks])
        files[names[ranks]] = WeightFile(names[ranks], ranks, header, size)
    shards = {
        name: tuple(
            replace(shard, file=names[shard.ranks], offset=begin[shard.ranks][name])
            for shard in unplaced[name]
        )
        for name in order
    }
    return WeightLayout(files, shards)


def _kind(parameter: Parameter, mesh: Mesh) -> ir.DataType:
    dtype = parameter.source.dtype
    if dtype is None:
        raise DirectoryError(f"parameter {parameter.name!r}: its element type is unknown")
    if not stored_dtype(dtype)[1] and parameter.sharding.split_atoms:
        raise DirectoryError(
            f"parameter {parameter.name!r}: its elements of type {dtype.name.lower()} are packed "
            f"{8 // dtype.bitwidth} to a byte: expected it replicated, got "
            f"{parameter.sharding.describe(mesh)}"
        )
    return dtype


def _shards(
    parameter: Parameter, dtype: ir.DataType, mesh: Mesh, stages: Sequence[int]
) -> list[Shard]:
    """Returns the distinct shards, without file and offset."""
    sharding = parameter.sharding
    if sharding.partial or not all(
        isinstance(c.size, int) or c.size.is_Integer for dim in sharding.dims for c in dim
    ):
        raise DirectoryError(
            f"parameter {parameter.name!r}: expected a sharding with known sizes that is not "
            f"partial, got {sharding.describe(mesh)} of {sharding.shape}"
        )
    sized = sharding.sized(mesh)
    shape = sized.local_shape
    length = -(-prod(shape) * dtype.bitwidth // 8)
    sizes = tuple(n for dim in sized.dims for n, _ in dim)
    shards = []
    for ranks in _holders(mesh, frozenset(sharding.split_atoms)):
        blocks = tuple(sized.blocks(ranks[0]))
        if not stored_dtype(dtype)[1]:
            sizes, blocks = (length,), (Block(0, length, length),)
        holders = tuple(stage * mesh.size + rank for stage in stages for rank in ranks)
        shards.append(Shard(holders, "", 0, length, shape, sizes, blocks))
    return shards


@lru_cache(1024)
def _holders(mesh: Mesh, atoms: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks at each position along `atoms`, ordered by first rank."""
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
        known = SAFETENSORS_DTYPES.get(dtype)
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

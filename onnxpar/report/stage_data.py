"""The part of `onnxpar inspect` about a pipeline: its stages, and the values between them."""

from collections.abc import Iterable, Sequence
from math import ceil, prod
from typing import Any

import onnx_ir as ir

from onnxpar.core.mesh import Mesh
from onnxpar.core.symbols import Dim, as_dim, dim_text
from onnxpar.core.symbols.expressions import count_str
from onnxpar.graph.pipeline_places import virtual_stage_of
from onnxpar.partition.partitioned_model import Parameter, PartitionedModel

Json = dict[str, Any]


def stage_data(undivided: PartitionedModel, split: Sequence[PartitionedModel]) -> Json:
    """Returns what the stages of one program contain and send; nothing if it has no stages.

    Keys:
        `stage_totals`: for each stage `stage`, `ranks`, `nodes`, `parameters`,
            `parameter_bytes_per_device`, padding included, and `collectives` with the `bytes` that
            a device sends in them.
        `transfers`: what a rank sends to its counterpart in another stage in every micro-batch,
            `{"value", "from", "from_chunk", "to", "to_chunk", "bytes"}`; bytes are an integer,
            text in the model's symbols, or None if symbols do not determine the size.

    Args:
        undivided: The program before it was split into stages.
        split: The programs of stages, also of other undivided programs.
    """
    mine = [pm for pm in split if pm.plan is undivided.plan and pm is not undivided]
    if not mine:
        return {"stage_totals": [], "transfers": []}
    by_name = {pm.program: pm for pm in mine}
    nodes = [0] * undivided.stages
    for node in undivided.source.graph:
        if node.name in undivided.plan.nodes:
            nodes[virtual_stage_of(node) % undivided.stages] += 1
    transfers: dict[tuple[str, int, int], Json] = {}
    for pm in mine:
        for handed in pm.handed_in:
            source, name = by_name[handed.source], handed.local.name or ""
            if source.stage != pm.stage:
                transfers[name, source.virtual_stage, pm.virtual_stage] = {
                    "value": name,
                    "from": source.stage,
                    "from_chunk": source.virtual_stage // undivided.stages,
                    "to": pm.stage,
                    "to_chunk": pm.virtual_stage // undivided.stages,
                    "bytes": _bytes(handed.local),
                }
    return {
        "stage_totals": [_stage(stage, nodes[stage], mine) for stage in range(undivided.stages)],
        "transfers": list(transfers.values()),
    }


def _stage(stage: int, nodes: int, split: Sequence[PartitionedModel]) -> Json:
    own = [pm for pm in split if pm.stage == stage]
    held = {p.name: p for pm in own for p in pm.parameters}
    return {
        "stage": stage,
        "ranks": list(own[0].ranks),
        "nodes": nodes,
        "parameters": len(held),
        "parameter_bytes_per_device": local_bytes(held.values(), own[0].plan.mesh),
        "collectives": sum(len(pm.builder.collectives) for pm in own),
        "bytes": total_bytes(c.bytes for pm in own for c in pm.builder.collectives),
    }


def local_bytes(parameters: Iterable[Parameter], mesh: Mesh) -> int:
    """Returns the bytes of the shards that a device holds, padding included."""
    return sum(bytes_of(p.source.dtype, map(int, p.sharding.local_shape(mesh))) for p in parameters)


def bytes_of(dtype: ir.DataType | None, shape: Iterable[int]) -> int:
    """Returns the bytes of a tensor, or 0 if its element type is unknown."""
    return 0 if dtype is None else ceil(prod(shape) * dtype.itemsize)


def total_bytes(counts: Iterable[Dim]) -> int | str:
    """Returns the sum of counts, for JSON."""
    total: Dim = 0
    for count in counts:
        total = total + count
    return count_str(total, dim_text)


def _bytes(value: ir.Value) -> int | str | None:
    if value.shape is None or value.dtype is None:
        return None
    size: Dim = int(value.dtype.itemsize)
    for dim in value.shape:
        if not isinstance(dim, int) and dim.value is None:
            return None
        size = size * (dim if isinstance(dim, int) else as_dim(dim.value))
    return size if isinstance(size, int) else dim_text(size)

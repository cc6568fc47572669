"""What `onnxpar inspect` shows of a pipeline: what each stage has, and what goes between them."""

from collections.abc import Sequence
from math import prod
from typing import Any

import onnx_ir as ir

from onnxpar.core.symbols import Dim, as_dim, dim_text
from onnxpar.core.symbols.expressions import fraction
from onnxpar.graph.pipeline_places import virtual_stage_of
from onnxpar.partition.partitioned_model import PartitionedModel

Json = dict[str, Any]


def stage_data(whole: PartitionedModel, split: Sequence[PartitionedModel]) -> Json:
    """Returns what the stages of one program have and send; nothing where it was not split.

    Keys:
        `stage_totals`: of each stage its `stage`, `ranks`, `nodes`, `parameters`,
            `parameter_bytes_per_device`, padding included, and `collectives` with the `bytes` that
            a device sends in them.
        `transfers`: what goes from a rank to its counterpart of another stage for every
            micro-batch, `{"value", "from", "from_chunk", "to", "to_chunk", "bytes"}`; bytes are an
            integer, text in the model's symbols, or None where no symbol tells them.

    Args:
        whole: The program.
        split: The programs that it was split into; those of other programs are left out.
    """
    mine = [pm for pm in split if pm.plan is whole.plan and pm is not whole]
    if not mine:
        return {"stage_totals": [], "transfers": []}
    by_name = {pm.program: pm for pm in mine}
    nodes = [0] * whole.stages
    for node in whole.source.graph:
        if node.name in whole.plan.nodes:
            nodes[virtual_stage_of(node) % whole.stages] += 1
    transfers: dict[tuple[str, int, int], Json] = {}
    for pm in mine:
        for handed in pm.handed_in:
            source, name = by_name[handed.source], handed.local.name or ""
            if source.stage != pm.stage:
                transfers[name, source.virtual_stage, pm.virtual_stage] = {
                    "value": name,
                    "from": source.stage,
                    "from_chunk": source.virtual_stage // whole.stages,
                    "to": pm.stage,
                    "to_chunk": pm.virtual_stage // whole.stages,
                    "bytes": _bytes(handed.local),
                }
    return {
        "stage_totals": [_stage(stage, nodes[stage], mine) for stage in range(whole.stages)],
        "transfers": list(transfers.values()),
    }


def _stage(stage: int, nodes: int, split: Sequence[PartitionedModel]) -> Json:
    own = [pm for pm in split if pm.stage == stage]
    held = {p.name: p for pm in own for p in pm.parameters}
    mesh = own[0].plan.mesh
    sent: Dim = 0
    for pm in own:
        for collective in pm.builder.collectives:
            sent = sent + collective.bytes
    return {
        "stage": stage,
        "ranks": list(own[0].ranks),
        "nodes": nodes,
        "parameters": len(held),
        "parameter_bytes_per_device": sum(
            int(prod(map(int, p.sharding.local_shape(mesh))) * p.source.dtype.itemsize)
            for p in held.values()
            if p.source.dtype is not None
        ),
        "collectives": sum(len(pm.builder.collectives) for pm in own),
        "bytes": count_of_bytes(sent),
    }


def count_of_bytes(count: Dim) -> int | str:
    """Returns a count for JSON; it is not an integer where an odd number of bytes is halved."""
    if isinstance(count, int):
        return count
    top, bottom = fraction(count)
    if bottom == 1:
        return dim_text(count)
    return f"({dim_text(top)})/({dim_text(bottom)})"


def _bytes(value: ir.Value) -> int | str | None:
    if value.shape is None or value.dtype is None:
        return None
    size: Dim = int(value.dtype.itemsize)
    for dim in value.shape:
        if not isinstance(dim, int) and dim.value is None:
            return None
        size = size * (dim if isinstance(dim, int) else as_dim(dim.value))
    return size if isinstance(size, int) else dim_text(size)

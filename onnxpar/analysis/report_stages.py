"""What `onnxpar inspect` shows of a pipeline: what each stage has, and what goes between them."""

from collections.abc import Sequence
from math import prod
from typing import Any

import onnx_ir as ir

from onnxpar.analysis.stages import part_of_node
from onnxpar.passes.partitioned import PartitionedModel
from onnxpar.symbols import Dim, as_dim, dim_str

Json = dict[str, Any]


def stage_data(whole: PartitionedModel, parts: Sequence[PartitionedModel]) -> Json:
    """Returns what the stages of one program have and send; nothing where it was not split.

    Keys:
        `stage_totals`: of each stage its `stage`, `ranks`, `nodes`, `parameters` and
            `parameter_bytes_per_device`, padding included.
        `transfers`: what goes from a rank to its counterpart of another stage for every
            micro-batch, `{"value", "from", "to", "bytes"}`; bytes are an integer, text in the
            model's symbols, or None where no symbol tells them.

    Args:
        whole: The program.
        parts: The programs of its parts; those of other programs are left out.
    """
    mine = [pm for pm in parts if pm.plan is whole.plan and pm is not whole]
    if not mine:
        return {"stage_totals": [], "transfers": []}
    stage_by_program = {pm.program: pm.stage for pm in mine}
    nodes = [0] * whole.stages
    for node in whole.source.graph:
        if node.name in whole.plan.nodes:
            nodes[part_of_node(node) % whole.stages] += 1
    transfers: dict[tuple[str, int, int], Json] = {}
    for pm in mine:
        for handed in pm.handed_in:
            source, name = stage_by_program[handed.source], handed.local.name or ""
            if source != pm.stage:
                entry = {"value": name, "from": source, "to": pm.stage}
                transfers[name, source, pm.stage] = {**entry, "bytes": _bytes(handed.local)}
    return {
        "stage_totals": [_stage(stage, nodes[stage], mine) for stage in range(whole.stages)],
        "transfers": list(transfers.values()),
    }


def _stage(stage: int, nodes: int, parts: Sequence[PartitionedModel]) -> Json:
    own = [pm for pm in parts if pm.stage == stage]
    held = {p.name: p for pm in own for p in pm.parameters}
    mesh = own[0].plan.mesh
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
    }


def _bytes(value: ir.Value) -> int | str | None:
    if value.shape is None or value.dtype is None:
        return None
    size: Dim = int(value.dtype.itemsize)
    for dim in value.shape:
        if not isinstance(dim, int) and dim.value is None:
            return None
        size = size * (dim if isinstance(dim, int) else as_dim(dim.value))
    return size if isinstance(size, int) else dim_str(size)

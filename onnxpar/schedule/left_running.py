"""The memory of what runs in the background between the programs of a step."""

from collections.abc import Mapping

from onnxpar.core.machine import Machine
from onnxpar.graph.builder import DOMAIN
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.partition.program_memory import value_bytes

_REDUCED, _GATHERED = "ReduceScatter", "AllGather"


def left_running_bytes(
    optimizer: PartitionedModel, machine: Machine, sizes: Mapping[str, int]
) -> int:
    """Returns the most bytes that reductions started ahead and gathers finished later may hold.

    A ReduceScatter that `start_ahead` starts has its result in memory of its own, until the
    optimizer's program takes it. A gather that `finish_later` leaves running has a copy of its
    shard. Between ranks that share memory there is neither.

    Args:
        optimizer: The optimizer's program, before its collectives are grouped.
        machine: Its links tell between which ranks communication overlaps.
        sizes: As in `program_memory`.
    """
    mesh, total = optimizer.plan.mesh, 0
    known = {c.node: c for c in optimizer.builder.collectives if not c.stages}
    for node in optimizer.builder.nodes:
        found = known.get(node.name or "") if node.domain == DOMAIN else None
        if found is None or not machine.link(mesh, found.atoms).overlaps:
            continue
        held = {_REDUCED: node.outputs[0], _GATHERED: node.inputs[0]}.get(found.op)
        total += 0 if held is None else value_bytes(optimizer, held, sizes)
    return total

"""Collectives of the domain `onnxpar` that resharding writes into rank graphs."""

from onnxpar.ops.operator import for_ranks
from onnxpar.ops.slots import IN_PLACE, VIEW

DEFS = (
    for_ranks("AllReduce", memory=IN_PLACE),
    for_ranks("Broadcast", memory=IN_PLACE),
    for_ranks("Finish", memory=VIEW),
    # Its operand is the shape of the result.
    for_ranks("Wait", memory=IN_PLACE),
    for_ranks("Recv", host_operands=(0,)),
)

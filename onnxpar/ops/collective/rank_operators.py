"""Collectives of the domain `onnxpar` that resharding writes into the graphs of ranks."""

from onnxpar.ops.operator import for_ranks
from onnxpar.ops.slots import HostMemory

DEFS = (
    # The shape of what arrives.
    for_ranks("Recv", host=HostMemory(reads=(0,))),
)

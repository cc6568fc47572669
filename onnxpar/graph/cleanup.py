"""Removes what is not needed from a rank-generic graph, without breaking the chain of tokens."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.graph.body_captures import read_by
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import LocalBuilder


def remove_unused(builder: LocalBuilder, outputs: Sequence[ir.Value]) -> None:
    """Removes nodes, collectives, constants and system inputs that the outputs do not need.

    A collective whose result is unused is removed too, on all ranks; the next one takes its token.
    """
    needed = set(outputs)
    kept: list[ir.Node] = []
    for node in reversed(builder.nodes):
        read, results = read_by(node), node.outputs
        if _is_collective(node):  # The token of a collective does not count.
            read, results = read[:1], results[:1]
        if any(out in needed for out in results):
            kept.append(node)
            needed.update(read)
    kept.reverse()
    token: ir.Value | None = None
    for node in kept:
        if not _is_collective(node):
            continue
        if len(node.inputs) > 1:
            node.replace_input_with(1, token)
        if token is None and len(node.inputs) > 1:
            node.resize_inputs(1)
            node.metadata_props["input_names"] = str(["X"])
        token = node.outputs[1]
    names = {node.name for node in kept}
    builder.nodes = kept
    builder.collectives = [c for c in builder.collectives if c.node in names]
    builder.initializers = [v for v in builder.initializers if v in needed]
    builder.system_inputs = {n: v for n, v in builder.system_inputs.items() if v in needed}


def _is_collective(node: ir.Node) -> bool:
    return node.domain == DOMAIN and "atoms" in node.meta

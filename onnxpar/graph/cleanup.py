"""Removes what nobody needs from a rank-generic graph, keeping the chain of tokens whole."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.graph.body_captures import read_by
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import LocalBuilder


def remove_unused(builder: LocalBuilder, outputs: Sequence[ir.Value]) -> None:
    """Removes nodes, collectives, constants and system inputs that the outputs do not need.

    A collective whose result is unused goes too, on all ranks alike: the next one takes its token.
    """
    needed = set(outputs)
    kept: list[ir.Node] = []
    for node in reversed(builder.nodes):
        results = node.outputs[:1] if _is_collective(node) else node.outputs
        if any(out in needed for out in results):
            kept.append(node)
            needed.update(
                read_by(node)[:1] if _is_collective(node) else read_by(node)  # not the token
            )
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

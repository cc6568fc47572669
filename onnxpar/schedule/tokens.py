"""The token that chains collectives, so that all ranks issue them in one order."""

import onnx_ir as ir

WAITS = "waits"
"""Key in the `meta` of nodes Wait: the first operand is complete behind the token they return."""

PEERS = ("group", "pairs", "root")
"""Attributes of a collective that differ between ranks; they are added when a graph is written."""


def chained(node: ir.Node, token: ir.Value | None) -> ir.Value:
    """Makes a collective read the token of the one before it; returns its own token.

    Args:
        node: The collective; it is changed.
        token: The token; None for the first collective.
    """
    node.resize_inputs(1 if token is None else 2)
    if token is not None:
        node.replace_input_with(1, token)
    names = ["X"] if token is None else ["X", "token"]
    node.metadata_props["input_names"] = str(names)
    return node.outputs[1]

"""Checks that the bodies of If, Loop and Scan have the inputs and outputs that ONNX requires.

ONNX's own inference says only that it failed, or stays silent and leaves the fault to the runtime.
"""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxpar.core.errors import NodeError
from onnxpar.graph.body_captures import bodies_of

_SCAN_OF_A_BATCH = 8
"""The opset whose Scan has another form: its first operand is the lengths of the sequences."""


def check_bodies(node: ir.Node, opset: int) -> None:
    """Checks a node of the default domain.

    Args:
        node: The node.
        opset: The version of its operator.

    Raises:
        NodeError: A body has too few or too many inputs or outputs, or an attribute of Scan does
            not fit.
    """
    bodies, check = bodies_of(node), _Check(node)
    results = len(node.outputs)
    if node.op_type == "If":
        for name, body in bodies.items():
            check.count(f"{name}: inputs", len(body.inputs), 0)
            check.count(f"{name}: outputs", len(body.outputs), results)
    elif node.op_type == "Loop" and "body" in bodies:
        body, states = bodies["body"], max(len(node.inputs) - 2, 0)
        check.count("body: inputs (iteration, condition, states)", len(body.inputs), 2 + states)
        check.count("body: outputs (condition, states, scans)", len(body.outputs), 1 + results)
        check.at_least("results of the node", results, states)
    elif node.op_type == "Scan" and "body" in bodies and opset > _SCAN_OF_A_BATCH:
        body, operands = bodies["body"], len(node.inputs)
        scanned = _integer(node, "num_scan_inputs")
        if not 1 <= scanned <= operands:
            raise check.wrong("num_scan_inputs", f"1 to {operands}, the operands", scanned)
        states = operands - scanned
        check.count("body: inputs (states, scans)", len(body.inputs), operands)
        check.count("body: outputs (states, scans)", len(body.outputs), results)
        check.at_least("results of the node", results, states)
        for kind, number in (("input", scanned), ("output", results - states)):
            for name in (f"scan_{kind}_directions", f"scan_{kind}_axes"):
                values = _integers(node, name)
                if values is None:
                    continue
                check.count(f"{name}: numbers", len(values), number)
                if name.endswith("directions") and not set(values) <= {0, 1}:
                    raise check.wrong(name, "0 (forward) or 1 (reverse)", list(values))
        _check_axes(check, "scan_input_axes", node, body.inputs[states:])
        _check_axes(check, "scan_output_axes", node, body.outputs[states:])


def _check_axes(check: "_Check", name: str, node: ir.Node, slices: Sequence[ir.Value]) -> None:
    for axis, value in zip(_integers(node, name) or (), slices, strict=False):
        if value.shape is not None and not -len(value.shape) - 1 <= axis <= len(value.shape):
            rank = len(value.shape) + 1
            raise check.wrong(name, f"axes of a tensor of {rank} dims", axis)


class _Check:
    """The errors of a node."""

    def __init__(self, node: ir.Node) -> None:
        self._node = node

    def wrong(self, what: str, expected: Any, got: Any) -> NodeError:
        return NodeError(
            f"node {self._node.name!r} ({self._node.op_type}): {what}: expected {expected}, got "
            f"{got}"
        )

    def count(self, what: str, got: int, expected: int) -> None:
        if got != expected:
            raise self.wrong(what, expected, got)

    def at_least(self, what: str, got: int, least: int) -> None:
        if got < least:
            raise self.wrong(what, f"at least {least}, one for each state", got)


def _integer(node: ir.Node, name: str) -> int:
    found = node.attributes.get(name)
    return 0 if found is None else int(found.value)


def _integers(node: ir.Node, name: str) -> tuple[int, ...] | None:
    found = node.attributes.get(name)
    return None if found is None else tuple(int(value) for value in found.value)

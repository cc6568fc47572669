"""If, Loop and Scan: rules and local forms, which follow from the nodes in their bodies.

All devices run the same bodies equally often: conditions and trip counts must be replicated, and
the axis along which a Scan steps is not sharded. A body is partitioned as a graph is, with the
shardings of its node, and never communicates (see `onnxpar.ops.control.body_rule`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.rule import OpRule
from onnxpar.graph.body_captures import bodies_of, own_inputs
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.body_node import BodyFn
from onnxpar.ops.control.body_rule import BodyAnalysis, Port, Wiring
from onnxpar.ops.control.control_gradient import if_gradient, loop_body, scan_gradient
from onnxpar.ops.control.inference import infer_loop, infer_scan
from onnxpar.ops.grad_node import Gradient
from onnxpar.ops.local_node import Captured, LocalNode
from onnxpar.ops.old_node import OldNode, Upgrade
from onnxpar.ops.operator import BY_BODY, ByBody, OpDef

WiringFn = Callable[[NodeView], Wiring]


def if_wiring(view: NodeView) -> Wiring:
    """The condition, and for each result the results of both branches."""
    branches = [g.outputs for g in bodies_of(view.node).values()]
    results = tuple(
        Port(out, tuple(outputs[i] for outputs in branches))
        for i, out in enumerate(view.node.outputs)
    )
    return Wiring((Port(view.node.inputs[0]),), results)


def loop_wiring(view: NodeView) -> Wiring:
    """Trip count and condition, the states, and the results that stack a slice of each step."""
    node, own = view.node, own_inputs(view.node)
    body = bodies_of(node)["body"]
    initial, entering, leaving = own[2:], body.inputs[2:], body.outputs[1:]
    count = len(initial)
    return Wiring(
        (*(Port(v) for v in own[:2]), *map(_port, initial, entering)),
        tuple(
            Port(out, (made,), None if i < count else 0)
            for i, (out, made) in enumerate(zip(node.outputs, leaving, strict=True))
        ),
        tuple(zip(initial, entering, leaving[:count], strict=True)),
        (body.outputs[0],),
    )


def scan_wiring(view: NodeView) -> Wiring:
    """The states, and the operands and results that are sliced or stacked along an axis."""
    node, own = view.node, own_inputs(view.node)
    body = bodies_of(node)["body"]
    scanned = view.attr("num_scan_inputs")
    states = len(own) - scanned
    into = view.attr("scan_input_axes") or [0] * scanned
    out_of = view.attr("scan_output_axes") or [0] * (len(node.outputs) - states)
    operands = [_port(v, inner) for v, inner in zip(own[:states], body.inputs, strict=False)]
    operands += [
        Port(v, (inner,), axis)
        for v, inner, axis in zip(own[states:], body.inputs[states:], into, strict=True)
    ]
    results = [
        Port(v, (made,)) for v, made in zip(node.outputs[:states], body.outputs, strict=False)
    ]
    results += [
        Port(v, (made,), axis)
        for v, made, axis in zip(node.outputs[states:], body.outputs[states:], out_of, strict=True)
    ]
    return Wiring(
        tuple(operands),
        tuple(results),
        tuple(zip(own[:states], body.inputs[:states], body.outputs[:states], strict=True)),
    )


def _port(outer: ir.Value | None, inner: ir.Value) -> Port:
    return Port(outer, (inner,))


def rule_by(wiring: WiringFn) -> Callable[[NodeView], OpRule]:
    """Returns the rule of an operator with bodies."""

    def rule(view: NodeView) -> OpRule:
        return BodyAnalysis(view, wiring(view), view.bodies).rule()

    rule.__doc__ = "Dims that all nodes of the bodies can shard alike, without communication."
    return rule


def local_by(wiring: WiringFn) -> Callable[[LocalNode], Sequence[ir.Value]]:
    """Returns the local form of an operator with bodies."""

    def local(node: LocalNode) -> Sequence[ir.Value]:
        view = node.view
        plans = BodyAnalysis(view, wiring(view), view.bodies).plans(node.plan.factors, node.mesh)
        own = own_inputs(view.node)
        captured: list[Captured] = []
        for index in range(len(own), len(view.node.inputs)):
            value, laid, here = view.node.inputs[index], node.plan.inputs[index], node.inputs[index]
            if value is not None and laid is not None and here is not None:
                captured.append((value, laid, here, node.zero[index]))
        bodies = {
            name: node.partition_body(
                node.builder,
                body,
                plans.nodes(body),
                captured,
                [plans.sharding(v) for v in body.graph.inputs],
                [plans.sharding(v) for v in body.graph.outputs],
            )
            for name, body in plans.analysis.bodies.items()
        }
        # Not `node.copy`: the metadata of captured operands does not hold for the local node.
        return node.builder.ops(
            view.op_type,
            node.inputs[: len(own)],
            [
                (out.dtype, node.out_shape(i) if out.name in view.env.shapes else None)
                for i, out in enumerate(view.node.outputs)
            ],
            {**view.node.attributes, **bodies},
            domain=view.node.domain,
            name=view.name,
        )

    local.__doc__ = "The bodies, partitioned for the local shapes."
    return local


def _control(
    op_type: str,
    since: int,
    wiring: WiringFn,
    gradient: Gradient | ByBody,
    body: BodyFn | None = None,
    **slots: Any,
) -> OpDef:
    return OpDef(
        "",
        op_type,
        since,
        rule_by(wiring),
        local_by(wiring),
        gradient=gradient,
        body=body,
        reads_bodies=True,
        **slots,
    )


def _batch_outside(old: OldNode) -> None:
    """Scan had a batch dim: it becomes a Scan over the batch, whose body is a Scan of today.

    Raises:
        ModelError: The node has lengths of sequences.
    """
    node = old.node
    what = f"node {node.name!r} (Scan)"
    if old.input(0) is not None:
        raise ModelError(f"{what}: sequence_lens of opset 8 are not supported; convert the model")
    operands = [value for value in node.inputs[1:] if value is not None]
    items = []
    for index, value in enumerate(operands):
        item = ir.Value(name=old.fresh(f"{node.name}/item.{index}"))
        item.type = None if value.dtype is None else ir.TensorType(value.dtype)
        items.append(item)
    count = int(old.attr("num_scan_inputs"))
    inner = ir.Node(
        "",
        "Scan",
        items,
        [
            node.attributes["body"],
            ir.AttrInt64("num_scan_inputs", count),
            ir.AttrInt64s("scan_input_directions", old.attr("directions", [0] * count)),
        ],
        num_outputs=len(node.outputs),
        name=old.fresh(f"{node.name}/Scan"),
    )
    for index, out in enumerate(inner.outputs):
        out.name = old.fresh(f"{inner.name}:{index}")
    body = ir.Graph(items, inner.outputs, nodes=[inner], name=f"{node.name}/batch")
    old.become("Scan", operands, {"body": body, "num_scan_inputs": len(operands)})


DEFS = (
    _control(
        "If",
        1,
        if_wiring,
        if_gradient,
        host_operands=(0,),
        branches=("then_branch", "else_branch"),
    ),
    _control("Loop", 1, loop_wiring, BY_BODY, loop_body, host_operands=(0, 1), infer=infer_loop),
    _control(
        "Scan",
        9,
        scan_wiring,
        scan_gradient,
        infer=infer_scan,
        upgrades={9: Upgrade(_batch_outside)},
    ),
)

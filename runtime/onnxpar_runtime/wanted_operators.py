"""Which of our operators a session has registered: those that its model's nodes name."""

from typing import Any

import onnx

from onnxpar_runtime.exposed_graph import DOMAIN

_ENTRY = "onnxpar.operators"


def want_operators(options: Any, model: onnx.ModelProto) -> None:
    """Limits the operators that options then get registered to those that a model needs.

    onnxruntime builds the schemas of all registered operators for each session. That takes 10 ms
    for all of ours, and else a session of a few nodes takes less than 1 ms.

    Args:
        options: `onnxruntime.SessionOptions`, before the operator library is registered.
        model: The model; its nodes, those of its functions and of bodies count.
    """
    found = set()
    graphs: list[onnx.GraphProto | onnx.FunctionProto] = [model.graph, *model.functions]
    while graphs:
        for node in graphs.pop().node:
            if node.domain == DOMAIN:
                found.add(node.op_type)
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    graphs.append(attribute.g)
    options.add_session_config_entry(_ENTRY, ",".join(sorted(found)))

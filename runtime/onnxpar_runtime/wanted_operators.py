"""The operators of ours that are registered for a session: those that its graph needs."""

from typing import Any

import onnx

from onnxpar_runtime.exposed_graph import DOMAIN

_ENTRY = "onnxpar.operators"


def want_operators(options: Any, model: onnx.ModelProto) -> None:
    """Says which operators a model needs, so that the library registers no others.

    onnxruntime builds the schemas of all registered operators for each session. For all of ours
    this takes up to 10 ms. The rest of a session of a few nodes takes less than 1 ms.

    Args:
        options: `onnxruntime.SessionOptions`, before the library is registered with them.
        model: The model. Nodes of its functions and of bodies count too.
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

"""Which nodes onnxruntime's CUDA provider would leave to the CPU, as `inspect` shows it."""

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxpar.facts.host_nodes import HOST, LAYER, host_nodes, is_small
from onnxpar.graph.node_view import default_opset
from onnxpar.ops.device.cuda_kernels import table_version, type_name, why_on_host
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY

Json = dict[str, Any]


def device_data(programs: Mapping[str, ir.Model], registry: Registry = REGISTRY) -> Json:
    """Returns which nodes of programs are on the device, which on the host, and why.

    Keys: `device`; `onnxruntime`, the version whose kernels are known; and `programs`, which has
    for each program by name: `nodes`, their number, including those in bodies; `sizes`, the nodes
    that compute small sizes on the host on purpose, `{"name", "op_type"}`; and `fallbacks`, the
    nodes on the host because there is no kernel, also with `domain`, `types` (of the operands,
    None if absent or unknown) and `reason`.

    In a rank's graph, `sizes` are the nodes marked so; in another model, those that would be.

    Args:
        programs: Models by name; they are not changed.
        registry: The table of operators.
    """
    return {
        "device": "cuda",
        "onnxruntime": table_version(),
        "programs": {name: _of_model(model, registry) for name, model in programs.items()},
    }


def _of_model(model: ir.Model, registry: Registry) -> Json:
    opsets = {**model.opset_imports}
    opsets[""] = default_opset(opsets)
    nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
    marked = {node for node in nodes if node.metadata_props.get(LAYER) == HOST}
    if not marked:
        constants = model.graph.initializers.values()
        given = {v for v in constants if is_small(v)}
        marked = set(host_nodes(tuple(model.graph), given, registry))
    fallbacks = []
    for node in nodes:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if node in marked or node.op_identifier() in model.functions:
            continue
        reason = why_on_host(node, opsets.get(domain, 1), registry)
        if reason is not None:
            types = [type_name(v.type) if v is not None else None for v in node.inputs]
            found = {"name": node.name or "", "op_type": node.op_type, "domain": domain}
            fallbacks.append({**found, "types": types, "reason": reason})
    sizes = [{"name": n.name or "", "op_type": n.op_type} for n in nodes if n in marked]
    return {"nodes": len(nodes), "sizes": sizes, "fallbacks": fallbacks}

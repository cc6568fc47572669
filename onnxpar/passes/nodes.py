"""Refuses nodes that no runtime could run, by ONNX's own schemas and inference.

Everything later may take attributes to be what the standard says: of the right name, type and
range. What is wrong is told by node and attribute, before anything is divided.
"""

import re
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from onnxpar.errors import ModelError, NodeError

DEFAULT_DOMAINS = ("", "ai.onnx")


def check_operators(model: ir.Model, opset: int) -> None:
    """Checks operators and attributes of the default domain, in all bodies and functions.

    Raises:
        ModelError: The standard does not have the operator at this version.
        NodeError: An attribute is missing, unknown to the operator, or of another type.
    """
    _check_nodes(ir.traversal.RecursiveGraphIterator(model.graph), opset, model)
    for function in model.functions.values():
        version = function.opset_imports.get("", function.opset_imports.get("ai.onnx", opset))
        _check_nodes(ir.traversal.RecursiveGraphIterator(function), version, model)


def _check_nodes(nodes: Iterable[ir.Node], opset: int, model: ir.Model) -> None:
    for node in nodes:
        if node.domain not in DEFAULT_DOMAINS or node.op_identifier() in model.functions:
            continue
        if not onnx.defs.has(node.op_type, max_inclusive_version=opset):
            raise ModelError(
                f"node {node.name!r}: ONNX has no operator {node.op_type!r} in opset {opset}"
            )
        schema = onnx.defs.get_schema(node.op_type, max_inclusive_version=opset)
        what = f"node {node.name!r} ({node.op_type})"
        for name, attribute in node.attributes.items():
            if name not in schema.attributes:
                known = ", ".join(sorted(schema.attributes)) or "none"
                raise NodeError(f"{what}: attribute {name!r}: expected one of {known}")
            expected, got = schema.attributes[name].type.name, attribute.type.name
            if got != expected:
                raise NodeError(
                    f"{what}: attribute {name!r}: expected the type {expected}, got {got}"
                )
        for name, known_attribute in schema.attributes.items():
            if known_attribute.required and name not in node.attributes:
                raise NodeError(f"{what}: attribute {name!r} is missing")


def check_inferred(model: ir.Model, opset: int) -> None:
    """Checks each node on the inferred types of its operands: axes in range, shapes that fit.

    Bodies of control flow are left to the runtime: what they capture has no types of its own there.

    Raises:
        NodeError: ONNX's inference refuses the node; the message has its reason.
    """
    imports = [onnx.OperatorSetIdProto(domain=d, version=v) for d, v in model.opset_imports.items()]
    for node in model.graph:
        if node.domain not in DEFAULT_DOMAINS:
            continue
        schema = onnx.defs.get_schema(node.op_type, max_inclusive_version=opset)
        if not schema.has_type_and_shape_inference_function or _bodies(node):
            continue
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, onnx.TensorProto] = {}
        for value in node.inputs:
            if value is None or not value.name:
                continue
            if value.type is None:
                break
            types[value.name] = ir.serde.serialize_value(value).type
            tensor = value.const_value
            if tensor is not None and tensor.size <= 64 and len(tensor.shape) <= 1:
                data[value.name] = ir.serde.serialize_tensor(tensor)
        else:
            try:
                onnx.shape_inference.infer_node_outputs(
                    schema,
                    ir.serde.serialize_node(node),
                    types,
                    data,
                    opset_imports=imports,
                    ir_version=model.ir_version,
                )
            except onnx.shape_inference.InferenceError as error:
                reason = " ".join(re.sub(r"\[\w*InferenceError\]", "", str(error)).split())
                raise NodeError(
                    f"node {node.name!r} ({node.op_type}): {reason.rstrip('.')}, got {_given(node)}"
                ) from None


def _bodies(node: ir.Node) -> bool:
    return any(
        a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for a in node.attributes.values()
    )


def _given(node: ir.Node) -> str:
    """The attributes and operands of a node, for people."""
    texts = [f"{a.name}={a.value!r}" for a in node.attributes.values()]
    for value in node.inputs:
        if value is None or value.shape is None:
            continue
        text = f"{value.name!r} of shape {value.shape}"
        if value.const_value is not None and value.const_value.size <= 8:
            text = f"{value.name!r} = {value.const_value.numpy().tolist()}"
        texts.append(text)
    return ", ".join(texts)

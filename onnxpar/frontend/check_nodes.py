"""Refuses nodes that no runtime could run, by ONNX's own schemas and inference.

Later passes can assume that attributes have the names, types and ranges of the standard. Faults are
reported with node and attribute, before anything is sharded.
"""

import re
from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir

from onnxpar.core.errors import ModelError, NodeError, short
from onnxpar.graph.body_captures import bodies_of
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import default_opset
from onnxpar.ops.contrib_schemas import correct_schemas
from onnxpar.ops.control.body_forms import check_bodies

DEFAULT_DOMAINS = ("", "ai.onnx")
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
# ONNX has one enumeration for the attributes of nodes and one for those of schemas.
_KINDS = onnx.defs.OpSchema.AttrType
_TYPES = {getattr(_KINDS, t.name): t for t in ir.AttributeType if hasattr(_KINDS, t.name)}


def check_operators(model: ir.Model, opset: int) -> None:
    """Checks operators and attributes of the default domain, in all bodies and functions.

    Raises:
        ModelError: The standard does not have the operator at this version.
        NodeError: An attribute is missing, unknown to the operator, or of another type, or refers
            to a function's where there is none.
    """
    correct_schemas()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for name, attribute in node.attributes.items():
            if attribute.is_ref():
                raise NodeError(
                    f"node {node.name!r} ({node.op_type}): attribute {name!r}: expected a value, "
                    f"got a reference to an attribute {short(attribute.ref_attr_name)}, which only "
                    "functions have"
                )
    _check_nodes(ir.traversal.RecursiveGraphIterator(model.graph), opset, model)
    for function in model.functions.values():
        version = default_opset(function.opset_imports, opset)
        _check_nodes(ir.traversal.RecursiveGraphIterator(function), version, model)


def _check_nodes(nodes: Iterable[ir.Node], opset: int, model: ir.Model) -> None:
    for node in nodes:
        if node.domain == DOMAIN and node.op_identifier() not in model.functions:
            raise ModelError(
                f"node {node.name!r} ({node.op_type}): the domain {DOMAIN!r} is that of sharded "
                "programs; expected an undivided model"
            )
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
            expected = _TYPES[schema.attributes[name].type]
            if attribute.type != expected:
                raise NodeError(
                    f"{what}: attribute {name!r}: expected the type {expected.name}, got "
                    f"{attribute.type.name}"
                )
        for name, known_attribute in schema.attributes.items():
            if known_attribute.required and name not in node.attributes:
                raise NodeError(f"{what}: attribute {name!r} is missing")
        check_bodies(node, opset)


def check_inferred(model: ir.Model, opset: int) -> None:
    """Checks each node with the inferred types of its operands: axes in range, shapes that fit.

    Nodes with bodies, and nodes in bodies, are left to the runtime: captured values have no types
    there.

    Raises:
        NodeError: ONNX's inference refuses the node; the message has its reason.
    """
    imports = [onnx.OperatorSetIdProto(domain=d, version=v) for d, v in model.opset_imports.items()]
    # Repeated layers would be checked again, which takes most of the time.
    checked: set[object] = set()
    for node in model.graph:
        if node.domain not in DEFAULT_DOMAINS or bodies_of(node):
            continue
        operands = [value for value in node.inputs if value is not None and value.name]
        if any(value.type is None for value in operands):
            continue
        known = {
            value.name or "": data for value in operands if (data := _small(value)) is not None
        }
        key = (
            node.op_type,
            tuple((a.name, repr(a.value)) for a in node.attributes.values()),
            tuple(_described(value, known) for value in node.inputs),
            len(node.outputs),
        )
        if key in checked:
            continue
        checked.add(key)
        schema = onnx.defs.get_schema(node.op_type, max_inclusive_version=opset)
        if not schema.has_type_and_shape_inference_function:
            continue
        try:
            onnx.shape_inference.infer_node_outputs(
                schema,
                ir.serde.serialize_node(node),
                {value.name or "": ir.serde.serialize_value(value).type for value in operands},
                {name: ir.serde.serialize_tensor(tensor) for name, tensor in known.items()},
                opset_imports=imports,
                ir_version=model.ir_version,
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            reason = " ".join(re.sub(r"\[\w*InferenceError\]", "", str(error)).split())
            raise NodeError(
                f"node {node.name!r} ({node.op_type}): {reason.rstrip('.')}, got {_given(node)}"
            ) from None


def _small(value: ir.Value) -> ir.TensorProtocol | None:
    """The content of a small constant of integers, such as axes; weights are not read."""
    tensor = value.const_value
    if tensor is None or tensor.dtype not in _INTEGERS:
        return None
    return tensor if tensor.size <= 64 and len(tensor.shape) <= 1 else None


def _described(value: ir.Value | None, known: Mapping[str, ir.TensorProtocol]) -> object:
    if value is None:
        return None
    data = known.get(value.name or "")
    return str(value.type), str(value.shape), None if data is None else data.tobytes()


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

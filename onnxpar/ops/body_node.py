"""Bodies of operators: `BodyNode`, and the bodies in ONNX's schemas.

An operator without a rule of its own is replaced by its body, and so is a differentiated operator
whose gradient is that of its body. A body is either a function of ours, which emits operators with
rules on the undivided graph, or the function in ONNX's schema of the operator (`FunctionProto`, see
ONNX's IR specification, "Functions"), which may depend on the attributes of the node and the types
of its operands.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.graph.metadata_keys import EXPANDED_FROM, EXPANDED_OPERANDS, VIRTUAL_STAGE
from onnxpar.ops.emitted_node import EmittedNode

_GRAPH_KINDS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@dataclass(frozen=True)
class BodyNode(EmittedNode[GlobalBuilder]):
    """A node that is replaced by its body."""


BodyFn = Callable[[BodyNode], Sequence[ir.Value | None]]
"""Emits the body of a node and returns its results; None for those that nobody reads."""


def origin(node: ir.Node) -> dict[str, str]:
    """Returns the metadata of the nodes that replace `node`."""
    stage = {k: v for k, v in node.metadata_props.items() if k == VIRTUAL_STAGE}
    if EXPANDED_FROM in node.metadata_props:
        known = {k: node.metadata_props[k] for k in (EXPANDED_FROM, EXPANDED_OPERANDS)}
        return known | stage
    operands = {
        "in": [None if v is None else v.name for v in node.inputs],
        "out": [v.name for v in node.outputs],
    }
    return {EXPANDED_FROM: node.name or "", EXPANDED_OPERANDS: json.dumps(operands)} | stage


def has_schema_body(node: ir.Node, opset: int) -> bool:
    """Whether ONNX's schema of an operator of the default domain has a function body."""
    schema = _schema(node, opset)
    if schema is None:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def schema_body(node: ir.Node, opset: int) -> ir.Function:
    """Returns the body of a node in ONNX's schema, in its newest version up to `opset`.

    Args:
        node: The node, with types and shapes of its operands as far as they are known.
        opset: Version of the default domain.

    Raises:
        ModelError: There is no body for this node.
    """
    what = f"node {node.name!r} ({node.op_type})"
    schema = _schema(node, opset)
    assert schema is not None
    if any(a.type in _GRAPH_KINDS for a in node.attributes.values()):
        raise ModelError(
            f"{what}: it has a graph as an attribute, which ONNX's function body cannot contain"
        )
    given = schema.has_function
    versions = (
        schema.function_opset_versions
        if given
        else schema.context_dependent_function_opset_versions
    )
    version = max(v for v in versions if v <= opset)
    if given:
        data = schema.get_function_with_opset_version(version)
    else:
        types = []
        for value in node.inputs:
            if value is not None and value.type is None:
                raise ModelError(f"{what}: the type of {value.name!r} is unknown")
            kind = onnx.TypeProto() if value is None else ir.serde.serialize_value(value).type
            types.append(kind.SerializeToString())
        proto = ir.serde.serialize_node(node)
        proto.attribute.extend(defaults(schema, {a.name for a in proto.attribute}))
        try:
            data = schema.get_context_dependent_function_with_opset_version(
                version, proto.SerializeToString(), types
            )
        except RuntimeError as error:
            raise ModelError(f"{what}: ONNX has no function body: {error}") from error
    function = onnx.FunctionProto()
    function.ParseFromString(data)
    if not function.node or len(function.output) < len(node.outputs):
        raise ModelError(f"{what}: ONNX has no function body for these operands and attributes")
    if any(a.HasField("g") for n in function.node for a in n.attribute):
        raise ModelError(f"{what}: ONNX's function body depends on the values of its operands")
    made = ir.serde.deserialize_function(function)
    made.opset_imports[""] = opset
    return made


def fill_defaults(node: ir.Node, opset: int) -> None:
    """Gives a node the missing attributes that have a default."""
    schema = _schema(node, opset)
    if schema is not None:
        for default in defaults(schema, node.attributes):
            node.attributes[default.name] = ir.serde.deserialize_attribute(default)


def defaults(schema: onnx.defs.OpSchema, given: Collection[str]) -> Iterator[onnx.AttributeProto]:
    """Yields the default values of a schema's attributes, except of those in `given`."""
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.name:
            yield attribute.default_value


def _schema(node: ir.Node, opset: int) -> Any:
    """The schema, or None. Its type is `Any`, as onnx's stubs lack the methods for functions."""
    if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return None
    return onnx.defs.get_schema(node.op_type, max_inclusive_version=opset)


def adopt_opset(function: ir.Function, opset: int) -> None:
    """Makes a function of another opset one of `opset`. The function is changed.

    Raises:
        ModelError: One of its operators means something else, or does not exist, in that opset.
    """
    version = function.opset_imports.get("", function.opset_imports.get("ai.onnx", opset))
    for node in ir.traversal.RecursiveGraphIterator(function.graph):
        if not node.domain and version != opset:
            why = difference(node.op_type, len(node.inputs), list(node.attributes), version, opset)
            if why:
                raise ModelError(
                    f"the function {function.domain}::{function.name} is of opset {version}, in "
                    f"which {node.op_type} {why} opset {opset} of the model; convert the model"
                )
    function.opset_imports.pop("ai.onnx", None)
    function.opset_imports[""] = opset


def difference(name: str, arity: int, attributes: Sequence[str], given: int, wanted: int) -> str:
    """Returns how a node of opset `given` differs in opset `wanted`; "" if it means the same.

    A node without the operands and attributes that a later version adds means the same in both
    versions. A version that removes some, or changes a default, means something else.

    Args:
        name: The operator.
        arity: Number of the node's operands.
        attributes: Names of the node's attributes.
        given: The opset of the node.
        wanted: The other opset, which may be older or newer.
    """
    if not onnx.defs.has(name, max_inclusive_version=wanted):
        return "exists, unlike in"
    ours = onnx.defs.get_schema(name, max_inclusive_version=given)
    theirs = onnx.defs.get_schema(name, max_inclusive_version=wanted)
    if ours.since_version == theirs.since_version:
        return ""
    changed = "does not mean the same as in"
    if arity > theirs.max_input:
        return changed
    if any(attribute not in theirs.attributes for attribute in attributes):
        return changed
    for attribute, described in ours.attributes.items():
        other = theirs.attributes.get(attribute)
        if attribute in attributes or (other is None and given > wanted):
            continue
        if other is None or other.default_value != described.default_value:
            return changed
    return ""

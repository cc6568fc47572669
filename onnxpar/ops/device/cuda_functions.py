"""Standard operators that onnxruntime's CUDA provider lacks, as operators of the domain `onnxpar`.

The slot `device_function` of an operator's record has a function (see `onnxpar.ops.function`) of
the operator's own name. It says nothing but that operator, so that on the CPU that provider's
kernel runs; for GPUs the runtime's library has one.
"""

import onnx
import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.function import Function
from onnxpar.ops.operator import OpDef
from onnxpar.ops.registry import Registry

_FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
)
_MOST_SPACE = 3
"""Spatial dims of a pool that the library's kernel takes."""


def itself(name: str, outputs: tuple[str, ...] = ("y",), **attributes: str) -> Function:
    """Returns the function that is the operator of its name.

    Args:
        name: The operator.
        outputs: Names of its results.
        **attributes: ONNX's word for the type of each of its attributes.
    """
    given = ", ".join(f"{key}: {kind} = @{key}" for key, kind in attributes.items())
    body = f"{', '.join(outputs)} = {name}{f'<{given}>' if given else ''}(x)"
    return Function(name, ("x",), outputs, body, tuple(attributes))


def function_for(node: ir.Node, registry: Registry) -> Function | None:
    """Returns as what operator of `onnxpar` a standard node may be written; None where as none."""
    definition = registry.of(node)
    if definition is None or definition.device_function is None:
        return None
    x = node.inputs[0]
    if x is None or x.dtype not in _FLOATS:
        return None
    space = len(node.attributes.get_ints("kernel_shape", ()))
    fits = space <= _MOST_SPACE and not node.attributes.get_int("storage_order", 0)
    return definition.device_function if fits else None


def stands_for_in(definition: OpDef, opset: int, dtype: ir.DataType) -> bool:
    """Whether a standard operator exists in a type, and may be written as said."""
    if definition.device_function is None or dtype not in _FLOATS:
        return False
    schema = onnx.defs.get_schema(definition.op_type, opset, "")
    admitted = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    return f"tensor({dtype.name.lower()})" in admitted[schema.outputs[0].type_str]


def put(node: onnx.NodeProto, function: Function, opset: int) -> None:
    """Writes a standard node as the operator of `onnxpar` that stands for it. It is changed.

    Attributes that it leaves out and that have a default are filled in; results that it leaves out
    have no name, since onnxruntime infers a type for each that a function has.
    """
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    given = {a.name for a in node.attribute}
    known = function.attributes
    node.output.extend([""] * (len(function.outputs) - len(node.output)))
    for name in known:
        default = schema.attributes[name].default_value
        if name not in given and default.name:
            node.attribute.append(default)
    kept = [a for a in node.attribute if a.name in known]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.domain = DOMAIN

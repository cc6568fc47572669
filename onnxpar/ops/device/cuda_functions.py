"""Standard operators that onnxruntime's CUDA provider lacks, as operators of the domain `onnxpar`.

Each is a function (see `onnxpar.ops.onnxpar_functions`) of the name of the operator that it stands
for. It says nothing but that operator, so that on the CPU that provider's kernel runs; for GPUs the
runtime's library has one.
"""

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from onnxpar.ops.onnxpar_functions import Function

_FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
)
_POOL = {
    "auto_pad": "string",
    "ceil_mode": "int",
    "dilations": "ints",
    "kernel_shape": "ints",
    "pads": "ints",
    "strides": "ints",
}
_MOST_SPACE = 3
"""Spatial dims of a pool that the library's kernel takes."""


def _itself(name: str, outputs: tuple[str, ...] = ("y",), **attributes: str) -> Function:
    """The function that is the operator of its name; of attributes, name and ONNX's word for it."""
    given = ", ".join(f"{key}: {kind} = @{key}" for key, kind in attributes.items())
    body = f"{', '.join(outputs)} = {name}{f'<{given}>' if given else ''}(x)"
    return Function(name, ("x",), outputs, body, tuple(attributes))


STANDARD: Mapping[str, Function] = {
    function.name: function
    for function in (
        *map(_itself, ("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh", "Tan")),
        _itself("Celu", alpha="float"),
        _itself("Elu", alpha="float"),
        _itself("Selu", alpha="float", gamma="float"),
        _itself("ThresholdedRelu", alpha="float"),
        _itself("MaxPool", ("y", "indices"), **_POOL),
    )
}
"""The functions by the operators that they stand for."""


def stands_for(node: ir.Node) -> bool:
    """Whether a standard node may be written as the operator of that name in `onnxpar`."""
    if node.op_type not in STANDARD or node.domain not in ("", "ai.onnx"):
        return False
    x = node.inputs[0]
    if x is None or x.dtype not in _FLOATS:
        return False
    space = len(node.attributes.get_ints("kernel_shape", ()))
    return space <= _MOST_SPACE and not node.attributes.get_int("storage_order", 0)


def stands_for_in(op_type: str, opset: int, dtype: ir.DataType) -> bool:
    """Whether a standard operator exists in a type, and may be written as said."""
    if op_type not in STANDARD or dtype not in _FLOATS:
        return False
    schema = onnx.defs.get_schema(op_type, opset, "")
    admitted = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    return f"tensor({dtype.name.lower()})" in admitted[schema.outputs[0].type_str]


def put(node: onnx.NodeProto, opset: int, domain: str) -> None:
    """Writes a standard node as the operator of that name in another domain. It is changed.

    Attributes that it leaves out and that have a default are filled in; results that it leaves out
    have no name, since onnxruntime infers a type for each that a function has.
    """
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    given = {a.name for a in node.attribute}
    known = STANDARD[node.op_type].attributes
    node.output.extend([""] * (len(STANDARD[node.op_type].outputs) - len(node.output)))
    for name in known:
        default = schema.attributes[name].default_value
        if name not in given and default.name:
            node.attribute.append(default)
    kept = [a for a in node.attribute if a.name in known]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.domain = domain

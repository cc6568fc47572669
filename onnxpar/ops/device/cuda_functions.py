"""Standard operators that onnxruntime's CUDA provider lacks, as operators of the domain `onnxpar`.

The slot `device_function` of an operator's record holds a function (see `onnxpar.ops.function`)
with the operator's own name, whose body is just that operator. So the CPU runs onnxruntime's own
kernel, and GPUs run that of the runtime's library.
"""

import onnx
import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.body_node import defaults
from onnxpar.ops.function import Function
from onnxpar.ops.operator import OpDef
from onnxpar.ops.registry import Registry

_FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
)
_MOST_SPACE = 3
"""Most spatial dims of a pool that the library's kernel takes."""


def itself(name: str, outputs: tuple[str, ...] = ("y",), **attributes: str) -> Function:
    """Returns the function whose body is the operator of the same name.

    Args:
        name: The operator.
        outputs: Names of its results.
        **attributes: Type of each attribute in ONNX's text form, such as `ints`.
    """
    given = ", ".join(f"{key}: {kind} = @{key}" for key, kind in attributes.items())
    results, called = ", ".join(outputs), f"{name}<{given}>" if given else name
    taken = f" <{', '.join(attributes)}>" if attributes else ""
    return Function(f"{name}{taken} (x) => ({results}) {{ {results} = {called}(x) }}")


def function_for(node: ir.Node, registry: Registry) -> Function | None:
    """Returns the operator of `onnxpar` that may replace a standard node; None if there is none."""
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
    """Whether a standard operator takes a type, and an operator of `onnxpar` may replace it."""
    if definition.device_function is None or dtype not in _FLOATS:
        return False
    schema = onnx.defs.get_schema(definition.op_type, opset, "")
    admitted = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    return f"tensor({dtype.name.lower()})" in admitted[schema.outputs[0].type_str]


def put(node: onnx.NodeProto, function: Function, opset: int) -> None:
    """Turns a standard node into the operator of `onnxpar` that replaces it. It is changed.

    Missing attributes that have a default are filled in. Missing results are added without a name,
    since onnxruntime infers the type of each result of a function.
    """
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    node.output.extend([""] * (len(function.outputs) - len(node.output)))
    node.attribute.extend(defaults(schema, {a.name for a in node.attribute}))
    kept = [a for a in node.attribute if a.name in function.attributes]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.domain = DOMAIN

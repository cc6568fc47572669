"""Which operands and results of a node have 16 bits where the user asks for them.

What an operator is computed in is said in its record (`onnxpar.ops.slots.Precision`).
"""

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxpar.ops.device.cuda_functions import stands_for_in
from onnxpar.ops.device.cuda_kernels import has_kernel_in
from onnxpar.ops.registry import Registry


def half_operands(
    node: ir.Node, opset: int, dtype: ir.DataType, registry: Registry
) -> tuple[frozenset[int], frozenset[int], bool] | None:
    """Returns which operands and results of a node may have 16 bits, and whether they must.

    Where ONNX, or both onnxruntime's CUDA provider and the runtime's library, do not have the
    operator in this type, it keeps float32: a node that falls back to the CPU would cost more than
    the 16 bits save.

    Args:
        node: A node.
        opset: Version of the default domain.
        dtype: float16 or bfloat16.
        registry: The table of operators.

    Returns:
        Indices of inputs, indices of outputs, and True where the operator is computed in 16 bits,
        False where it follows its operands; None where it keeps float32.
    """
    if node.domain not in ("", "ai.onnx") or any(_is_graph(a) for a in node.attributes.values()):
        return None
    definition = registry.of(node)
    if definition is None or not (definition.precision.half or definition.precision.follows):
        return None
    half = definition.precision.half
    if not definition.precision.written_out and not (
        has_kernel_in(node.op_type, opset, dtype) or stands_for_in(definition, opset, dtype)
    ):
        return None
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    kinds = half or _first_tensor_type(schema)
    inputs = _types(schema.inputs, len(node.inputs))
    outputs = _types(schema.outputs, len(node.outputs))
    return (
        frozenset(i for i, kind in enumerate(inputs) if kind in kinds),
        frozenset(i for i, kind in enumerate(outputs) if kind in kinds),
        bool(half),
    )


def _is_graph(attribute: ir.Attr) -> bool:
    return attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _first_tensor_type(schema: onnx.defs.OpSchema) -> frozenset[str]:
    """The type variable of the data: the first result's, as of Where, whose first input is bool."""
    return frozenset({schema.outputs[0].type_str})


def _types(parameters: "Sequence[onnx.defs.OpSchema.FormalParameter]", count: int) -> list[str]:
    """The type variable of each operand; the last formal one stands for all further ones."""
    return [parameters[min(i, len(parameters) - 1)].type_str for i in range(count)]

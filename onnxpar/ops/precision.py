"""Which operands and results of a node have 16 bits in mixed precision.

The record of its operator says so (`onnxpar.ops.slots.Precision`).
"""

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxpar.graph.body_captures import bodies_of
from onnxpar.ops.device.cuda_functions import stands_for_in
from onnxpar.ops.device.cuda_kernels import has_kernel_in
from onnxpar.ops.registry import Registry


def half_operands(
    node: ir.Node, opset: int, dtype: ir.DataType, registry: Registry
) -> tuple[frozenset[int], frozenset[int], bool] | None:
    """Returns which operands and results of a node may have 16 bits, and whether they must.

    An operator keeps float32 if ONNX does not define it in this type, or if neither onnxruntime's
    CUDA provider nor the runtime's library has a kernel: falling back to the CPU would cost more
    than 16 bits save.

    Args:
        node: A node.
        opset: Version of the default domain.
        dtype: float16 or bfloat16.
        registry: The table of operators.

    Returns:
        Indices of inputs, indices of outputs, and whether the operator is computed in 16 bits
        (True) or has the type of its operands (False). None if it keeps float32.
    """
    if node.domain or bodies_of(node):
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


def _first_tensor_type(schema: onnx.defs.OpSchema) -> frozenset[str]:
    """The type variable of the data: the first result's, since Where's first input is bool."""
    return frozenset({schema.outputs[0].type_str})


def _types(parameters: "Sequence[onnx.defs.OpSchema.FormalParameter]", count: int) -> list[str]:
    """The type variable of each operand; the last parameter repeats."""
    return [parameters[min(i, len(parameters) - 1)].type_str for i in range(count)]

"""Which operators are computed in 16 bits where the user asks for it, and which keep float32.

The classes are those of mixed precision training (Micikevicius et al., 2018) as `torch.autocast`
sorts operators: products of matrices, which hold nearly all of the work, go in 16 bits; what sums,
exponentiates or divides many terms stays in float32; what moves elements or combines a few takes
the type of its operands. Operators that are not known here keep float32.
"""

from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from onnxpar.ops.device.cuda_functions import stands_for_in
from onnxpar.ops.device.cuda_kernels import has_kernel_in

HALF: Mapping[str, frozenset[str]] = {
    **{op: frozenset({"T"}) for op in ("Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul")},
    "Attention": frozenset({"T1", "T2"}),
}
"""Operators of the default domain computed in 16 bits: type variables of their operands."""

# fmt: off
FOLLOWING = frozenset({
    "Abs", "Add", "AveragePool", "Celu", "Clip", "Concat", "DepthToSpace", "Div", "Dropout",
    "Elu", "Erf", "Expand", "Flatten", "Gather", "Gelu", "GlobalAveragePool", "GlobalMaxPool",
    "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Max", "MaxPool", "Min", "Mish", "Mul",
    "Neg", "Pad", "PRelu", "Relu", "Reshape", "Selu", "Sigmoid", "Slice", "SpaceToDepth",
    "Split", "Squeeze", "Sub", "Swish", "Tanh", "Tile", "Transpose", "Unsqueeze", "Where",
})
# fmt: on
"""Operators of the default domain that take the type of what they are given."""
WRITTEN_OUT = frozenset({"Dropout"})
"""Those of them that no rank's graph has: what is written for them has kernels in all types."""


def half_operands(
    node: ir.Node, opset: int, dtype: ir.DataType
) -> tuple[frozenset[int], frozenset[int], bool] | None:
    """Returns which operands and results of a node may have 16 bits, and whether they must.

    Where ONNX, or both onnxruntime's CUDA provider and the runtime's library, do not have the
    operator in this type, it keeps float32: a node that falls back to the CPU would cost more than
    the 16 bits save.

    Args:
        node: A node.
        opset: Version of the default domain.
        dtype: float16 or bfloat16.

    Returns:
        Indices of inputs, indices of outputs, and True where the operator is one of `HALF`, False
        where it follows its operands; None where it keeps float32.
    """
    if node.domain not in ("", "ai.onnx") or any(_is_graph(a) for a in node.attributes.values()):
        return None
    must = node.op_type in HALF
    if not must and node.op_type not in FOLLOWING:
        return None
    if node.op_type not in WRITTEN_OUT and not (
        has_kernel_in(node.op_type, opset, dtype) or stands_for_in(node.op_type, opset, dtype)
    ):
        return None
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    kinds = HALF[node.op_type] if must else _first_tensor_type(schema)
    inputs = _types(schema.inputs, len(node.inputs))
    outputs = _types(schema.outputs, len(node.outputs))
    return (
        frozenset(i for i, kind in enumerate(inputs) if kind in kinds),
        frozenset(i for i, kind in enumerate(outputs) if kind in kinds),
        must,
    )


def _is_graph(attribute: ir.Attr) -> bool:
    return attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _first_tensor_type(schema: onnx.defs.OpSchema) -> frozenset[str]:
    """The type variable of the data: the first result's, as of Where, whose first input is bool."""
    return frozenset({schema.outputs[0].type_str})


def _types(parameters: "Sequence[onnx.defs.OpSchema.FormalParameter]", count: int) -> list[str]:
    """The type variable of each operand; the last formal one stands for all further ones."""
    return [parameters[min(i, len(parameters) - 1)].type_str for i in range(count)]

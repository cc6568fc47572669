"""Which operands the kernels of a device take in the host's memory: sizes, axes, bounds, counts.

As onnxruntime 1.31's CUDA provider has it, and the runtime's library. What else an operator reads
is on the device. A value that is computed there and read here is copied to the host first, and the
host waits for it.
"""

from collections.abc import Mapping

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN

_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Dropout": (1, 2),
    "Expand": (1,),
    "If": (0,),
    "Loop": (0, 1),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1, 2),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
# Of the runtime's own operators: key and boxes of random numbers, the shape of what arrives.
_OWN: Mapping[str, tuple[int, ...]] = {"Philox": (0, 1, 2, 3), "Recv": (0,)}
_SIZES = ("Shape", "Size")


def host_operands(node: ir.Node) -> tuple[int, ...]:
    """Returns the positions of the operands that a device's kernel takes in host memory."""
    if node.domain == DOMAIN:
        return _OWN.get(node.op_type, ())
    return _OPERANDS.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ()


def gives_to_host(node: ir.Node) -> bool:
    """Tells whether a device's kernel leaves its result in host memory: it reads a shape only."""
    return node.domain in ("", "ai.onnx") and node.op_type in _SIZES

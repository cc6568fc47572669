"""What the slots of `OpDef` hold that are no functions of a rule: memory, roles, random numbers.

They say what the kernels of an operator, or the layers that it is in, are like. None of them
depends on the opset.
"""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

DrawsFn = Callable[[ir.Node], bool]


def never(node: ir.Node) -> bool:
    """No node of the operator does so."""
    return False


def always(node: ir.Node) -> bool:
    """Every node of the operator does so."""
    return True


@dataclass(frozen=True)
class HostMemory:
    """What the kernels of a device take from the host's memory, and leave there.

    As onnxruntime 1.31's CUDA provider has it, and the runtime's library. A value that is computed
    on the device and read here is copied to the host first, and the host waits for it.

    Attributes:
        reads: Positions of the operands that are read there: sizes, axes, bounds, counts.
        writes: Whether the results are left there: the operator reads a shape only.
    """

    reads: tuple[int, ...] = ()
    writes: bool = False


ON_DEVICE = HostMemory()

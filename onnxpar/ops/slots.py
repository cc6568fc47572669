"""Types of the slots of `OpDef` about an operator's kernels and its use in layers.

Their values do not depend on the opset.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.graph.patterns import Pattern
from onnxpar.graph.shapes import ShapeEnv

PatternFn = Callable[[ir.Node, ShapeEnv, Pattern], Pattern]
DrawsFn = Callable[[ir.Node], bool]
LibraryFn = Callable[[ShapeInferenceContext, ir.Node], None]


@dataclass(frozen=True)
class Library:
    """The functions of `onnx-shape-inference` that a correction of it may call.

    Attributes:
        infer: The library's function of the operator; it does nothing if the library has none.
        infer_body: Infers the shapes of a body, like the library's engine.
    """

    infer: LibraryFn
    infer_body: Callable[..., object]


InferFn = Callable[[Library, ShapeInferenceContext, ir.Node], None]


def never(node: ir.Node) -> bool:
    """No node draws random numbers."""
    return False


def always(node: ir.Node) -> bool:
    """Every node draws random numbers."""
    return True


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Roles:
    """The roles of an operator's operands in a layer, in graphs that exporters write.

    By default no operand has a role, as in most operators.

    Attributes:
        weights: Operands that are the layer's weight.
        indexed_by: The operand with indices. If these are an input of the model, `weights` is the
            table in which they are looked up; otherwise it is no weight. None: no such operand.
        vectors: Operands that are its scale or bias.
        row_vectors: Operands that are its scale or bias if they are vectors. In a layer that is
            exported as Mul and Add, the scale or bias may be either operand.
        statistics: Operands that are running means and variances, which no gradient changes.
        product: Whether it is the product of a layer whose bias a later node may add.
        bias_size: Returns the size of its bias, given the sizes of its weight. None if it takes no
            bias; else `vectors` has its position.
        expresses: The layer that exporters express by it with a constant scale and bias, and nodes
            behind it; "" if there is none.
        adds: Whether it adds its operands, so that a vector among them is a bias.
        rearranges: Whether its result has the elements of its first operand in another order or
            shape, so that a weight behind it is still a weight.
    """

    weights: tuple[int, ...] = ()
    indexed_by: int | None = None
    vectors: tuple[int, ...] = ()
    row_vectors: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    product: bool = False
    bias_size: Callable[[ir.Node, Sequence[int]], int] | None = None
    expresses: str = ""
    adds: bool = False
    rearranges: bool = False


NO_ROLES = Roles()
REARRANGES = Roles(rearranges=True)


@dataclass(frozen=True)
class KernelCall:
    """The call of a node's kernel.

    Attributes:
        inputs: Shape of each operand; None if it is absent or unknown.
        outputs: Shape of each result.
        itemsize: Bytes of an element of the first result.
        attributes: Its attributes by name.
        after_bias: Whether its first operand is the sum with a vector that no other node reads.
    """

    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape | None, ...]
    itemsize: int
    attributes: Mapping[str, Any]
    after_bias: bool

    def bytes(self, shape: Shape | None) -> int:
        """Bytes of a tensor of this shape with elements of the first result's size."""
        return 0 if shape is None else prod(shape) * self.itemsize


WorkspaceFn = Callable[[KernelCall], int]


def no_workspace(call: KernelCall) -> int:
    """The kernel needs no memory besides its operands and results."""
    return 0


@dataclass(frozen=True)
class Kernel:
    """How a kernel uses memory.

    Each entry is measured with onnxruntime's CPU provider and the runtime's own library
    (tests/exec/test_kernel_memory.py). By default a kernel writes each result to memory of its own
    and needs no more: most do. Convolutions also need 64 KiB for each thread, and collectives the
    buffers of their transport; neither grows with the tensors.

    Attributes:
        view: Whether its first result is its first operand in another shape, without a copy.
        over: Pairs `(operand, result)`: the result takes the operand's memory if nothing reads the
            operand later and both have the same size.
        appends: Pairs `(operand, result)`: the result is the operand with new elements behind
            those in use. If both are one buffer that is long enough, only these are written.
        work: Returns the bytes that it needs while it runs.
        form: Whether this describes the nodes of a local form, not a kernel, since the operator
            occurs only in the undivided program.
    """

    view: bool = False
    over: tuple[tuple[int, int], ...] = ()
    appends: tuple[tuple[int, int], ...] = ()
    work: WorkspaceFn = no_workspace
    form: bool = False


PLAIN = Kernel()
VIEW = Kernel(view=True)
IN_PLACE = Kernel(over=((0, 0),))


@dataclass(frozen=True)
class Precision:
    """Whether mixed precision computes an operator in 16 bits.

    There are three classes of operators, as in mixed precision training (Micikevicius et al., 2018)
    and `torch.autocast`. Matrix products, which are nearly all of the work, run in 16 bits.
    Operators that sum, exponentiate or divide many terms stay in float32, the default. Operators
    that move elements or combine a few take the type of their operands.

    Attributes:
        half: Type variables, in ONNX's schema, of the operands that become 16 bits.
        follows: Whether it takes the type of its operands.
        written_out: Whether rank graphs have other operators in its place, which have kernels
            in all types.
    """

    half: frozenset[str] = frozenset()
    follows: bool = False
    written_out: bool = False


FLOAT32 = Precision()
HALF = Precision(half=frozenset({"T"}))
FOLLOWS = Precision(follows=True)

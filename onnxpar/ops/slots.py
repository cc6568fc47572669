"""What the slots of `OpDef` hold that are no functions of a rule: memory, roles, random numbers.

They say what the kernels of an operator, or the layers that it is in, are like. None of them
depends on the opset.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

DrawsFn = Callable[[ir.Node], bool]
LibraryFn = Callable[[ShapeInferenceContext, ir.Node], None]


@dataclass(frozen=True)
class Library:
    """What `onnx-shape-inference` has, for a function that corrects it.

    Attributes:
        infer: Its own function of the operator; it does nothing where there is none.
        infer_body: Infers the shapes of a body, as its engine does.
    """

    infer: LibraryFn
    infer_body: Callable[..., object]


InferFn = Callable[[Library, ShapeInferenceContext, ir.Node], None]


def never(node: ir.Node) -> bool:
    """No node."""
    return False


def always(node: ir.Node) -> bool:
    """Every node."""
    return True


Shape = tuple[int, ...]


class Folding(Enum):
    """How the results of an operator are computed of constants when a model is read.

    Only what is exact is computed: an exponential or a sine is left to the kernels, whose last bits
    differ from those of any other library.
    """

    MOVE = "elements are moved, of any type"
    CAST = "a cast without doubt"
    SHAPE = "the sizes of a constant"
    EXACT = "IEEE 754 rounds in one way: also of float32 and float64"
    INTEGERS = "of integers and booleans alone"


@dataclass(frozen=True)
class Roles:
    """What the operands of an operator are to a layer, in graphs as exporters write them.

    Attributes:
        weights: Operands that are the layer's weight.
        indexed_by: The operand that indices are in; `weights` are then the table that they are
            looked up in, if the indices are an input of the model.
        vectors: Operands that are its scale or bias.
        row_vectors: Operands that are so where they are vectors: of what is written out, the scale
            or bias stands on either side.
        statistics: Operands that are running means and variances, which no gradient changes.
        product: Whether it is the product of a layer whose bias may be added by a node behind it.
        bias_size: Size of its bias by the sizes of its weight, where it may have one (`vectors`).
        rearranges: Whether its result has the elements of its first operand, in another layout.
    """

    weights: tuple[int, ...] = ()
    indexed_by: int | None = None
    vectors: tuple[int, ...] = ()
    row_vectors: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    product: bool = False
    bias_size: Callable[[ir.Node, Sequence[int]], int] | None = None
    rearranges: bool = False


NO_ROLES = Roles()
REARRANGES = Roles(rearranges=True)


@dataclass(frozen=True)
class KernelCall:
    """A node as its kernel sees it.

    Attributes:
        inputs: Shape of each operand, None where it is absent or unknown.
        outputs: Shape of each result.
        itemsize: Bytes of an element of the first result.
        attributes: Its attributes by name.
        after_bias: Whether its operand is a sum with a row that nobody else reads.
    """

    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape | None, ...]
    itemsize: int
    attributes: Mapping[str, Any]
    after_bias: bool

    def bytes(self, shape: Shape | None) -> int:
        """Bytes of a tensor of that shape with elements of the first result's size."""
        return 0 if shape is None else prod(shape) * self.itemsize


WorkspaceFn = Callable[[KernelCall], int]


def no_workspace(call: KernelCall) -> int:
    """The kernel works in its operands and results."""
    return 0


@dataclass(frozen=True)
class Kernel:
    """What a kernel does with memory.

    That is measured of onnxruntime's CPU provider and of the runtime's own library, entry by entry
    (tests/exec/test_kernel_memory.py). By default it writes each of its results to memory of its
    own and needs no more. Convolutions have 64 KiB for each thread besides, collectives the
    buffers of their transport: neither grows with the tensors.

    Attributes:
        view: Whether its first output is its first operand under another shape.
        over: Pairs `(operand, output)`: the output takes the operand's memory where the operand is
            read there for the last time and both have the same size.
        work: Bytes that it needs while it runs.
        form: Whether it is no kernel: the operator stands in the undivided program only, and this
            is what the nodes of its local form do.
    """

    view: bool = False
    over: tuple[tuple[int, int], ...] = ()
    work: WorkspaceFn = no_workspace
    form: bool = False


PLAIN = Kernel()
VIEW = Kernel(view=True)
IN_PLACE = Kernel(over=((0, 0),))


@dataclass(frozen=True)
class Precision:
    """Whether an operator is computed in 16 bits where the user asks for them.

    The classes are those of mixed precision training (Micikevicius et al., 2018) as
    `torch.autocast` sorts operators: products of matrices, which hold nearly all of the work, go in
    16 bits; what sums, exponentiates or divides many terms stays in float32; what moves elements or
    combines a few takes the type of its operands.

    Attributes:
        half: Type variables, in ONNX's schema, of the operands that are made 16 bits.
        follows: Whether it takes the type of what it is given.
        written_out: Whether no rank's graph has it, and what is written for it has kernels in
            all types.
    """

    half: frozenset[str] = frozenset()
    follows: bool = False
    written_out: bool = False


FLOAT32 = Precision()
HALF = Precision(half=frozenset({"T"}))
FOLLOWS = Precision(follows=True)

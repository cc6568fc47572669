"""The geometry of convolutions and pools: kernel, stride, dilation and padding of each spatial dim.

ONNX operators Conv, ConvTranspose, MaxPool, AveragePool, LpPool; sizes in elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.core.mesh import Atoms
from onnxpar.core.symbols import Dim, SymbolTable
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.window.halo import DimSplit, Sliding, Spreading, window

SAME = ("SAME_UPPER", "SAME_LOWER")


@dataclass(frozen=True)
class Spatial:
    """One spatial dim of a convolution or pool.

    Attributes:
        kernel: Elements of the kernel.
        stride: Step between results; of a transposed convolution, between what operands add to.
        dilation: Step between the elements of the kernel.
        before: Padding before; None where it depends on sizes that are not numbers.
        after: Padding after, likewise.
        size: Global size of the dim of the image that slides (of a transposed convolution: of the
            result).
        results: Global size of the dim of what is made of it (transposed: of the operand).
    """

    kernel: int
    stride: int
    dilation: int
    before: int | None
    after: int | None
    size: Dim
    results: Dim

    @property
    def extent(self) -> int:
        """Elements from the first to the last that one result reads, both included."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def sliding(self) -> Sliding:
        """What a result reads of the image; `before` must be known."""
        assert self.before is not None
        return Sliding(self.stride, self.extent, self.before)

    @property
    def spreading(self) -> Spreading:
        """What an element of the image reads of the results; `before` must be known."""
        assert self.before is not None
        return Spreading(self.stride, self.extent, self.before)


def kernel_of(view: NodeView, weight: int | None) -> tuple[int, ...]:
    """Returns the kernel's sizes, from the weights or the attribute.

    Raises:
        ModelError: A size is not a number.
    """
    given = view.attr("kernel_shape")
    if given is not None:
        return tuple(int(k) for k in given)
    found = () if weight is None else view.shape(weight)[2:]
    if not found or not all(isinstance(k, int) for k in found):
        raise view.fail(f"the kernel's sizes must be known to be sharded, got {list(found)}")
    return tuple(int(k) for k in found)


def conv_dims(view: NodeView) -> tuple[Spatial, ...]:
    """Returns the geometry of each spatial dim of a Conv; see `spatial_dims`."""
    return spatial_dims(view, kernel_of(view, 1), view.shape(0)[2:], view.out_shape()[2:])


def pool_dims(view: NodeView) -> tuple[Spatial, ...]:
    """Returns the geometry of each spatial dim of a pool; see `spatial_dims`."""
    return spatial_dims(view, kernel_of(view, None), view.shape(0)[2:], view.out_shape()[2:])


def spatial_dims(
    view: NodeView, kernel: Sequence[int], image: Sequence[Dim], results: Sequence[Dim]
) -> tuple[Spatial, ...]:
    """Returns the geometry of each spatial dim from a node's attributes.

    Args:
        view: A node with the attributes of Conv or of a pool.
        kernel: The kernel's sizes.
        image: Sizes of the dims that it slides over.
        results: Sizes of the dims that come of it.
    """
    rank = len(kernel)
    strides = view.attr("strides") or [1] * rank
    dilations = view.attr("dilations") or [1] * rank
    pads = view.attr("pads") or [0] * (2 * rank)
    auto = str(view.attr("auto_pad", "NOTSET"))
    found = []
    for d in range(rank):
        before: int | None = int(pads[d])
        after: int | None = int(pads[rank + d])
        stride, dilation = int(strides[d]), int(dilations[d])
        if auto == "VALID":
            before = after = 0
        elif auto in SAME:
            extent = dilation * (kernel[d] - 1) + 1
            total = constant((results[d] - 1) * stride + extent - image[d], view.table)
            before = after = None
            if total is not None:
                total = max(total, 0)
                before = total // 2 if auto == "SAME_UPPER" else total - total // 2
                after = total - before
        found.append(Spatial(kernel[d], stride, dilation, before, after, image[d], results[d]))
    return tuple(found)


def constant(expr: Dim, table: SymbolTable) -> int | None:
    """Returns the number that an expression is proved to be, or None."""
    if isinstance(expr, int):
        return expr
    return table.facts(expr).constant


@dataclass(frozen=True)
class Words:
    """The spatial dims of a rule.

    Attributes:
        image: Factors of the dims that the operator slides over.
        results: Factors of the dims that come of it.
        scaled: Those that may be split although results overlap in what they read.
        whole: Those that must not be, and the kernel's.
        kernel: Factors of the kernel's dims.
    """

    image: str
    results: str
    scaled: tuple[str, ...]
    whole: tuple[str, ...]
    kernel: str

    def clauses(self, *, kernel: bool = True) -> str:
        """The clauses on them, with those on the kernel's dims where the rule has these."""
        whole = " ".join([*self.whole, *(self.kernel.split() if kernel else ())])
        text = f"; scaled: {' '.join(self.scaled)}" if self.scaled else ""
        return text + (f"; replicated: {whole}" if whole else "")


def words(dims: Sequence[Spatial]) -> Words:
    """Returns the spatial dims of a rule.

    Where the padding is unknown before the model runs, all dims are replicated. A dim whose kernel
    has one element has no halo and is parallel, without stride and padding.
    """
    image, results, scaled, whole = [], [], [], []
    known = all(dim.before is not None for dim in dims)
    for name, dim in zip(axis_names(len(dims)), dims, strict=True):
        if not known:
            image.append(f"{name}_in")
            results.append(f"{name}_out")
            whole += [image[-1], results[-1]]
            continue
        image.append(name)
        results.append(name)
        if (dim.kernel, dim.stride, dim.before, dim.after) != (1, 1, 0, 0):
            scaled.append(name)
    kernel = " ".join(f"k_{name}" for name in axis_names(len(dims)))
    return Words(" ".join(image), " ".join(results), tuple(scaled), tuple(whole), kernel)


@dataclass(frozen=True)
class Windowed:
    """A local image on which an operator runs.

    Attributes:
        x: The image, in the split dims with all that the device's results read.
        shape: Its local shape.
        pads: Padding that is left to the operator, as the attribute has it.
    """

    x: ir.Value
    shape: tuple[Dim, ...]
    pads: tuple[int, ...]


def split_dims(node: LocalNode, dims: Sequence[Spatial]) -> dict[int, Atoms]:
    """Returns for each spatial dim that is split the atoms that split it."""
    names = words(dims).scaled
    every = enumerate(axis_names(len(dims)))
    found = {d: node.atoms(name) for d, name in every if name in names}
    return {d: atoms for d, atoms in found.items() if atoms}


def windowed(
    node: LocalNode,
    operand: int,
    dims: Sequence[Spatial],
    fill: float | str = 0,
    *,
    exact: bool = False,
) -> Windowed:
    """Emits the image of an operator that slides over it, halos of the split dims included.

    Args:
        node: The node; its rule names the spatial factors as `axis_names` does.
        operand: Which operand is the image.
        dims: The geometry.
        fill: What the border holds.
        exact: Whether the image may not be longer than needed, by less than a stride.
    """
    x, shape = node.input(operand), list(node.in_shape(operand))
    split = split_dims(node, dims)
    before, after = [], []
    for d, dim in enumerate(dims):
        if d not in split:
            before.append(dim.before or 0)
            after.append(dim.after or 0)
            continue
        part = DimSplit(2 + d, split[d], dim.size, dim.results, dim.sliding)
        slack = 0 if exact else dim.stride - 1
        x, shape = window(node, x, shape, part, fill, slack=slack, zero=node.zero[operand])
        before.append(0)
        after.append(0)
    return Windowed(x, tuple(shape), (*before, *after))

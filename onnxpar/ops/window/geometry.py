"""The geometry of convolutions and pools: kernel, stride, dilation and padding of each spatial dim.

ONNX operators Conv, ConvTranspose, MaxPool, AveragePool, LpPool; sizes in elements.
"""

from collections.abc import Mapping, Sequence
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
        stride: Step between the windows of neighbouring results.
        dilation: Step between the elements of the kernel.
        before: Padding before; None where it depends on symbolic sizes.
        after: Padding after, likewise.
        size: Global size of the image (in a transposed convolution: of the result).
        results: Global size of the results (in a transposed convolution: of the operand).
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
    """Returns the kernel's sizes, from the attribute or the weights.

    Args:
        view: The node.
        weight: The operand of the weights; None if there is none.

    Raises:
        ModelError: A size is symbolic.
    """
    given = view.attr("kernel_shape")
    if given is not None:
        return tuple(int(k) for k in given)
    found = () if weight is None else view.shape(weight)[2:]
    if not found or not all(isinstance(k, int) for k in found):
        raise view.fail(f"sharding needs a kernel of constant sizes, got {list(found)}")
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
        results: Sizes of the dims of its results.
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
            before, after = shared_padding(None if total is None else max(total, 0), auto)
        found.append(Spatial(kernel[d], stride, dilation, before, after, image[d], results[d]))
    return tuple(found)


def shared_padding(total: int | None, auto: str) -> tuple[int | None, int | None]:
    """Returns padding before and after: the smaller half comes first only in SAME_UPPER.

    Args:
        total: Their sum; None if it is unknown.
        auto: The attribute `auto_pad`.
    """
    if total is None:
        return None, None
    before = total // 2 if auto == "SAME_UPPER" else total - total // 2
    return before, total - before


def constant(expr: Dim, table: SymbolTable) -> int | None:
    """Returns the number that an expression is proved to be, or None."""
    if isinstance(expr, int):
        return expr
    return table.facts(expr).constant


@dataclass(frozen=True)
class Words:
    """The spatial dims in the text of a rule.

    Attributes:
        image: Factors of the dims that the operator slides over.
        results: Factors of the dims of its results.
        scaled: Factors that may be sharded although results read the same elements.
        replicated: Factors of these dims that must be replicated.
        kernel: Factors of the kernel's dims.
    """

    image: str
    results: str
    scaled: tuple[str, ...]
    replicated: tuple[str, ...]
    kernel: str

    def clauses(self, *, kernel: bool = True) -> str:
        """The clauses for these factors; `kernel` says whether the rule has the kernel's dims."""
        replicated = " ".join([*self.replicated, *(self.kernel.split() if kernel else ())])
        text = f"; scaled: {' '.join(self.scaled)}" if self.scaled else ""
        return text + (f"; replicated: {replicated}" if replicated else "")


def words(dims: Sequence[Spatial]) -> Words:
    """Returns the spatial dims in the text of a rule.

    If the padding is unknown before the model runs, all dims are replicated. A dim whose kernel has
    one element, with stride 1 and no padding, has no halo and is parallel.
    """
    names = axis_names(len(dims))
    kernel = " ".join(f"k_{name}" for name in names)
    if any(dim.before is None for dim in dims):
        image, results = ([f"{name}_{end}" for name in names] for end in ("in", "out"))
        pairs = zip(image, results, strict=True)
        replicated = tuple(factor for pair in pairs for factor in pair)
        return Words(" ".join(image), " ".join(results), (), replicated, kernel)
    scaled = tuple(
        name
        for name, dim in zip(names, dims, strict=True)
        if (dim.kernel, dim.stride, dim.before, dim.after) != (1, 1, 0, 0)
    )
    return Words(" ".join(names), " ".join(names), scaled, (), kernel)


@dataclass(frozen=True)
class Windowed:
    """A local image on which an operator runs.

    Attributes:
        x: The image; along sharded dims it has all elements that the device's results read.
        shape: Its local shape.
        pads: Padding that is left to the operator, in the form of the attribute.
    """

    x: ir.Value
    shape: tuple[Dim, ...]
    pads: tuple[int, ...]


def split_dims(node: LocalNode, dims: Sequence[Spatial]) -> dict[int, Atoms]:
    """Returns the atoms that shard each sharded spatial dim."""
    names = words(dims).scaled
    every = enumerate(axis_names(len(dims)))
    found = {d: node.atoms(name) for d, name in every if name in names}
    return {d: atoms for d, atoms in found.items() if atoms}


def unsharded_padding(dims: Sequence[Spatial], split: Mapping[int, Atoms]) -> tuple[int, ...]:
    """Returns the attribute `pads` of an operator on windows, which has none along sharded dims.

    Args:
        dims: The geometry.
        split: As `split_dims` returns it.
    """
    before = [0 if d in split else dim.before or 0 for d, dim in enumerate(dims)]
    after = [0 if d in split else dim.after or 0 for d, dim in enumerate(dims)]
    return (*before, *after)


def windowed(
    node: LocalNode,
    operand: int,
    dims: Sequence[Spatial],
    fill: float | str = 0,
    *,
    exact: bool = False,
) -> Windowed:
    """Emits the image that an operator slides over, with the halos of sharded dims.

    Args:
        node: The node; its rule names the spatial factors as `axis_names` does.
        operand: Index of the operand that is the image.
        dims: The geometry.
        fill: The value of the border.
        exact: Whether the image must not be longer than needed, not even by less than a stride.
    """
    x, shape = node.input(operand), list(node.in_shape(operand))
    split = split_dims(node, dims)
    for d, atoms in split.items():
        dim = dims[d]
        part = DimSplit(2 + d, atoms, dim.size, dim.results, dim.sliding)
        slack = 0 if exact else dim.stride - 1
        x, shape = window(node, x, shape, part, fill, slack=slack, zero=node.zero[operand])
    return Windowed(x, tuple(shape), unsharded_padding(dims, split))

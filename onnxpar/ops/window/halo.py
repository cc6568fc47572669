"""Halo exchange: brings together what a device reads of a sharded dim where windows overlap.

Result o of a convolution reads the elements i of a dim with

    stride * o - before <= i < stride * o - before + extent        (`Sliding`)

and result o of a transposed convolution all i with

    o + before - extent < stride * i <= o + before                 (`Spreading`)

where `before` is the padding at the beginning and `extent` is dilation * (kernel - 1) + 1. The same
atoms shard operand and result, each by its own size. So a device's block of results [o0, o0 + l)
reads elements from `first(o0)` on that are not exactly the block that the device holds: neighbours
hold some of them, and some are borders outside the dim. `window` collects them in one local tensor,
which has the same length on all devices. The operator runs on it without padding of its own.

If sizes are numbers, the blocks of all devices are known, and so is the device that holds each
element of each window. For each distance d between holder and reader, the smallest range of places
that covers all needed elements is sliced out and sent d devices along in one Permute; a halo that
is wider than a neighbour's block has several distances. The received pieces and the device's own
block, concatenated, contain all elements of the window. If the window is one run at the same place
on all devices, it is a slice of them; otherwise (uneven blocks) an index table gathers it. A device
that receives nothing gets zeros, which are the border of a convolution. A mask sets any other
border, and is left out where no device needs it.

If symbolic sizes are proved to be even (size = stride * results, both divisible by the devices),
the window begins at the same place on all devices, and its halos are two constants. A halo that is
proved to be no wider than a block comes from the neighbour. For all other symbolic sizes the dim is
gathered, and each device picks its window by computed indices.

An even sharding whose stride is the kernel exchanges nothing and copies nothing.

Domain decomposition of convolutions with halo exchange: Dryden et al., "Improving strong-scaling of
CNN training by exploiting finer-grained parallelism", IPDPS 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import onnx_ir as ir
import sympy
from numpy.typing import NDArray

from onnxpar.core.mesh import Atoms
from onnxpar.core.sharding import Component, Sharding, local_size
from onnxpar.core.symbols import Dim, as_dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.padding_masks import block_start, fill_value, select
from onnxpar.ops.local_helpers import BOOL, iota
from onnxpar.ops.local_node import LocalNode
from onnxpar.resharding.lowering import emit_reshard
from onnxpar.resharding.routes import cheapest_route, moved_bytes
from onnxpar_format.boxes import block

_END = np.iinfo(np.int64).max
Table = NDArray[np.int64]


@dataclass(frozen=True)
class Sliding:
    """The elements that results of a convolution or a pool read along one dim.

    Attributes:
        stride: Step between the windows of neighbouring results.
        extent: Elements from the first to the last that one result reads, both included.
        before: Padding before the first element.
    """

    stride: int
    extent: int
    before: int

    def first(self, o: int) -> int:
        """First element that result `o` reads; it may be outside the dim."""
        return self.stride * o - self.before

    def last(self, o: int) -> int:
        """Last element that result `o` reads."""
        return self.first(o) + self.extent - 1

    def span(self, count: Dim) -> Dim:
        """Length of the window of `count` results."""
        return (count - 1) * self.stride + self.extent

    def length(self, o: int, count: int) -> int:
        """Length of the window of `count` results from `o` on."""
        return self.last(o + count - 1) - self.first(o) + 1

    def emit_first(self, node: LocalNode, o: ir.Value) -> ir.Value:
        """Emits `first` of an int64 [1]."""
        scaled = node.op("Mul", o, node.builder.const([self.stride]), shape=[1])
        return node.op("Sub", scaled, node.builder.const([self.before]), shape=[1])

    def aligned(self, node: LocalNode, held: Dim, made: Dim) -> bool:
        """Whether blocks of `held` elements and of `made` results are proved to begin together."""
        return node.table.equal(held, made * self.stride)


@dataclass(frozen=True)
class Spreading:
    """The elements that results of a transposed convolution read; attributes as in `Sliding`."""

    stride: int
    extent: int
    before: int

    def first(self, o: int) -> int:
        """First element that result `o` reads; if windows have gaps, perhaps the one before it."""
        return (o + self._shift) // self.stride

    @property
    def _gaps(self) -> bool:
        return self.extent < self.stride

    @property
    def _shift(self) -> int:
        # Rounds up; with gaps it rounds down, as no window may begin after the result.
        return self.before - self.extent + (1 if self._gaps else self.stride)

    def last(self, o: int) -> int:
        """Last element that result `o` reads."""
        return (o + self.before) // self.stride

    def span(self, count: Dim) -> Dim:
        """Length of a window with all elements that `count` results read, wherever it begins."""
        # One more if there are results between the windows of two elements.
        more = 2 if self._gaps else 1
        top = count + self.extent + self.stride - 3
        return (top // self.stride if isinstance(top, int) else _floor(top, self.stride)) + more

    def length(self, o: int, count: int) -> int:
        """Length of the window of `count` results from `o` on."""
        return self.last(o + count - 1) - self.first(o) + (2 if self._gaps else 1)

    def emit_first(self, node: LocalNode, o: ir.Value) -> ir.Value:
        """Emits `first` of an int64 [1]."""
        # Div rounds towards zero, so the numerator is kept positive.
        above = node.builder.const([self._shift + self.extent * self.stride])
        top = node.op("Add", o, above, shape=[1])
        quotient = node.op("Div", top, node.builder.const([self.stride]), shape=[1])
        return node.op("Sub", quotient, node.builder.const([self.extent]), shape=[1])

    def aligned(self, node: LocalNode, held: Dim, made: Dim) -> bool:
        """Whether blocks of `held` elements and of `made` results are proved to begin together."""
        return node.table.equal(made, held * self.stride)

    def skipped(self, o: int) -> int:
        """Results before `o` that the window of the block that begins at `o` makes."""
        return o + self.before - self.stride * self.first(o)


@dataclass(frozen=True)
class Covering:
    """For each element, all that the results read that read it; attributes as in `Sliding`."""

    stride: int
    extent: int
    before: int

    @property
    def _spread(self) -> Spreading:
        return Spreading(self.stride, self.extent, self.before)

    @property
    def _slide(self) -> Sliding:
        return Sliding(self.stride, self.extent, self.before)

    def first(self, o: int) -> int:
        """First element read by the results that read element `o`, or one before it."""
        return self._slide.first(self._spread.first(o))

    def last(self, o: int) -> int:
        """Last element read by the results that read element `o`."""
        return self._slide.last(self._spread.last(o))

    def span(self, count: Dim) -> Dim:
        """Length of the window of `count` elements."""
        return self._slide.span(self._spread.span(count))

    def length(self, o: int, count: int) -> int:
        """Length of the window of `count` elements from `o` on."""
        return self._slide.length(0, self._spread.length(o, count))

    def emit_first(self, node: LocalNode, o: ir.Value) -> ir.Value:
        """Emits `first` of an int64 [1]."""
        return self._slide.emit_first(node, self._spread.emit_first(node, o))

    def aligned(self, node: LocalNode, held: Dim, made: Dim) -> bool:
        """Whether blocks of `held` elements are proved to begin where a result's window does."""
        return node.table.equal(held, made) and node.table.divisible(held, self.stride)

    def skipped(self, o: int) -> int:
        """Elements of the window before `o`."""
        return o - self.first(o)


Reach = Sliding | Spreading | Covering


def _floor(top: sympy.Expr, bottom: int) -> Dim:
    return as_dim(sympy.floor(top / sympy.Integer(bottom)))


@dataclass(frozen=True)
class DimSplit:
    """A sharded dim of an operand, and the results that read it.

    Attributes:
        axis: The dim of the operand.
        atoms: The atoms that shard it, and the results.
        size: Its global size.
        results: Global number of results along it.
        reach: The elements that each result reads.
    """

    axis: int
    atoms: Atoms
    size: Dim
    results: Dim
    reach: Reach

    def own(self, node: LocalNode) -> Dim:
        """Local number of results."""
        return local_size(Component(self.results, self.atoms), node.mesh, node.table)

    def start(self, node: LocalNode) -> ir.Value:
        """The first of this device's results, int64 [1]."""
        return block_start(node.builder, Component(self.results, self.atoms))


def window(
    node: LocalNode,
    x: ir.Value,
    shape: Sequence[Dim],
    split: DimSplit,
    fill: float | str = 0,
    *,
    slack: int = 0,
    zero: bool = False,
    strict: bool = False,
) -> tuple[ir.Value, list[Dim]]:
    """Emits the elements that the device's results read along one dim.

    Elements that only padding reads may have any value that `x` has, its padding included.

    Args:
        node: The node.
        x: Local operand.
        shape: Its local shape.
        split: How the dim is sharded.
        fill: The value of elements outside the dim; see `onnxpar.graph.padding_masks.fill_value`.
        slack: How many elements more than needed the window may have, if that saves a copy.
        zero: Whether the padding of `x` is known to be zero.
        strict: Whether elements that only padding reads have the value `fill`, too.

    Returns:
        The window, and its shape.
    """
    if isinstance(split.size, int) and isinstance(split.results, int):
        known = _Known(node, split, split.size, split.results, strict)
        found = known.emit(x, shape, fill, slack, zero)
    else:
        ends = _even_halos(node, split)
        found = (
            _gathered(node, x, shape, split, fill)
            if ends is None
            else _neighbours(node, x, shape, split, ends, fill, slack)
        )
    value, length = found
    return value, [*shape[: split.axis], length, *shape[split.axis + 1 :]]


def by_place(node: LocalNode, atoms: Atoms, table: Table) -> ir.Value:
    """Returns this device's row of a table that has a row for each of the atoms' devices."""
    constant = node.builder.const(np.ascontiguousarray(table))
    shape = [1, *table.shape[1:]]
    return node.op(
        "Gather", constant, node.builder.position(atoms), dtype=INT64, shape=shape, axis=0
    )


def places(node: LocalNode, atoms: Atoms, size: int) -> list[tuple[int, int, int]]:
    """Returns the block of each of the atoms' devices: start, valid elements, length."""
    parts = [node.mesh.atoms[a] for a in atoms]
    blocks = [block(size, parts, at) for at in product(*(range(n) for n in parts))]
    return [(b.start, b.valid, b.local) for b in blocks]


def _sliced(
    node: LocalNode, x: ir.Value, shape: Sequence[Dim], axis: int, start: int, end: int, size: Dim
) -> ir.Value:
    bounds = (node.builder.const([n]) for n in (start, end, axis))
    return node.op("Slice", x, *bounds, shape=[*shape[:axis], size, *shape[axis + 1 :]])


def _sent(
    node: LocalNode,
    x: ir.Value,
    shape: Sequence[Dim],
    atoms: Atoms,
    pairs: Sequence[tuple[int, int]],
) -> ir.Value:
    """Emits the Permute of a piece; a device that receives nothing gets zeros."""
    total = (int(x.dtype.itemsize) if x.dtype is not None else 1) * prod(shape)
    return node.builder.collective(
        "Permute",
        x,
        atoms,
        shape=shape,
        moved=moved_bytes("permute", total, node.mesh.count(atoms)),
        value=x.name or "",
        reason=f"{node.name} ({node.op_type}: halo)",
        pairs=pairs,
    )


def _joined(
    node: LocalNode, pieces: Sequence[ir.Value], shape: Sequence[Dim], axis: int, length: Dim
) -> ir.Value:
    if len(pieces) == 1:
        return pieces[0]
    joined = [*shape[:axis], length, *shape[axis + 1 :]]
    return node.builder.ops("Concat", pieces, [(pieces[0].dtype, joined)], {"axis": axis})[0]


class _Known:
    """The window, if sizes are numbers.

    A *place* is the number of a device along the sharded dim. `take[p, j]` says whether the device
    at place p needs element j of its window and this element is inside the dim.
    """

    def __init__(
        self, node: LocalNode, split: DimSplit, size: int, results: int, strict: bool
    ) -> None:
        self.node, self.split = node, split
        self.held = places(node, split.atoms, size)
        made = places(node, split.atoms, results)
        count = len(self.held)
        self.length = max(split.reach.length(start, own) for start, _, own in made)
        # The place that holds each element, and the element's index there.
        holder, offset = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for place, (start, valid, _) in enumerate(self.held):
            holder[start : start + valid] = place
            offset[start : start + valid] = np.arange(valid)
        self.distance = np.zeros((count, self.length), np.int64)
        self.at = np.zeros((count, self.length), np.int64)
        self.take = np.zeros((count, self.length), bool)
        self.border = np.zeros((count, self.length), bool)
        for place, (start, valid, _) in enumerate(made):
            if not valid:
                continue
            index = split.reach.first(start) + np.arange(self.length)
            needed = index <= split.reach.last(start + valid - 1)
            inside = (index >= 0) & (index < size)
            self.take[place] = needed & inside
            self.border[place] = needed & ~inside
            known = np.where(inside, index, 0)
            self.distance[place] = holder[known] - place
            self.at[place] = offset[known]
        if strict:
            self.border = ~self.take

    def emit(
        self, x: ir.Value, shape: Sequence[Dim], fill: float | str, slack: int, zero: bool
    ) -> tuple[ir.Value, Dim]:
        node, axis, atoms = self.node, self.split.axis, self.split.atoms
        own = self.held[0][2]
        pieces: list[ir.Value] = []
        # The index of each window's elements in the joined pieces, and which elements of the joined
        # pieces are zeros.
        column = np.zeros_like(self.at)
        zeros: list[NDArray[np.bool_]] = []
        total = 0
        for distance in sorted({0, *(int(d) for d in np.unique(self.distance[self.take]))}):
            here = self.take & (self.distance == distance)
            low, high = 0, own
            empty = np.zeros(len(self.held), bool)
            piece = x
            if distance:
                low, high = int(self.at[here].min()), int(self.at[here].max()) + 1
                if (low, high) != (0, own):
                    piece = _sliced(node, x, shape, axis, low, high, high - low)
                readers = [int(p) for p in np.flatnonzero(here.any(axis=1))]
                local = [*shape[:axis], high - low, *shape[axis + 1 :]]
                pairs = [(p + distance, p) for p in readers]
                piece = _sent(node, piece, local, atoms, pairs)
                empty = ~here.any(axis=1)
            pieces.append(piece)
            column[here] = (self.at - low + total)[here]
            zeros.append(np.repeat(empty[:, None], high - low, axis=1))
            if zero:
                valid = [v for _, v, _ in self.held]
                for place in range(len(self.held)):
                    source = place + distance
                    kept = valid[source] if 0 <= source < len(valid) else 0
                    zeros[-1][place] |= np.arange(low, high) >= kept
            total += high - low
        joined = _joined(node, pieces, shape, axis, total)
        shifts = np.unique((column - np.arange(self.length))[self.take])
        if len(shifts) == 1 and shifts[0] >= 0 and shifts[0] + self.length <= total:
            start = int(shifts[0])
            value, length = joined, total
            if start or total - self.length > slack:
                length = self.length
                value = _sliced(node, joined, shape, axis, start, start + length, length)
            clean = np.concatenate(zeros, axis=1)[:, start : start + self.length]
        else:
            index = by_place(node, atoms, np.where(self.take, column, 0))
            index = node.builder.reshape(index, [self.length])
            length = self.length
            local = [*shape[:axis], length, *shape[axis + 1 :]]
            value = node.op("Gather", joined, index, dtype=x.dtype, shape=local, axis=axis)
            clean = np.zeros_like(self.take)
        wrong = self.border & ~clean if fill == 0 else self.border
        if wrong.any():
            value, length = self._bordered(value, shape, fill, int(length))
        return value, length

    def _bordered(
        self, x: ir.Value, shape: Sequence[Dim], fill: float | str, length: int
    ) -> tuple[ir.Value, Dim]:
        node, axis = self.node, self.split.axis
        table = np.ones((len(self.held), length), np.int64)
        table[:, : self.length] = ~self.border
        kept = by_place(node, self.split.atoms, table)
        kept = node.op("Cast", kept, dtype=BOOL, shape=[1, length], to=int(BOOL))
        kept = node.builder.reshape(kept, [length, *[1] * (len(shape) - axis - 1)])
        return _selected(node, kept, x, [*shape[:axis], length, *shape[axis + 1 :]], fill), length


def _selected(
    node: LocalNode, kept: ir.Value, x: ir.Value, shape: Sequence[Dim], fill: float | str
) -> ir.Value:
    dtype = x.dtype or ir.DataType.FLOAT
    return select(node.builder, kept, x, fill_value(dtype, fill))


def _even_halos(node: LocalNode, split: DimSplit) -> tuple[int, int] | None:
    """Elements that the window has before and after the device's block; None if they may differ."""
    table, count = node.table, node.mesh.count(split.atoms)
    if not table.divisible(split.size, count) or not table.divisible(split.results, count):
        return None
    held = local_size(Component(split.size, split.atoms), node.mesh, table)
    if not split.reach.aligned(node, held, split.own(node)):
        return None
    before = -split.reach.first(0)
    # The span of all held results is held + span(0), since one is a multiple of the other.
    after = int(split.reach.span(0)) - before
    least = table.bounds(held)[0]
    if least is None or least < max(abs(before), abs(after)):
        return None
    return before, after


def _neighbours(
    node: LocalNode,
    x: ir.Value,
    shape: Sequence[Dim],
    split: DimSplit,
    ends: tuple[int, int],
    fill: float | str,
    slack: int,
) -> tuple[ir.Value, Dim]:
    axis, atoms = split.axis, split.atoms
    count = node.mesh.count(atoms)
    before, after = ends
    length: Dim = shape[axis]
    own = x
    if before < 0 or (after < 0 and (before > 0 or -after > slack)):
        low, high = max(-before, 0), after if after < 0 else _END
        length = length + min(before, 0) + min(after, 0)
        own = _sliced(node, x, shape, axis, low, high, length)
    pieces = [own]
    for side, halo in ((-1, before), (1, after)):
        if halo <= 0:
            continue
        local = [*shape[:axis], halo, *shape[axis + 1 :]]
        start, end = (-halo, _END) if side < 0 else (0, halo)
        piece = _sliced(node, x, shape, axis, start, end, halo)
        pairs = [(p + side, p) for p in range(count) if 0 <= p + side < count]
        piece = _sent(node, piece, local, atoms, pairs)
        if fill != 0:
            outermost = node.builder.const([0 if side < 0 else count - 1])
            edge = node.op("Equal", node.builder.position(atoms), outermost, dtype=BOOL, shape=[1])
            inner = node.op("Not", edge, dtype=BOOL, shape=[1])
            piece = _selected(node, inner, piece, local, fill)
        pieces.insert(0 if side < 0 else len(pieces), piece)
        length = length + halo
    return _joined(node, pieces, shape, axis, length), length


def _gathered(
    node: LocalNode, x: ir.Value, shape: Sequence[Dim], split: DimSplit, fill: float | str
) -> tuple[ir.Value, Dim]:
    axis = split.axis
    dims = [(Component(size),) for size in shape]
    replicated = Sharding(tuple((*dims[:axis], (Component(split.size),), *dims[axis + 1 :])))
    held = Sharding(tuple((*dims[:axis], (Component(split.size, split.atoms),), *dims[axis + 1 :])))
    dtype = x.dtype or ir.DataType.FLOAT
    way = cheapest_route((held,), replicated, node.mesh, node.table, int(dtype.itemsize))
    reason = f"{node.name} ({node.op_type}: halo of unknown size)"
    x = emit_reshard(node.builder, x, way.steps, dtype=dtype, name=x.name or "", reason=reason)
    length = split.reach.span(split.own(node))
    first = split.reach.emit_first(node, split.start(node))
    index = node.op("Add", iota(node, length), first, dtype=INT64, shape=[length])
    zero, size = node.builder.const([0]), node.builder.size(split.size)
    low = node.op("Less", index, zero, dtype=BOOL, shape=[length])
    high = node.op("Less", index, size, dtype=BOOL, shape=[length])
    inside = node.op("And", node.op("Not", low, shape=[length]), high, shape=[length])
    index = node.op("Where", inside, index, zero, dtype=INT64, shape=[length])
    local = [*shape[:axis], length, *shape[axis + 1 :]]
    value = node.op("Gather", x, index, dtype=dtype, shape=local, axis=axis)
    kept = node.builder.reshape(inside, [length, *[1] * (len(shape) - axis - 1)])
    return _selected(node, kept, value, local, fill), length


def skipped(node: LocalNode, split: DimSplit) -> int | ir.Value:
    """Returns how many results a window gives before the device's own block.

    Args:
        node: The node.
        split: How the dim is sharded; its reach is `Spreading` or `Covering`.

    Returns:
        A number if it is the same on all devices, else an int64 [1].
    """
    reach = split.reach
    assert not isinstance(reach, Sliding)
    if isinstance(split.size, int) and isinstance(split.results, int):
        blocks = places(node, split.atoms, split.results)
        table = np.array([reach.skipped(start) for start, _, _ in blocks], np.int64)
        held = table[[valid > 0 for _, valid, _ in blocks]]
        return int(held[0]) if len(np.unique(held)) == 1 else by_place(node, split.atoms, table)
    if _even_halos(node, split) is not None:
        return reach.skipped(0)
    start = split.start(node)
    begin = reach.emit_first(node, start)
    if isinstance(reach, Spreading):
        begin = node.op("Mul", begin, node.builder.const([reach.stride]), shape=[1])
        start = node.op("Add", start, node.builder.const([reach.before]), shape=[1])
    return node.op("Sub", start, begin, shape=[1])


def begin(node: LocalNode, split: DimSplit) -> ir.Value:
    """Returns the global index of the first element of the device's window, int64 [1]."""
    return split.reach.emit_first(node, split.start(node))

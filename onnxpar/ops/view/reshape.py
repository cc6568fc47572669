"""Views: the elements stay in row-major order, only the dims are split or merged differently.

Every rule here follows from the row-major order alone: where the products of the leading sizes of
both shapes are equal, a factor ends in both shapes, and a dim that the other shape splits in two is
a merged dim of two factors, `(b h)`.
"""

from collections.abc import Sequence
from functools import partial
from math import gcd

import numpy as np
import onnx_ir as ir
import sympy

from onnxpar.core.errors import NodeError, SymbolError
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim, SymbolTable
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.fallback import readable, require_readable
from onnxpar.ops.folding import MOVE
from onnxpar.ops.local_helpers import normal_axes
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import view_only
from onnxpar.ops.old_node import operands
from onnxpar.ops.operator import OpDef
from onnxpar.ops.parts import PartForm, Shapes, same_node
from onnxpar.ops.sequence.known_values import KnownValues
from onnxpar.ops.sizes.computed_sizes import same_elements, transposed
from onnxpar.ops.slots import FOLLOWS, REARRANGES, VIEW
from onnxpar.ops.view.inference import infer_reshape
from onnxpar.ops.view.reshape_gradient import (
    identity_gradient,
    reshape_gradient,
    transpose_gradient,
)


class _Matcher:
    """Walks two shapes of the same elements from the front and names their common factors."""

    def __init__(self, table: SymbolTable) -> None:
        self.table = table
        self.sizes: dict[str, Dim] = {}
        self.replicated: list[str] = []

    def factor(self, size: Dim, *, replicated: bool = False) -> str:
        name = f"f{len(self.sizes)}"
        self.sizes[name] = size
        if replicated:
            self.replicated.append(name)
        return name

    def match(
        self, left: Sequence[Dim], right: Sequence[Dim]
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Returns the factor names of each dim of both shapes."""
        names: tuple[list[list[str]], list[list[str]]] = ([[] for _ in left], [[] for _ in right])
        shapes = (left, right)
        ends = (len(left), len(right))
        at = [0, 0]
        rest: list[Dim] = [1, 1]
        while True:
            for side in (0, 1):
                while rest[side] == 1 and at[side] < ends[side]:
                    rest[side] = shapes[side][at[side]]
                    at[side] += 1
            if rest == [1, 1]:
                return names
            here = tuple(names[side][at[side] - 1] for side in (0, 1))
            common = self._common(rest[0], rest[1])
            if common is not None:
                name = self.factor(common)
                for side in (0, 1):
                    here[side].append(name)
                    quotient = self.table.exact_div(rest[side], common)
                    # Equal sizes that are written differently may have no known quotient.
                    rest[side] = 1 if quotient is None else quotient
                continue
            # No common leading factor is left: replicated up to where both shapes meet again.
            until = self._ends(shapes, at)
            group: list[Dim] = [1, 1]
            for side in (0, 1):
                if rest[side] != 1:
                    here[side].append(self.factor(rest[side], replicated=True))
                group[side], rest[side] = rest[side], 1
            while at != list(until) and not self.table.equal(group[0], group[1]):
                side = self._behind(group, at, until)
                size = shapes[side][at[side]]
                if size != 1:
                    names[side][at[side]].append(self.factor(size, replicated=True))
                at[side] += 1
                group[side] = group[side] * size

    def _ends(
        self, shapes: tuple[Sequence[Dim], Sequence[Dim]], at: Sequence[int]
    ) -> tuple[int, int]:
        """The positions from which on both shapes have the same dims, of those not yet matched.

        The dims before them have as many elements in both shapes, even where that cannot be proved:
        a size `n` equals the sizes `n//2` and 2 together in every Reshape that runs.
        """
        left, right = len(shapes[0]), len(shapes[1])
        while left > at[0] and right > at[1]:
            if not self.table.equal(shapes[0][left - 1], shapes[1][right - 1]):
                break
            left, right = left - 1, right - 1
        return left, right

    def _common(self, a: Dim, b: Dim) -> Dim | None:
        """The greatest common leading factor that can be proved; None where it is 1."""
        if self.table.equal(a, b):
            return a
        if isinstance(a, int) and isinstance(b, int):
            found: Dim = gcd(a, b)
        elif self.table.exact_div(a, b) is not None:
            found = b
        elif self.table.exact_div(b, a) is not None:
            found = a
        else:
            found = _symbolic_gcd(a, b)
            if any(self.table.exact_div(x, found) is None for x in (a, b)):
                return None
        return None if found == 1 else found

    def _behind(self, group: list[Dim], at: list[int], ends: tuple[int, int]) -> int:
        if at[0] == ends[0]:
            return 1
        if at[1] == ends[1] or self.table.exact_div(group[1], group[0]) is not None:
            return 0
        if self.table.exact_div(group[0], group[1]) is not None:
            return 1
        return 0 if self.table.typical(group[0]) <= self.table.typical(group[1]) else 1


def _symbolic_gcd(a: Dim, b: Dim) -> Dim:
    left, right = sympy.sympify(a), sympy.sympify(b)
    symbols = left.free_symbols | right.free_symbols
    if not symbols or not (left.is_polynomial(*symbols) and right.is_polynomial(*symbols)):
        return 1
    found = sympy.gcd(left, right)
    return int(found) if found.is_Integer else found


def further(view: NodeView, first: int = 1) -> str:
    """Returns the text of operands `first` and on, replicated: ", ., -"."""
    return "".join(", ." if view.has(i) else ", -" for i in range(first, view.arity))


def reshape_rule(view: NodeView) -> OpRule:
    """Reshape: the rule follows from the known shapes; the target operand is not read.

    Raises:
        ModelError: The tensor is empty, or two sizes of the output depend on data.
    """
    right = view.out_shape()
    if 0 in right:
        raise view.fail("its result has no elements")
    if sum(not readable(view, (size,)) for size in right) > 1:
        require_readable(view, "the shape of the output", right)
    matcher = _Matcher(view.table)
    names = matcher.match(view.shape(0), right)
    texts = [" ".join(f"({' '.join(n)})" if n else "1" for n in side) for side in names]
    text = f"{texts[0]}{further(view)} -> {texts[1]}; linear: any 0"
    if matcher.replicated:
        text += f"; replicated: {' '.join(matcher.replicated)}"
    return parse_rule(text, matcher.sizes)


def reshape_local(node: LocalNode) -> Sequence[ir.Value]:
    """Reshapes to local sizes; a size known only when the model runs is left to Reshape (-1)."""
    if not node.plan.factors:
        return node.copy()
    dims = [size if readable(node.view, (size,)) else -1 for size in node.out_shape()]
    zeros = {"allowzero": None if -1 in dims else 1}
    return node.copy([node.input(0), node.builder.sizes(dims)], zeros)


def reshape_part(view: NodeView, operands: Shapes, result: Sequence[Dim]) -> PartForm | None:
    """Names a part's sizes: numbers, sizes of the operand in the same place, and one other."""
    first = operands[0]
    kept = [i < len(first) and view.table.equal(first[i], size) for i, size in enumerate(result)]
    numbers = [
        size if isinstance(size, int) else 0 if same else -1
        for size, same in zip(result, kept, strict=True)
    ]
    if numbers.count(-1) > 1 or 0 in result:
        return None
    return PartForm({"allowzero": 0}, {1: np.array(numbers, np.int64)})


def flatten_rule(view: NodeView) -> OpRule:
    """Flatten: two merged dims."""
    shape = view.shape(0)
    axis = view.attr("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    names = axis_names(len(shape))
    halves = " ".join(
        f"({' '.join(half)})" if half else "1" for half in (names[:axis], names[axis:])
    )
    sizes = dict(zip(names, shape, strict=True))
    return parse_rule(f"{' '.join(names)} -> {halves}; linear: any 0", sizes)


def transpose_rule(view: NodeView) -> OpRule:
    """Transpose: the same factors in another order.

    Raises:
        NodeError: `perm` does not have one axis for each dim (inference looks only at its values).
    """
    rank = len(view.shape(0))
    names = axis_names(rank)
    order = view.attr("perm") or list(reversed(range(rank)))
    if len(order) != rank:
        raise view.fail(
            f"'perm': expected {rank} axes, one for each dim, got {list(order)}", NodeError
        )
    result = " ".join(names[i] for i in order)
    return parse_rule(f"{' '.join(names)} -> {result}; linear: any 0")


def unsqueeze_rule(view: NodeView) -> OpRule:
    """Unsqueeze: inserts dims of size 1."""
    rank = len(view.out_shape())
    new = set(normal_axes(view, view.ints(1) or (), rank))
    names = iter(axis_names(rank - len(new)))
    words = ["1" if axis in new else next(names) for axis in range(rank)]
    operand = " ".join(w for w in words if w != "1")
    return parse_rule(f"{operand}{further(view)} -> {' '.join(words)}; linear: any 0")


def squeeze_rule(view: NodeView) -> OpRule:
    """Squeeze: removes dims of size 1; all of them if no axes are given.

    Raises:
        SymbolError: No axes are given and a dim may be 1 when the model runs. The rank of the
            output is then unknown, and so is everything that follows from it.
    """
    shape = view.shape(0)
    axes = view.ints(1)
    if axes is None:
        _refuse_unsure(view, shape)
        gone = {axis for axis, size in enumerate(shape) if size == 1}
    else:
        gone = set(normal_axes(view, axes, len(shape)))
    names = axis_names(len(shape))
    fixed = [names[axis] for axis in sorted(gone) if shape[axis] != 1]
    words = ["1" if axis in gone and shape[axis] == 1 else n for axis, n in enumerate(names)]
    result = " ".join(n for axis, n in enumerate(names) if axis not in gone)
    text = f"{' '.join(words)}{further(view)} -> {result}; linear: any 0"
    return parse_rule(text + (f"; replicated: {' '.join(fixed)}" if fixed else ""))


def squeeze_part(view: NodeView, operands: Shapes, result: Sequence[Dim]) -> PartForm | None:
    """The same node, if axes are given: without axes, a part of one element would lose its dim."""
    return PartForm() if view.has(1) else None


def _refuse_unsure(view: NodeView, shape: Sequence[Dim]) -> None:
    for axis, size in enumerate(shape):
        if isinstance(size, int):
            continue
        low, _ = view.table.bounds(size)
        if low is None or low < 2:
            raise SymbolError(
                f"node {view.name!r} (Squeeze): without axes, dim {axis} ({size}) is removed if "
                f"it is 1: expected a size proved to be 2 or more (a symbol with min: 2) or axes, "
                f"got one that may be {low}"
            )


def squeeze_local(node: LocalNode) -> Sequence[ir.Value]:
    """Names the axes where none are given: a sharded dim of local size 1 must not be removed."""
    if not node.plan.factors or node.view.has(1):
        return node.copy()
    gone = [axis for axis, size in enumerate(node.view.shape(0)) if size == 1]
    return node.copy([node.input(0), node.builder.const(np.array(gone, np.int64))])


def identity_rule(view: NodeView) -> OpRule:
    """Identity: every dim may be sharded, and every reduction may stay partial."""
    names = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{names} -> {names}; linear: any 0")


_rearranges = partial(OpDef, "", keeps_zero=True, roles=REARRANGES, precision=FOLLOWS, folding=MOVE)
_view = partial(_rearranges, cost=view_only, memory=VIEW, values=same_elements)

DEFS = (
    _view(
        "Reshape",
        5,
        reshape_rule,
        reshape_local,
        gradient=reshape_gradient,
        host_operands=(1,),
        infer=infer_reshape,
        on_part=reshape_part,
    ),
    _view("Flatten", 1, flatten_rule, gradient=reshape_gradient),
    _view(
        "Unsqueeze",
        1,
        unsqueeze_rule,
        upgrades={13: operands(axes=1)},
        gradient=reshape_gradient,
        host_operands=(1,),
        on_part=same_node,
    ),
    _view(
        "Squeeze",
        1,
        squeeze_rule,
        squeeze_local,
        upgrades={13: operands(axes=1)},
        gradient=reshape_gradient,
        host_operands=(1,),
        on_part=squeeze_part,
    ),
    _view(
        "Identity",
        1,
        identity_rule,
        gradient=identity_gradient,
        sequence=KnownValues.same,
        on_part=same_node,
    ),
    _rearranges(
        "Transpose",
        1,
        transpose_rule,
        gradient=transpose_gradient,
        values=transposed,
        on_part=same_node,
    ),
)

"""Operators that make tensors from sizes: Shape, Size, ConstantOfShape, Range.

Shape and Size of a global value are computed from the symbols, since a shard does not show the
global size. The factors of ConstantOfShape and Range are those of the output alone, so each device
makes its shard.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import REPLICATED_OPERAND, Operand, OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.global_builder import SIZES
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.patterns import Pattern
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.fallback import replicated_rule, require_readable
from onnxpar.ops.folding import (
    INTEGERS,
    MOVE,
    Array,
    ComputeFn,
    Folding,
    Operands,
    requested_elements,
)
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.local_helpers import global_index, zero_unless
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import NOT_DIFFERENTIABLE, OpDef
from onnxpar.ops.sizes.computed_sizes import filled, ranged
from onnxpar.ops.sizes.inference import infer_constant_of_shape, infer_range
from onnxpar.ops.slots import IN_PLACE
from onnxpar.ops.view.reshape import further


def _shown(view: NodeView) -> tuple[Dim, ...]:
    shape = view.shape(0)
    return shape[slice(view.attr("start", 0), view.attr("end", None))]


def shape_rule(view: NodeView) -> OpRule:
    """Shape: the operand is not read; its global sizes are computed."""
    require_readable(view, "the sizes of the operand", _shown(view))
    return parse_rule("* -> .")


def shape_local(node: LocalNode) -> Sequence[ir.Value]:
    """The global sizes, computed from the symbols."""
    return (node.builder.sizes(_shown(node.view)),)


def size_rule(view: NodeView) -> OpRule:
    """Size: the operand is not read; its global number of elements is computed."""
    require_readable(view, "the sizes of the operand", view.shape(0))
    return parse_rule("* -> .")


def size_local(node: LocalNode) -> Sequence[ir.Value]:
    """The product of the global sizes, as a scalar."""
    return (node.builder.reshape(node.builder.size(prod(node.view.shape(0))), []),)


def filled_rule(view: NodeView) -> OpRule:
    """ConstantOfShape: every dim may be sharded."""
    shape = view.out_shape()
    require_readable(view, "the shape of the output", shape)
    names = axis_names(len(shape))
    words = ("1" if size == 1 else n for n, size in zip(names, shape, strict=True))
    return parse_rule(f". -> {' '.join(words)}")


def filled_local(node: LocalNode) -> Sequence[ir.Value]:
    """ConstantOfShape of the local shape."""
    if not node.plan.factors:
        return node.copy()
    return node.copy([node.builder.sizes(node.out_shape())])


def range_rule(view: NodeView) -> OpRule:
    """Range: element i is start + i·delta, so every device makes its own shard."""
    require_readable(view, "the number of elements", view.out_shape())
    return parse_rule("., ., . -> n")


def range_local(node: LocalNode) -> Sequence[ir.Value]:
    """Emits start + delta · (global index of each local element)."""
    if not node.plan.factors:
        return node.copy()
    shape = node.out_shape()
    dtype = node.out_dtype()
    index = node.builder.cast(global_index(node, "n"), dtype)
    steps = node.op("Mul", index, node.input(2), dtype=dtype, shape=shape)
    return (node.op("Add", steps, node.input(0), dtype=dtype, shape=shape),)


def constant_rule(view: NodeView) -> OpRule:
    """Constant: replicated (loading turns constants into initializers)."""
    return replicated_rule(view)


def eye_rule(view: NodeView) -> OpRule:
    """EyeLike: rows and columns may be sharded; the operand gives only shape and type."""
    require_readable(view, "the sizes of the operand", view.shape(0))
    return parse_rule("* -> a b")


def eye_local(node: LocalNode) -> Sequence[ir.Value]:
    """Gives 1 where the global column index is the row index + k."""
    rows, columns = node.out_shape()
    dtype = node.out_dtype()
    row = node.builder.reshape(global_index(node, "a"), [rows, 1])
    shift = node.builder.const([int(node.attr("k", 0))])
    row = node.op("Add", row, shift, shape=[rows, 1])
    hit = node.op(
        "Equal", row, global_index(node, "b"), dtype=ir.DataType.BOOL, shape=[rows, columns]
    )
    return (node.builder.cast(hit, dtype or ir.DataType.FLOAT),)


def trilu_rule(view: NodeView) -> OpRule:
    """Trilu: an element is kept by its global row and column, so every dim may be sharded."""
    names = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{names}{further(view)} -> {names}; linear: any 0")


def trilu_local(node: LocalNode) -> Sequence[ir.Value]:
    """Compares global indices if rows or columns are sharded."""
    *_, row, column = axis_names(len(node.view.shape(0)))
    if not (node.atoms(row) or node.atoms(column)):
        return node.copy()
    shape = node.in_shape(0)
    x = node.input(0)
    rows = node.builder.reshape(global_index(node, row), [shape[-2], 1])
    if node.has(1):
        rows = node.op("Add", rows, node.input(1), shape=[shape[-2], 1])
    compare = "GreaterOrEqual" if node.attr("upper", 1) else "LessOrEqual"
    kept = node.op(
        compare, global_index(node, column), rows, dtype=ir.DataType.BOOL, shape=shape[-2:]
    )
    return (zero_unless(node, kept, x),)


def trilu_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Trilu of the cotangent: elements set to zero have no gradient."""
    offset = [node.input(1)] if node.has(1) else []
    upper = node.attr("upper", 1)
    return [node.op("Trilu", node.cotangent(), *offset, upper=upper)]


def sizes_rule(view: NodeView) -> OpRule:
    """Sizes (domain onnxpar): it has no operand; its elements are expressions in the symbols."""
    require_readable(view, "the sizes", view.env.contents[view.node.outputs[0].name or ""])
    return OpRule((), (Operand(mode=REPLICATED_OPERAND),), MappingProxyType({}))


def sizes_local(node: LocalNode) -> Sequence[ir.Value]:
    """The global sizes, computed from the symbols."""
    return (node.builder.sizes(node.view.env.contents[node.view.node.outputs[0].name or ""]),)


def _filled_pattern(node: ir.Node, env: ShapeEnv, first: Pattern) -> Pattern:
    """Zeros, unless it is filled with another number."""
    fill = node.attributes.get("value")
    return Pattern(zero=fill is None or not np.any(fill.as_tensor().numpy()))


def _ranged_pattern(node: ir.Node, env: ShapeEnv, first: Pattern) -> Pattern:
    """The result counts 0, 1, … if it begins at 0 and has steps of 1."""
    start, _, step = (None if v is None else env.contents.get(v.name or "") for v in node.inputs)
    return Pattern(counted=0 if (start, step) == ((0,), (1,)) else None)


def _constant_shape(node: ir.Node) -> tuple[int, ...] | None:
    """The shape of an initializer; it may be trained, since its elements are not read."""
    value = node.inputs[0]
    tensor = None if value is None or not value.is_initializer() else value.const_value
    return None if tensor is None else tuple(tensor.shape.numpy())


def _folded_shape(node: ir.Node, operands: Operands) -> tuple[Array] | None:
    shape = _constant_shape(node)
    start, end = (node.attributes.get(name) for name in ("start", "end"))
    kept = slice(None if start is None else start.as_int(), None if end is None else end.as_int())
    return None if shape is None else (np.array(shape[kept], np.int64),)


def _folded_size(node: ir.Node, operands: Operands) -> tuple[Array] | None:
    shape = _constant_shape(node)
    return None if shape is None else (np.array(prod(shape), np.int64),)


def _of_shape(compute: ComputeFn) -> Folding:
    return Folding("the sizes of a constant", frozenset(), elements=(), compute=compute)


def _bounds(operands: Operands) -> tuple[int, int, int]:
    start, end, step = (0 if x is None else int(x.ravel()[0]) for x in operands)
    return start, end, step


def _steps(operands: Operands) -> bool:
    return _bounds(operands)[2] != 0


def _steps_count(operands: Operands) -> int:
    start, end, step = _bounds(operands)
    return abs(end - start) // abs(step)


DEFS = (
    OpDef(DOMAIN, SIZES, 1, sizes_rule, sizes_local, gradient=NOT_DIFFERENTIABLE),
    OpDef(
        "",
        "Shape",
        1,
        shape_rule,
        shape_local,
        gradient=NOT_DIFFERENTIABLE,
        reads_shape_only=True,
        folding=_of_shape(_folded_shape),
    ),
    OpDef(
        "",
        "Size",
        1,
        size_rule,
        size_local,
        gradient=NOT_DIFFERENTIABLE,
        reads_shape_only=True,
        folding=_of_shape(_folded_size),
    ),
    OpDef(
        "",
        "ConstantOfShape",
        9,
        filled_rule,
        filled_local,
        gradient=NOT_DIFFERENTIABLE,
        host_operands=(0,),
        infer=infer_constant_of_shape,
        values=filled,
        pattern=_filled_pattern,
        folding=replace(MOVE, size=requested_elements),
    ),
    OpDef(
        "",
        "Range",
        11,
        range_rule,
        range_local,
        gradient=NOT_DIFFERENTIABLE,
        host_operands=(0, 1, 2),
        infer=infer_range,
        values=ranged,
        pattern=_ranged_pattern,
        folding=replace(INTEGERS, defined=_steps, size=_steps_count),
    ),
    OpDef("", "Constant", 1, constant_rule, gradient=NOT_DIFFERENTIABLE),
    OpDef("", "EyeLike", 9, eye_rule, eye_local, gradient=NOT_DIFFERENTIABLE),
    OpDef(
        "",
        "Trilu",
        14,
        trilu_rule,
        trilu_local,
        trilu_gradient,
        keeps_zero=True,
        host_operands=(1,),
        memory=IN_PLACE,
        folding=MOVE,
    ),
)

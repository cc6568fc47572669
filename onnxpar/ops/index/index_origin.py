"""Finds columns of indices that count 0, 1, … along a dim of the indices.

`x[arange(batch), places]` is exported as a GatherND (as a ScatterND if it is written). Its indices
name each row by its number. The rows of both tensors may then be sharded as if they were a batch.
"""

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import CONST_LIMIT, NodeView
from onnxpar.graph.shapes import ShapeEnv

_VIEWS = ("Unsqueeze", "Squeeze", "Reshape")
_SAME = ("Identity", "Cast")


def counted_columns(view: NodeView, operand: int) -> dict[int, int]:
    """Finds the columns of indices [a…, k] that count 0, 1, … along one of the dims a….

    Returns:
        The dim of each such column; no dim occurs twice.
    """
    value = view.node.inputs[operand]
    shape = view.shape(operand)
    if value is None:
        return {}
    last = len(shape) - 1
    found: dict[int, int] = {}
    for column, (part, position) in enumerate(_columns(value, view.env, shape)):
        dim = _counted(part, view.env, position)
        if dim is not None and dim != last and dim not in found.values():
            found[column] = dim
    return found


def _columns(
    value: ir.Value, env: ShapeEnv, shape: tuple[Dim, ...]
) -> list[tuple[ir.Value, int | None]]:
    """For each column the value that holds it, and its index there if the value has several."""
    count = shape[-1]
    node = value.producer()
    if node is not None and node.op_type == "Concat" and _axis(node) in (-1, len(shape) - 1):
        found: list[tuple[ir.Value, int | None]] = []
        for part in node.inputs:
            dims = env.shapes.get(part.name or "") if part is not None else None
            if part is None or dims is None or not isinstance(dims[-1], int):
                return []
            found += [(part, None if dims[-1] == 1 else i) for i in range(int(dims[-1]))]
        return found
    if not isinstance(count, int):
        return []
    return [(value, None if count == 1 else i) for i in range(count)]


def _axis(node: ir.Node) -> int | None:
    attribute = node.attributes.get("axis")
    return None if attribute is None else attribute.as_int()


def _counted(value: ir.Value, env: ShapeEnv, column: int | None) -> int | None:
    """The dim of `value`, or of one column of its last dim, along which it counts from 0."""
    if value.const_value is not None:
        return _counted_in(value, column)
    node, shape = value.producer(), env.shapes.get(value.name or "")
    if node is None or shape is None or column is not None or node.domain not in ("", "ai.onnx"):
        return None
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    if node.op_type == "Range":
        ends = [env.contents.get(v.name or "") if v is not None else None for v in node.inputs]
        return 0 if ends[0] == (0,) and ends[2] == (1,) else None
    if node.op_type not in (*_VIEWS, *_SAME, "Expand"):
        return None
    before = env.shapes.get(source.name or "")
    dim = _counted(source, env, None)
    if dim is None or before is None or node.op_type in _SAME:
        return dim
    if node.op_type == "Expand":
        moved = dim + len(shape) - len(before)
        return moved if env.table.equal(before[dim], shape[moved]) else None
    return _moved(env, before, shape, dim)


def _moved(env: ShapeEnv, before: tuple[Dim, ...], after: tuple[Dim, ...], dim: int) -> int | None:
    """The place of a dim after dims of size 1 were added or removed; None if more changed."""
    ours = [d for d, size in enumerate(before) if size != 1]
    theirs = [d for d, size in enumerate(after) if size != 1]
    if len(ours) != len(theirs) or dim not in ours:
        return None
    if not all(env.table.equal(before[a], after[b]) for a, b in zip(ours, theirs, strict=True)):
        return None
    return theirs[ours.index(dim)]


def _counted_in(value: ir.Value, column: int | None) -> int | None:
    tensor = value.const_value
    if tensor is None or tensor.size > CONST_LIMIT:
        return None
    array = np.asarray(tensor.numpy())
    if column is not None:
        array = array[..., column]
    for dim, size in enumerate(array.shape):
        steps = np.arange(size).reshape([-1, *[1] * (array.ndim - dim - 1)])
        if size > 1 and np.array_equal(array, np.broadcast_to(steps, array.shape)):
            return dim
    return None

"""Finds columns of indices that count 0, 1, … along a dim of the indices.

`x[arange(batch), places]` is exported as a GatherND (as a ScatterND if it is written). Its indices
name each row by its number. The rows of both tensors may then be sharded as if they were a batch.
"""

import numpy as np
import onnx_ir as ir

from onnxpar.graph.node_view import CONST_LIMIT, NodeView
from onnxpar.ops.value_patterns import counted_dim


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
    for column, (part, position) in enumerate(_columns(value, view)):
        dim = _counted(part, view, position)
        if dim is not None and dim != last and dim not in found.values():
            found[column] = dim
    return found


def _columns(value: ir.Value, view: NodeView) -> list[tuple[ir.Value, int | None]]:
    """For each column the value that holds it, and its index there if the value has several."""
    found: list[tuple[ir.Value, int | None]] = []
    for part in view.pattern_of(value).parts or (value,):
        dims = view.env.shapes.get(part.name or "")
        if dims is None or not isinstance(dims[-1], int):
            return []
        found += [(part, None if dims[-1] == 1 else i) for i in range(dims[-1])]
    return found


def _counted(value: ir.Value, view: NodeView, column: int | None) -> int | None:
    """The dim of `value`, or of one column of its last dim, along which it counts from 0."""
    tensor = value.const_value
    if tensor is None or column is None:
        return view.pattern_of(value).counted if column is None else None
    return (
        counted_dim(np.asarray(tensor.numpy())[..., column]) if tensor.size <= CONST_LIMIT else None
    )

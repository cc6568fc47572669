"""Which nodes of constants can be computed when a model is read, and their values.

Only exact results are computed: integers and booleans, moved elements, casts, and those operations
on float32 and float64 that IEEE 754 rounds in only one way. An exponential or a sine is left to the
kernels, whose last bits differ from those of any other library. ONNX's reference implementation
computes; `tests/onnxpar/frontend/test_fold_constants.py` compares it with onnxruntime.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from onnxpar.ops.registry import Registry
from onnxpar.ops.slots import Folding

Array = NDArray[Any]

FOLD_BYTES = 16 << 10
"""Size of the largest tensor that is read or computed, so that files hardly grow."""

_INTEGERS = tuple(ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64))
_FLOATS = (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_MOVED = frozenset((*_INTEGERS, *_FLOATS, ir.DataType.BOOL))
_COMPUTED = _MOVED - {ir.DataType.FLOAT16}


def folding_of(node: ir.Node, registry: Registry) -> Folding | None:
    """Returns how a node's results can be computed from constants; None if they cannot."""
    definition = registry.of(node)
    if not node.inputs or any(a.is_ref() for a in node.attributes.values()):
        return None
    return None if definition is None else definition.folding


def reads(node: ir.Node, folding: Folding) -> tuple[int, ...]:
    """Returns the operands whose elements a foldable node reads; others matter only by type."""
    if folding is Folding.SHAPE:
        return ()
    return (0,) if node.op_type == "CastLike" else tuple(range(len(node.inputs)))


def fold_node(
    node: ir.Node, operands: Sequence[Array | None], opset: int, folding: Folding
) -> tuple[Array, ...] | None:
    """Returns the results of a foldable node; None if they are not exact, or large.

    Args:
        node: The node.
        operands: Its operands; None for absent ones and those that `reads` does not name.
        opset: Version of the default domain.
        folding: As `folding_of` returns it.
    """
    if folding is Folding.SHAPE:
        return _sizes(node)
    present = [x for x in operands if x is not None]
    if not all(_admitted(folding, x) for x in present) or _too_large(node, operands):
        return None
    if folding is Folding.CAST:
        return _cast(node, present[0])
    if node.op_type in ("Div", "Mod") and present[1].dtype.kind in "iu" and not present[1].all():
        return None
    names = [None if x is None else f"x{i}" for i, x in enumerate(operands)]
    proto = ir.to_proto(
        ir.Node(
            "",
            node.op_type,
            [None if name is None else ir.Value(name=name) for name in names],
            tuple(node.attributes.values()),
            outputs=[ir.Value(name=f"y{i}") for i in range(len(node.outputs))],
        )
    )
    feeds = {name: x for name, x in zip(names, operands, strict=True) if name is not None}
    try:
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(proto, opsets={"": opset}).run(None, feeds)
    except Exception:  # Errors are reported when the node is checked.
        return None
    results = tuple(np.asarray(x) for x in found)
    if any(x.nbytes > FOLD_BYTES or x.dtype.kind not in "biuf" for x in results):
        return None
    return results


def _sizes(node: ir.Node) -> tuple[Array] | None:
    """Shape or Size of an initializer, which may be trained, since its elements are not read."""
    value = node.inputs[0]
    tensor = None if value is None or not value.is_initializer() else value.const_value
    if tensor is None:
        return None
    shape = tuple(tensor.shape.numpy())
    if node.op_type == "Size":
        return (np.array(prod(shape), np.int64),)
    start, end = (node.attributes.get(name) for name in ("start", "end"))
    kept = slice(None if start is None else start.as_int(), None if end is None else end.as_int())
    return (np.array(shape[kept], np.int64),)


def _admitted(folding: Folding, x: Array) -> bool:
    try:
        kind = ir.DataType.from_numpy(x.dtype)
    except TypeError:
        return False
    if folding is Folding.INTEGERS:
        return x.dtype.kind in "iub" and kind in _COMPUTED
    return kind in (_COMPUTED if folding is Folding.EXACT else _MOVED)


def _too_large(node: ir.Node, operands: Sequence[Array | None]) -> bool:
    """Whether a result is known to be large before it is computed."""
    limit = FOLD_BYTES
    if node.op_type in ("Expand", "ConstantOfShape"):
        target = operands[-1]
        return target is None or prod(max(int(n), 1) for n in target.ravel()) > limit
    if node.op_type == "Tile":
        x, repeats = operands[0], operands[1]
        return x is None or repeats is None or x.size * prod(map(int, repeats.ravel())) > limit
    if node.op_type == "Range":
        start, end, step = (0 if x is None else int(x.ravel()[0]) for x in operands)
        return step == 0 or abs(end - start) // abs(step) > limit
    return False


def _cast(node: ir.Node, x: Array) -> tuple[Array] | None:
    """A cast whose result every kernel agrees on: no string, no number outside the type."""
    kind: ir.DataType | None
    if node.op_type == "Cast":
        kind = ir.DataType(node.attributes["to"].as_int())
    else:
        like = node.inputs[1]
        kind = None if like is None else like.dtype
    if kind not in _MOVED:
        return None
    target = np.dtype(kind.numpy())
    if target.kind in "iu":
        limits = np.iinfo(target)
        if x.dtype.kind == "f" and not (
            np.isfinite(x).all() and (np.abs(x) < 2.0 ** (limits.bits - 1)).all()
        ):
            return None
        if target.kind == "u" and x.dtype.kind == "f" and (x < 0).any():
            return None
    with np.errstate(over="ignore"):
        result = x.astype(target)
    return (result,) if result.nbytes <= FOLD_BYTES else None

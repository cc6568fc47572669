"""Which nodes of constants can be computed when a model is read, and their values.

Only exact results are computed: integers and booleans, moved elements, casts, and those operations
on float32 and float64 that IEEE 754 rounds in only one way. An exponential or a sine is left to the
kernels, whose last bits differ from those of any other library. ONNX's reference implementation
computes; `tests/onnxpar/frontend/test_fold_constants.py` compares it with onnxruntime.
"""

from functools import partial

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxpar.ops.folding import Array, Folding, Operands
from onnxpar.ops.registry import Registry

FOLD_BYTES = 16 << 10
"""Size of the largest tensor that is read or computed, so that files hardly grow."""


def folding_of(node: ir.Node, registry: Registry) -> Folding | None:
    """Returns how a node's results can be computed from constants; None if they cannot."""
    definition = registry.of(node)
    if not node.inputs or any(a.is_ref() for a in node.attributes.values()):
        return None
    return None if definition is None else definition.folding


def reads(node: ir.Node, folding: Folding) -> tuple[int, ...]:
    """Returns the operands whose elements a foldable node reads; others matter only by type."""
    return tuple(range(len(node.inputs))) if folding.elements is None else folding.elements


def fold_node(
    node: ir.Node, operands: Operands, opset: int, folding: Folding
) -> tuple[Array, ...] | None:
    """Returns the results of a foldable node; None if they are not exact, or large.

    Args:
        node: The node.
        operands: Its operands; None for absent ones and those that `reads` does not name.
        opset: Version of the default domain.
        folding: As `folding_of` returns it.
    """
    if not all(_admitted(folding, x) for x in operands if x is not None):
        return None
    if not folding.defined(operands):
        return None
    if folding.size is not None and folding.size(operands) > FOLD_BYTES:
        return None
    compute = folding.compute or partial(_by_reference, opset)
    results = compute(node, operands)
    if results is None or any(x.nbytes > FOLD_BYTES for x in results):
        return None
    return results


def _by_reference(opset: int, node: ir.Node, operands: Operands) -> tuple[Array, ...] | None:
    """The results of ONNX's reference implementation."""
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
    return None if any(x.dtype.kind not in "biuf" for x in results) else results


def _admitted(folding: Folding, x: Array) -> bool:
    try:
        return ir.DataType.from_numpy(x.dtype) in folding.types
    except TypeError:
        return False

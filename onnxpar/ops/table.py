"""The one table of all operators."""

from onnxpar.ops import (
    cast,
    elementwise,
    gather,
    loss,
    matmul,
    norm,
    random,
    reduce,
    shape,
    slice,
    updates,
    view,
)
from onnxpar.ops.registry import Registry

REGISTRY = Registry.join(
    (
        matmul.DEFS,
        elementwise.DEFS,
        view.DEFS,
        shape.DEFS,
        slice.DEFS,
        gather.DEFS,
        cast.DEFS,
        reduce.DEFS,
        norm.DEFS,
        loss.DEFS,
        random.DEFS,
        updates.DEFS,
    )
)

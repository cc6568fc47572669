"""The one table of all operators."""

from onnxpar.ops import (
    backward,
    cast,
    elementwise,
    gather,
    loss,
    matmul,
    norm,
    pad,
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
        pad.DEFS,
        random.DEFS,
        backward.DEFS,
        updates.DEFS,
    )
)

"""The one table of all operators."""

from onnxpar.ops import (
    backward,
    cast,
    elementwise,
    gather,
    index,
    loss,
    matmul,
    norm,
    pad,
    random,
    reduce,
    scan,
    search,
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
        index.DEFS,
        cast.DEFS,
        reduce.DEFS,
        scan.DEFS,
        search.DEFS,
        norm.DEFS,
        loss.DEFS,
        pad.DEFS,
        random.DEFS,
        backward.DEFS,
        updates.DEFS,
    )
)

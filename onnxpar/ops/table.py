"""The one table of all operators."""

from onnxpar.ops import (
    backward,
    cast,
    einsum,
    elementwise,
    gather,
    index,
    loss,
    matmul,
    norm,
    pad,
    random,
    rearrange,
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
        einsum.DEFS,
        view.DEFS,
        shape.DEFS,
        slice.DEFS,
        gather.DEFS,
        index.DEFS,
        cast.DEFS,
        rearrange.DEFS,
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

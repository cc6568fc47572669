"""Initializers that are one part of a tensor of the model's file.

The part is a range of one dim. Directories, checkpoints and exported models know the tensor only;
programs know the parts only.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

_PART = "onnxpar.part"


@dataclass(frozen=True)
class TensorPart:
    """What an initializer is part of.

    Attributes:
        tensor: Name of the tensor.
        shape: Its shape.
        axis: The dim that is divided.
        start: Index of the part's first element in this dim.
    """

    tensor: str
    shape: tuple[int, ...]
    axis: int
    start: int


def part_of(value: ir.Value) -> TensorPart | None:
    """Returns what an initializer is part of; None if it is a tensor of its own."""
    found = value.meta.get(_PART)
    assert found is None or isinstance(found, TensorPart)
    return found


def tensor_of(value: ir.Value) -> str:
    """Returns the name of the tensor that an initializer is, or is a part of."""
    part = part_of(value)
    return (value.name or "") if part is None else part.tensor


def make_part(value: ir.Value, axis: int, start: int, stop: int, name: str) -> ir.Value:
    """Returns an initializer that is a range of another one; its data is read when it is needed."""
    whole = value.const_value
    assert whole is not None
    shape = tuple(int(size) for size in whole.shape.numpy())
    sizes = ir.Shape((*shape[:axis], stop - start, *shape[axis + 1 :]))
    part = ir.Value(
        name=name,
        type=copy(value.type),
        shape=sizes,
        const_value=_range(whole, shape, axis, start, stop, sizes, name),
    )
    part.meta.update(value.meta)
    part.meta[_PART] = TensorPart(value.name or "", shape, axis, start)
    return part


def _range(
    whole: ir.TensorProtocol,
    shape: Sequence[int],
    axis: int,
    start: int,
    stop: int,
    sizes: ir.Shape,
    name: str,
) -> ir.TensorProtocol:
    if isinstance(whole, ir.ExternalTensor) and prod(shape[:axis]) == 1:
        row = whole.nbytes // shape[axis]
        return _in_file(whole, name, sizes, (whole.offset or 0) + start * row, (stop - start) * row)

    def read() -> ir.TensorProtocol:
        place = (*(slice(None) for _ in shape[:axis]), slice(start, stop))
        # An external tensor keeps what it has read, and two threads may not read it at once.
        source = (
            _in_file(whole, name, ir.Shape(shape))
            if isinstance(whole, ir.ExternalTensor)
            else whole
        )
        data = np.ascontiguousarray(source.numpy()[place])
        return ir.Tensor(data, dtype=whole.dtype, name=name)

    return ir.LazyTensor(read, whole.dtype, sizes, name=name)


def _in_file(
    whole: ir.ExternalTensor,
    name: str,
    shape: ir.Shape,
    offset: int | None = None,
    length: int | None = None,
) -> ir.ExternalTensor:
    """Another tensor in the same file, by default the same bytes."""
    return ir.ExternalTensor(
        whole.location,
        whole.offset if offset is None else offset,
        whole.length if length is None else length,
        whole.dtype,
        shape=shape,
        name=name,
        base_dir=whole.base_dir,
    )

"""The origin of an initializer: what it was in the exported model, and the rule that shows it."""

import errno
import os
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.graph.new_nodes import constant

_ORIGIN = "onnxpar.origin"
_BLOCK = 1 << 20
"""Elements that are compared at once."""
MARKED = "PyTorch's exporter marks it {}"
NO_PARAMETER = "it contains no parameter of the PyTorch module"
STATISTIC = "it is a running statistic"
"""Rules for which several modules decide."""


class Role(StrEnum):
    """The role of an initializer in the author's model."""

    PARAMETER = "parameter"
    CONSTANT = "constant"
    DOUBTFUL = "doubtful"


@dataclass(frozen=True)
class Origin:
    """The origin of an initializer.

    Attributes:
        role: Parameter, constant, or in doubt.
        rule: How the role is known, for people: "PyTorch's exporter marks it PARAMETER". If the
            role is in doubt, the reason.
        dims: How many dims the parameter has in the module, if an exporter computed the initializer
            from it; None if the initializer is the parameter.
        names: Names of its parameters in the module, if they differ from its own.
    """

    role: Role
    rule: str
    dims: int | None = None
    names: tuple[str, ...] = ()


def note_origin(value: ir.Value, origin: Origin) -> None:
    """Stores the origin of an initializer; clones of the model have it too."""
    value.meta[_ORIGIN] = origin


def origin_of(value: ir.Value) -> Origin | None:
    """Returns the stored origin; None if there is none, as for a constant of the graph."""
    found = value.meta.get(_ORIGIN)
    assert found is None or isinstance(found, Origin)
    return found


def is_floating(value: ir.Value) -> bool:
    """Whether the elements of an initializer are floating-point numbers."""
    return value.dtype is not None and value.dtype.is_floating_point()


def array_of(value: ir.Value) -> NDArray[Any]:
    """Returns the elements of an initializer.

    Elements in a file are mapped only while the array exists. onnx_ir maps the complete file for
    each tensor and keeps the map, so 180 tensors of 700 GB would exceed the address space.
    """
    tensor = value.const_value
    assert tensor is not None
    if isinstance(tensor, ir.ExternalTensor):
        tensor = ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name or "",
            base_dir=tensor.base_dir,
        )
    return tensor.numpy()


def sizes(value: ir.Value) -> tuple[int, ...]:
    """Returns the shape of an initializer."""
    assert value.const_value is not None
    return tuple(int(size) for size in value.const_value.shape.numpy())


def is_uniform(value: ir.Value) -> bool:
    """Whether all elements of an initializer are the same number, and there is at least one."""
    if _is_hole(value):
        return True
    flat = array_of(value).ravel()
    # The first elements of a large weight differ, so the others need not be read.
    ends = (64, *range(_BLOCK, flat.size, _BLOCK), flat.size)
    return flat.size > 0 and all(
        bool((flat[begin:end] == flat[0]).all()) for begin, end in pairwise((0, *ends))
    )


def _is_hole(value: ir.Value) -> bool:
    """Whether an initializer lies in a hole of a sparse file, where all bytes are 0.

    Models without weights have such files. To read hundreds of gigabytes of zeros takes minutes.
    """
    tensor = value.const_value
    if not isinstance(tensor, ir.ExternalTensor) or not tensor.nbytes:
        return False
    begin = tensor.offset or 0
    end = begin + tensor.nbytes
    with open(tensor.path, "rb") as file:
        if os.fstat(file.fileno()).st_size < end:
            return False
        try:
            return os.lseek(file.fileno(), begin, os.SEEK_DATA) >= end
        except OSError as error:
            return error.errno == errno.ENXIO  # there are only holes from here on


def copy_of(value: ir.Value, name: str) -> ir.Value:
    """Returns an initializer with the same elements and origin and another name."""
    copy = constant(name, array_of(value), value.dtype)
    copy.meta.update(value.meta)
    return copy

"""What an initializer was in the model that was exported, and the rule that tells."""

from dataclasses import dataclass
from enum import StrEnum

import onnx_ir as ir

from onnxpar.graph.new_nodes import constant

_ORIGIN = "onnxpar.origin"


class Role(StrEnum):
    """What an initializer was to the model's author."""

    PARAMETER = "parameter"
    CONSTANT = "constant"
    DOUBTFUL = "doubtful"


@dataclass(frozen=True)
class Origin:
    """What an initializer was.

    Attributes:
        role: Parameter, constant, or in doubt.
        rule: By what that is known, for people: "PyTorch's exporter marks it PARAMETER". Of what is
            in doubt, why.
        dims: How many dims the parameter has in the module, where an exporter computed it of one;
            None for its own.
        names: Names that the parameters have in the module, where that is not its own.
    """

    role: Role
    rule: str
    dims: int | None = None
    names: tuple[str, ...] = ()


def note_origin(value: ir.Value, origin: Origin) -> None:
    """Notes what an initializer was; clones of the model know it too."""
    value.meta[_ORIGIN] = origin


def origin_of(value: ir.Value) -> Origin | None:
    """Returns what was noted; None for what no file had, such as a constant of the graph."""
    found = value.meta.get(_ORIGIN)
    assert found is None or isinstance(found, Origin)
    return found


def is_floating(value: ir.Value) -> bool:
    """Tells whether an initializer's elements are floating-point numbers."""
    return value.dtype is not None and value.dtype.is_floating_point()


def sizes(value: ir.Value) -> tuple[int, ...]:
    """Returns the shape of an initializer."""
    assert value.const_value is not None
    return tuple(int(size) for size in value.const_value.shape.numpy())


def is_uniform(value: ir.Value) -> bool:
    """Tells whether all elements of an initializer are the same number; there is one at least."""
    assert value.const_value is not None
    flat = value.const_value.numpy().ravel()
    # A large weight differs in its first elements, and need not be read whole.
    return flat.size > 0 and all(bool((part == flat[0]).all()) for part in (flat[:64], flat))


def copy_of(value: ir.Value, name: str) -> ir.Value:
    """Returns an initializer of the same elements and origin under another name."""
    assert value.const_value is not None and value.dtype is not None
    copy = constant(name, value.const_value.numpy(), value.dtype)
    copy.meta.update(value.meta)
    return copy

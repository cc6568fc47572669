"""What an initializer was in the model that was exported, and the rule that tells."""

from dataclasses import dataclass
from enum import StrEnum

import onnx_ir as ir

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


def names_of(graph: ir.Graph) -> set[str]:
    """Returns the names of a graph's values, those of subgraphs included."""
    names = {v.name or "" for v in (*graph.inputs, *graph.initializers.values())}
    for node in ir.traversal.RecursiveGraphIterator(graph):
        names |= {v.name or "" for v in (*node.inputs, *node.outputs) if v is not None}
    return names


def free_name(name: str, taken: set[str]) -> str:
    """Returns `name.1`, `name.2`, … the first that is not taken, and takes it."""
    count = 1
    while f"{name}.{count}" in taken:
        count += 1
    taken.add(f"{name}.{count}")
    return f"{name}.{count}"


def copy_of(value: ir.Value, name: str) -> ir.Value:
    """Returns an initializer of the same elements and origin under another name."""
    assert value.const_value is not None and value.dtype is not None
    tensor = ir.Tensor(value.const_value.numpy().copy(), dtype=value.dtype, name=name)
    copy = ir.Value(name=name, type=value.type, shape=value.shape, const_value=tensor)
    copy.meta.update(value.meta)
    return copy

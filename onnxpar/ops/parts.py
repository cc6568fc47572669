"""Parts of a dim: nodes that take one, and nodes that may be computed for one part alone.

A fused weight holds the weights of several products side by side; the nodes here connect the dim of
the weight in which they stand side by side with the nodes that take them apart again.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.core.symbols import Dim
from onnxpar.graph.new_nodes import constant, identity
from onnxpar.graph.node_view import NodeView


@dataclass(frozen=True)
class Taken:
    """A result that is a range of operand 0.

    Attributes:
        axis: The dim of the operand.
        start: First index.
        stop: Index after the last.
        squeezed: Whether the result lacks the dim, which then has one element.
    """

    axis: int
    start: int
    stop: int
    squeezed: bool = False


@dataclass(frozen=True)
class PartForm:
    """How a node that computes one part of a dim differs from the node that computes the whole.

    Attributes:
        attributes: Attributes with other values.
        operands: Operands that are other constants.
    """

    attributes: Mapping[str, Any] = field(default_factory=dict)
    operands: Mapping[int, NDArray[Any]] = field(default_factory=dict)


TakesFn = Callable[[NodeView], Sequence[Taken] | None]
"""Returns the range of operand 0 that each result of a node is; None if they are no ranges."""

Shapes = Sequence[Sequence[Dim]]
PartFn = Callable[[NodeView, Shapes, Sequence[Dim]], PartForm | None]
"""Given a node and the shapes of operands and result of a part: how it computes this part. A dim
that its rule divides has the part's size. None if it cannot."""

_AS_IT_IS = PartForm()


def same_node(view: NodeView, operands: Shapes, result: Sequence[Dim]) -> PartForm | None:
    """The same node computes every part: neither attributes nor constants hold sizes."""
    return _AS_IT_IS


def taking(value: ir.Value, taken: Taken, result: ir.Value, name: str) -> tuple[ir.Node, ir.Value]:
    """Returns the node that takes a range from a value that is this range, and its constant.

    Args:
        value: The range.
        taken: What the original node takes.
        result: The result of the original node.
        name: Name of the new node; its result is named as `result` is.
    """
    axes = constant(f"{name}.axes", np.array([taken.axis], np.int64))
    if not taken.squeezed:
        return identity(value, result.name or "", name), axes
    output = ir.Value(name=result.name, type=copy(result.type), shape=result.shape)
    return ir.Node("", "Squeeze", [value, axes], outputs=[output], name=name), axes


def taken_range(
    axis: int, size: Dim, places: Sequence[Dim] | None, *, squeezed: bool = False
) -> Sequence[Taken] | None:
    """Returns the range that indices take from a dim; None if they are unknown or no range."""
    if not places or not isinstance(size, int) or not all(isinstance(p, int) for p in places):
        return None
    first = int(places[0]) % size
    if [int(p) % size for p in places] != list(range(first, first + len(places))):
        return None
    return [Taken(axis, first, first + len(places), squeezed)]

"""Joins pieces of a tensor along an axis, with zeros where there is no piece."""

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnxpar.core.symbols import Dim, as_dim
from onnxpar.graph.builder import Builder
from onnxpar.ops.grad_node import Placed


def side_by_side_pieces(builder: Builder, pieces: Iterable[Placed]) -> list[list[Placed]]:
    """Returns pieces in groups that can be joined, each from the front.

    Pieces of one group have one axis, and are proved not to overlap: their first indices and sizes
    say how many elements are between them. (Slices of a packed projection of queries, keys and
    values touch one another.)
    """
    typical = builder.table.typical
    groups: list[list[Placed]] = []
    for piece in sorted(pieces, key=lambda p: (p.axis, typical(p.start))):
        last = groups[-1][-1] if groups else None
        if last is not None and last.axis == piece.axis:
            gap = as_dim(piece.start - _end(builder, last))
            if isinstance(gap, int) and gap >= 0:
                groups[-1].append(piece)
                continue
        groups.append([piece])
    return groups


def join_pieces(builder: Builder, pieces: Sequence[Placed], full: Dim) -> ir.Value:
    """Emits the tensor that has these pieces, and zeros elsewhere.

    Args:
        builder: The builder.
        pieces: The pieces along one axis, from the front, which do not overlap.
        full: The size of the axis.
    """
    axis, first = pieces[0].axis, pieces[0].piece
    shape = builder.shape_of(first)
    parts: list[ir.Value] = []
    end: Dim = 0

    def fill(start: Dim) -> None:
        if start - end != 0:
            parts.append(builder.zeros(resized(shape, axis, as_dim(start - end)), first.dtype))

    for piece in pieces:
        fill(piece.start)
        parts.append(piece.piece)
        end = _end(builder, piece)
    fill(full)
    if len(parts) == 1:
        return first
    return builder.op("Concat", *parts, shape=resized(shape, axis, full), axis=axis)


def resized(shape: Sequence[Dim], axis: int, size: Dim) -> list[Dim]:
    """Returns a shape with another size of one axis."""
    return [size if position == axis else s for position, s in enumerate(shape)]


def _end(builder: Builder, piece: Placed) -> Dim:
    return as_dim(piece.start + builder.shape_of(piece.piece)[piece.axis])

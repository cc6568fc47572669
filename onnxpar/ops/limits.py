"""Greatest sizes that a model's own tables set.

A table of positions is cut to the length of the sequence, `table[:, :seq]`, and added to it. A
slice beyond the end is shorter than asked for, so its size is min(64, seq), and the sum fails for
longer sequences. All that a model can be run at has thus seq <= 64, which makes that size seq.
"""

from collections.abc import Iterator
from itertools import combinations, zip_longest

import onnx_ir as ir
import sympy

from onnxpar.symbols import Dim, as_dim

_BROADCASTING = frozenset(
    (
        "Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater",
        "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or",
        "Pow", "Sub", "Sum", "Where", "Xor",
    )
)  # fmt: skip


def size_limits(graph: ir.Graph) -> dict[str, int]:
    """Returns the greatest size of each symbol that a sum or product with a cut table limits.

    Args:
        graph: A graph whose shapes are inferred.
    """
    limits: dict[str, int] = {}
    for node in graph:
        if node.domain in ("", "ai.onnx") and node.op_type in _BROADCASTING:
            for name, most in _met(node):
                limits[name] = min(most, limits.get(name, most))
    return limits


def _met(node: ir.Node) -> Iterator[tuple[str, int]]:
    """Yields each symbol that meets its own minimum with a number, and that number."""
    shapes = [tuple(v.shape) for v in node.inputs if v is not None and v.shape is not None]
    for dims in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        sizes = {as_dim(d if isinstance(d, int) else d.value) for d in dims if _is_named(d)}
        for a, b in combinations(sizes, 2):
            yield from _limit(a, b)
            yield from _limit(b, a)


def _is_named(dim: int | ir.SymbolicDim) -> bool:
    return not isinstance(dim, int) and dim.value is not None


def _limit(size: Dim, other: Dim) -> Iterator[tuple[str, int]]:
    """Where `other` is min(number, `size`): broadcast it is not, unless the number is 1."""
    if not isinstance(size, sympy.Symbol) or not isinstance(other, sympy.Min):
        return
    numbers = [int(arg) for arg in other.args if arg.is_Integer]
    if len(other.args) == 2 and size in other.args and numbers and numbers[0] > 1:
        yield size.name, numbers[0]

"""Greatest and least sizes that follow from the model itself.

A model slices a table of positions to the length of the sequence, `table[:, :seq]`, and adds it to
the sequence. A slice beyond the end of a table of 64 rows is shorter than requested, so its size is
min(64, seq), and the sum fails for longer sequences. So the model runs only with seq <= 64, and the
size is seq.

Attention that rotates its queries and keys by a table of angles has no row for positions beyond the
end of the table, so the model runs only with as many.

A convolution or pool of an image smaller than its windows has no result, so the model runs only at
sizes where each of them has a result. Then sizes that an exporter computes from these, rounded
towards zero, are never negative.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations, zip_longest

import onnx_ir as ir
import sympy
from onnx_shape_inference import SYM_DATA_KEY

from onnxpar.core.symbols import Dim, as_dim, symbols_of
from onnxpar.core.symbols.expressions import value_of
from onnxpar.ops.registry import Registry

_FAR = 1 << 20
"""Greater least sizes are not searched for."""


def size_limits(graph: ir.Graph, registry: Registry) -> dict[str, int]:
    """Returns the greatest size of each symbol that tables limit.

    They are sliced for a sum or product, or their rows are those of a node's positions.

    Args:
        graph: A graph whose shapes are inferred.
        registry: The table of operators.
    """
    limits: dict[str, int] = {}
    for node in graph:
        definition = registry.of(node)
        if definition is None:
            continue
        found = [*_met(node)] if definition.broadcasts else []
        for name, most in (*found, *_counted(node, definition.counts_rows)):
            limits[name] = min(most, limits.get(name, most))
    return limits


def _counted(node: ir.Node, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Yields each symbol that is at most the number of rows of a table, and the number."""
    for pair in pairs:
        if max(pair) >= len(node.inputs):
            continue
        count, table = (node.inputs[index] for index in pair)
        if count is None or table is None or table.shape is None:
            continue
        rows = table.shape[0]
        elements = json.loads(count.metadata_props.get(SYM_DATA_KEY, "[]"))
        if isinstance(rows, int) and len(elements) == 1 and elements[0] is not None:
            size = as_dim(elements[0])
            if isinstance(size, sympy.Symbol):
                yield size.name, rows


def least_sizes(graph: ir.Graph, registry: Registry) -> dict[str, int]:
    """Returns the least size of each symbol at which every convolution and pool has a result.

    Args:
        graph: A graph whose shapes are inferred.
        registry: The table of operators.
    """
    sizes = {
        as_dim(d.value)
        for node in graph
        if (definition := registry.of(node)) is not None and definition.windowed
        for d in tuple(node.outputs[0].shape or ())[2:]
        if not isinstance(d, int) and d.value is not None
    }
    least: dict[str, int] = {}
    for size in sizes:
        if isinstance(size, int) or len(symbols_of(size)) != 1 or not _grows(size):
            continue
        (name,) = symbols_of(size)
        found = _first(partial(_is_positive, size, name))
        if found is not None:
            least[name] = max(found, least.get(name, 1))
    return least


def _is_positive(size: sympy.Expr, name: str, value: int) -> bool:
    return value_of(size, {name: value}) >= 1


def _grows(size: sympy.Expr) -> bool:
    """Whether the size never decreases if a symbol increases."""
    if isinstance(size, sympy.Mul):
        number, rest = size.as_coeff_Mul()
        return bool(number >= 0) and not isinstance(rest, sympy.Mul) and _grows(rest)
    if isinstance(size, sympy.Add | sympy.Max | sympy.Min | sympy.floor):
        return all(_grows(arg) for arg in size.args)
    return bool(size.is_Symbol or size.is_Rational)


def _first(holds: Callable[[int], bool]) -> int | None:
    """The least number, from 1, that satisfies a condition that all greater numbers satisfy too."""
    high = 1
    while not holds(high):
        high *= 2
        if high > _FAR:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _met(node: ir.Node) -> Iterator[tuple[str, int]]:
    """Yields each symbol that is broadcast against its minimum with a number, and the number."""
    shapes = [tuple(v.shape) for v in node.inputs if v is not None and v.shape is not None]
    for dims in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        sizes = {as_dim(d if isinstance(d, int) else d.value) for d in dims if _is_named(d)}
        for a, b in combinations(sizes, 2):
            yield from _limit(a, b)
            yield from _limit(b, a)


def _is_named(dim: int | ir.SymbolicDim) -> bool:
    return not isinstance(dim, int) and dim.value is not None


def _limit(size: Dim, other: Dim) -> Iterator[tuple[str, int]]:
    """Yields the limit if `other` is min(number, `size`); a number of 1 may be broadcast."""
    if not isinstance(size, sympy.Symbol) or not isinstance(other, sympy.Min):
        return
    numbers = [int(arg) for arg in other.args if arg.is_Integer]
    if len(other.args) == 2 and size in other.args and numbers and numbers[0] > 1:
        yield size.name, numbers[0]

"""Statistics over dims that may be sharded, for all normalisations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.core.errors import ShardingError
from onnxpar.core.symbols import Dim, symbols_of
from onnxpar.ops.local_helpers import count_of, reduced
from onnxpar.ops.local_node import LocalNode

Mask = Callable[[ir.Value, bool], ir.Value]


def masker(node: LocalNode) -> Mask:
    """Returns a function that zeroes the padding of special factors in values laid out as input 0.

    Its second argument says whether the padding is known to be zero already.
    """

    def mask(x: ir.Value, known_zero: bool) -> ir.Value:
        for factor in node.split_factors("special"):
            x = node.masked(x, 0, factor, 0, known_zero=known_zero)
        return x

    return mask


def global_count(node: LocalNode, sizes: Sequence[Dim], dtype: ir.DataType) -> ir.Value:
    """Returns the number of elements on all devices together, as a tensor of shape [1].

    Args:
        node: The node.
        sizes: Global sizes of the dims that statistics run over.
        dtype: Type of the result.

    Raises:
        ShardingError: The devices that share statistics may have different sizes of these dims.
    """
    atoms = set(node.split_atoms("special"))
    for symbol in sorted({s for size in sizes for s in symbols_of(size)}):
        if node.builder.varying.get(symbol, frozenset()) & atoms:
            raise ShardingError(
                f"its statistics run over the size {symbol!r}, which is per-rank along the axes "
                f"that shard it: use one size on all ranks, or replicate the normalised dims"
            )
    return count_of(node, sizes, dtype)


def mean_and_variance(
    node: LocalNode,
    x: ir.Value,
    shape: Sequence[Dim],
    axes: Sequence[int],
    sizes: Sequence[Dim],
    mask: Mask,
    *,
    centre: bool = True,
) -> tuple[ir.Value, ir.Value | None, ir.Value]:
    """Emits mean and variance over axes that may be sharded.

    The mean comes first, then the squares of x - mean: E[x²] - E[x]² loses all digits where the
    mean is large (Chan, Golub & LeVeque, 1983).

    Args:
        node: The node; its special factors are those of the axes.
        x: Local values, in the type in which sums are computed.
        shape: Their local shape.
        axes: The axes that statistics run over.
        sizes: Global sizes of these axes.
        mask: Sets padding to zero.
        centre: Whether the mean is subtracted; without it the "variance" is the mean square.

    Returns:
        x - mean (or x), the mean (None if it is not subtracted), the variance.

    Raises:
        ShardingError: As `global_count`.
    """
    atoms, kept = node.split_atoms("special"), reduced(shape, axes)
    assert x.dtype is not None
    count = global_count(node, sizes, x.dtype)

    def average(op_type: str, values: ir.Value) -> ir.Value:
        total = node.all_reduce(node.builder.reduce(op_type, values, axes, keepdims=True), atoms)
        return node.op("Div", total, count, shape=kept)

    if not centre:
        return x, None, average("ReduceSumSquare", mask(x, node.zero[0]))
    mean = average("ReduceSum", mask(x, node.zero[0]))
    centred = node.op("Sub", x, mean, shape=shape)
    return centred, mean, average("ReduceSumSquare", mask(centred, False))


def inverse_deviation(
    node: LocalNode, variance: ir.Value, epsilon: float, shape: Sequence[Dim]
) -> ir.Value:
    """Emits 1 / sqrt(variance + epsilon)."""
    assert variance.dtype is not None
    number = node.builder.const(epsilon, variance.dtype)
    root = node.op("Sqrt", node.op("Add", variance, number, shape=shape), shape=shape)
    return node.op("Reciprocal", root, shape=shape)


@dataclass(frozen=True)
class Normalised:
    """Normalised values and their statistics.

    Attributes:
        y: (x - mean) · inverse, or x · inverse where the mean is not subtracted.
        mean: The mean; None where it is not subtracted.
        inverse: 1 / sqrt(variance + epsilon).
    """

    y: ir.Value
    mean: ir.Value | None
    inverse: ir.Value


def normalised(
    node: LocalNode,
    x: ir.Value,
    shape: Sequence[Dim],
    axes: Sequence[int],
    sizes: Sequence[Dim],
    epsilon: float,
    *,
    mask: Mask | None = None,
    centre: bool = True,
) -> Normalised:
    """Emits (x - mean) / sqrt(variance + epsilon) over axes that may be sharded.

    Args:
        node: As in `mean_and_variance`.
        x: As there.
        shape: As there.
        axes: As there.
        sizes: As there.
        epsilon: What is added to the variance.
        mask: Sets padding to zero; None where `x` is laid out as input 0.
        centre: As there.

    Raises:
        ShardingError: As `global_count`.
    """
    centred, mean, variance = mean_and_variance(
        node, x, shape, axes, sizes, mask or masker(node), centre=centre
    )
    inverse = inverse_deviation(node, variance, epsilon, reduced(shape, axes))
    return Normalised(node.op("Mul", centred, inverse, shape=shape), mean, inverse)

"""Mean and variance over dims that are split, which several normalisations share."""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms
from onnxpar.core.symbols import Dim, symbols_of
from onnxpar.ops.local_helpers import count_of, reduced
from onnxpar.ops.local_node import LocalNode

Mask = Callable[[ir.Value, bool], ir.Value]


def split_atoms(node: LocalNode) -> Atoms:
    """Returns the atoms that split the node's special factors."""
    return tuple(a for f in node.split_factors("special") for a in node.atoms(f))


def masker(node: LocalNode) -> Mask:
    """Returns what sets padding of the special factors to zero in values laid out as input 0.

    Its second argument says whether that is known to be zero.
    """

    def mask(x: ir.Value, known_zero: bool) -> ir.Value:
        for factor in node.split_factors("special"):
            x = node.masked(x, 0, factor, 0, known_zero=known_zero)
        return x

    return mask


def global_count(node: LocalNode, sizes: Sequence[Dim], dtype: ir.DataType) -> ir.Value:
    """Returns how many elements all devices together have, as a tensor of shape [1].

    Args:
        node: The node.
        sizes: Global sizes of the dims that statistics run over.
        dtype: Type of the result.

    Raises:
        ShardingError: Devices that share statistics have different sizes of what they are of.
    """
    atoms = set(split_atoms(node))
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
    """Emits mean and variance over the axes, of which devices hold parts.

    Mean first and squares of what is centred then: E[x²] - E[x]² loses all digits where the mean is
    large (Chan, Golub & LeVeque, 1983).

    Args:
        node: The node; its special factors are what is split.
        x: Local values, in the type in which sums are made.
        shape: Their local shape.
        axes: The axes that statistics run over.
        sizes: Global sizes of these axes.
        mask: Sets padding to zero.
        centre: Whether the mean is taken off; without it the "variance" is the mean square.

    Returns:
        What is centred, the mean (None where it is not taken off), the variance.

    Raises:
        ShardingError: As `global_count`.
    """
    atoms, kept = split_atoms(node), reduced(shape, axes)
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

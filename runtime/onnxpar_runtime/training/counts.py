"""The weights of micro-batches in the loss and the gradients of a step.

The training graph's loss is a mean. The loss of a step over several micro-batches must be the mean
over all of them, so each is weighted by the number of terms of its own mean, divided by the total.
If a symbol has a different value on each data rank, the ranks' batches are weighted in the same
way, as if one device computed them one after another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import block, coordinates
from onnxpar_format.entries import TensorEntry
from onnxpar_format.expressions import ExpressionError, evaluate
from onnxpar_format.manifest import Loss
from onnxpar_runtime.errors import InputError, OnnxparRuntimeError, SymbolValueError
from onnxpar_runtime.inputs import Feeds, Inputs
from onnxpar_runtime.npz import convert
from onnxpar_runtime.symbol_checks import symbol_values
from onnxpar_runtime.training.sources import Arrays, Batch

Array = NDArray[Any]


@dataclass(frozen=True)
class Prepared:
    """A micro-batch, sharded for this rank.

    Attributes:
        feeds: This rank's shards.
        divisor: Number of terms of the mean in this rank's graph: labels that count, or elements.
        count: Number of terms of the micro-batch's mean over all ranks.
        alike: Whether the means in all data ranks' graphs have the same number of terms.
        error: Why the batch cannot be used. It is raised when all ranks agree on going on.
    """

    feeds: Feeds
    divisor: int
    count: Fraction | int
    alike: bool = True
    error: OnnxparRuntimeError | None = None


def prepare(inputs: Inputs, loss: Loss, batch: Batch) -> Prepared:
    """Returns a batch sharded for the rank of `inputs`; a user's error is part of the result."""
    try:
        if isinstance(batch, tuple):
            return _of_data_ranks(inputs, loss, batch)
        feeds = inputs.shard_inputs(batch)
        count = _mean_over(loss, inputs.program.inputs, batch, feeds.values)
        return Prepared(feeds, count, count)
    except OnnxparRuntimeError as error:
        return Prepared(Feeds({}, {}), 0, 0, error=error)


def _mean_over(
    loss: Loss, specs: Sequence[TensorEntry], arrays: Arrays, values: Mapping[str, int]
) -> int:
    """Returns the number of terms of the mean loss of whole arrays.

    Raises:
        InputError: The expression of the manifest cannot be evaluated.
    """
    if loss.labels is not None and loss.ignore_index is not None:
        return int(np.count_nonzero(np.asarray(arrays[loss.labels]) != loss.ignore_index))
    if loss.count is None:
        first = specs[0].name
        return int(np.shape(arrays[first])[0]) if np.ndim(arrays[first]) else 1
    try:
        return evaluate(loss.count, values)
    except ExpressionError as error:
        raise InputError(f"the number of labels that count: {error}") from None


def _of_data_ranks(inputs: Inputs, loss: Loss, parts: tuple[Arrays, ...]) -> Prepared:
    """Prepares one dict for each data rank, in the order of the ranks.

    The data ranks are the positions along the atoms that shard dim 0 of the inputs. Inputs whose
    dim 0 is not sharded are each data rank's own.

    Raises:
        InputError: The arrays do not fit the inputs, or one another.
        SymbolValueError: A symbol's value violates its constraint.
    """
    manifest, specs = inputs.manifest, inputs.program.inputs
    data = next((s.dims[0][0][1] for s in specs if s.dims and s.dims[0][0][1]), ())
    rows = [s for s in specs if s.dims and s.dims[0][0][1] == data and data]
    ways = [manifest.atoms[a] for a in data]
    places: list[tuple[int, ...]] = list(np.ndindex(*ways))
    if len(parts) != len(places):
        raise InputError(
            f"expected a batch of {len(places)} parts, one for each data rank, got {len(parts)}"
        )
    for spec in rows:
        if len(spec.dims[0]) > 1:
            raise InputError(
                f"input {spec.name!r}: expected one sample in each row of dim 0, got a dim merged "
                f"from {len(spec.dims[0])} sizes"
            )
    arrays = [convert(specs, part) for part in parts]
    total = {s.name: sum(a[s.name].shape[0] for a in arrays) for s in rows}
    for spec in rows:
        for number, (place, part) in enumerate(zip(places, arrays, strict=True)):
            expected = block(total[spec.name], ways, place).valid
            got = part[spec.name].shape[0]
            if got != expected:
                raise InputError(
                    f"input {spec.name!r}: data rank {number} has {got} of {total[spec.name]} "
                    f"rows, expected {expected}"
                )
    values, divisors, count = [], [], Fraction(0)
    for part in arrays:
        shapes = {n: (total[n], *a.shape[1:]) if n in total else a.shape for n, a in part.items()}
        values.append(symbol_values(manifest.symbols, inputs.program, shapes))
        divisor = _mean_over(loss, specs, part, values[-1])
        if loss.count is None and not _ignores(loss):
            divisor = total.get(specs[0].name, divisor)
        divisors.append(divisor)
        count += divisor if _ignores(loss) else _share(part, total, divisor)
    for name, symbol in manifest.symbols.items():
        found = {v[name] for v in values if name in v}
        if len(found) > 1 and not symbol.per_rank:
            raise SymbolValueError(
                f"symbol {name!r}: expected one value on all ranks, got values from "
                f"{min(found)} to {max(found)}"
            )
    here = coordinates(inputs.rank, manifest.atoms)
    mine = places.index(tuple(here[a] for a in data))
    feeds = inputs.part_inputs(arrays[mine], values[mine], data)
    if _ignores(loss):
        # The graph counts the labels of all ranks: their number is not the size of a dim.
        return Prepared(feeds, int(count), count)
    return Prepared(feeds, divisors[mine], count, alike=len(set(divisors)) == 1)


def _ignores(loss: Loss) -> bool:
    return loss.labels is not None and loss.ignore_index is not None


def _share(part: Arrays, total: Mapping[str, int], divisor: int) -> Fraction:
    """Returns the share of a data rank's rows in the number of terms of its mean."""
    name, rows = next(iter(total.items()), ("", 1))
    return Fraction(divisor * (part[name].shape[0] if name else 1), max(rows, 1))

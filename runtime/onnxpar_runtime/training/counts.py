"""How much a micro-batch counts in its step: the weights of losses and gradients.

The training graph's loss is a mean. A step over several micro-batches is to equal the mean over all
that they hold, so each is weighted by what its own mean is over, divided by the total. Where a
symbol has a value of its own on each data rank, the same holds for the ranks' batches, as if one
device took them one after another.
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
    """A micro-batch, cut for this rank.

    Attributes:
        feeds: This rank's part.
        divisor: What the mean of this rank's graph is over: labels that count, or elements.
        count: What the micro-batch counts in its step, all ranks together.
        alike: Whether the mean of every data rank's graph is over the same number.
        error: Why the batch cannot be used. It is raised where all ranks agree on going on.
    """

    feeds: Feeds
    divisor: int
    count: Fraction | int
    alike: bool = True
    error: OnnxparRuntimeError | None = None


def prepare(inputs: Inputs, loss: Loss, batch: Batch) -> Prepared:
    """Returns a batch cut for the rank of `inputs`; an error of the user's stands in the result."""
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
    """Returns what the mean loss of global arrays is over.

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

    The data ranks are the positions along the atoms that split dim 0 of the inputs. Inputs without
    such a split are each data rank's own.

    Raises:
        InputError: The arrays do not fit the inputs, or one another.
        SymbolValueError: A symbol's value violates its constraint.
    """
    manifest, specs = inputs.manifest, inputs.program.inputs
    data = next((s.dims[0][0][1] for s in specs if s.dims and s.dims[0][0][1]), ())
    rows = [s for s in specs if s.dims and s.dims[0][0][1] == data and data]
    ways = [manifest.atoms[a] for a in data]
    places: list[tuple[int, ...]] = list(np.ndindex(*ways))
    if len(parts) != len(places) or any(len(s.dims[0]) > 1 for s in rows):
        raise InputError(
            f"expected a batch of {len(places)} parts, one for each data rank, whose inputs are "
            f"split in dim 0 as samples, got {len(parts)} parts"
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
                f"symbol {name!r} must be equal on all ranks, got values from {min(found)} to "
                f"{max(found)}"
            )
    here = coordinates(inputs.rank, manifest.atoms)
    mine = places.index(tuple(here[a] for a in data))
    feeds = inputs.part_inputs(arrays[mine], values[mine], data)
    if _ignores(loss):
        # The graph counts the labels of all ranks, since their number has no size of its own.
        return Prepared(feeds, int(count), count)
    return Prepared(feeds, divisors[mine], count, alike=len(set(divisors)) == 1)


def _ignores(loss: Loss) -> bool:
    return loss.labels is not None and loss.ignore_index is not None


def _share(part: Arrays, total: Mapping[str, int], divisor: int) -> Fraction:
    """Returns what a data rank's part counts: its rows' share of what its mean is over."""
    name, whole = next(iter(total.items()), ("", 1))
    return Fraction(divisor * (part[name].shape[0] if name else 1), max(whole, 1))

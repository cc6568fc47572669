"""An encoder's results for requests that run side by side, on the CPU: rows of equal length.

The encoder reads each request alone, as a batch of one row for each shard. When requests join,
shorter rows are padded at the end; the mask that encoder and decoder take leaves the padding out.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.expressions import bare_name
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.decoder import Decoder
from onnxpar_runtime.generation.encoder import NOTHING, Encoder, Supply, tokens_input
from onnxpar_runtime.tensors import to_host, to_ort

Array = NDArray[Any]


class Slot(NamedTuple):
    """The place of a request.

    Attributes:
        shard: The shard of the batch.
        row: The row in the shard.
    """

    shard: int
    row: int


class ReadRows:
    """What was read for each of some requests.

    Args:
        decoder: The decoder.
        encoder: Its encoder; None if it has none.

    Raises:
        InputError: The encoder does not read tokens, there is no mask of the padding, or a device
            has only a part of a row of the encoder's results.
    """

    def __init__(self, decoder: Decoder, encoder: Encoder | None) -> None:
        """Checks that rows can be padded."""
        self._pairs = decoder.program.supplied if encoder is not None else ()
        self._kept: dict[Slot, tuple[Supply, dict[str, Array]]] = {}
        if encoder is None:
            return
        where, batch = decoder.manifest.directory, bare_name(decoder.roles.tokens.shape[0])
        if tokens_input(encoder.program) is None:
            names = [spec.name for spec in encoder.program.inputs]
            raise InputError(
                f"{where}: requests need an encoder of tokens, got one with the inputs {names}"
            )
        specs = [decoder.specs[pair.input] for pair in self._pairs]
        open_dims = [
            any(atoms for _, atoms in dim)
            for spec in specs
            for size, dim in zip(spec.shape, spec.dims, strict=True)
            if not isinstance(size, int) and bare_name(size) != batch
        ]
        if open_dims and not any(pair.given for pair in self._pairs):
            raise InputError(
                f"{where}: requests of different lengths need a mask of what the encoder read"
            )
        if any(open_dims):
            raise InputError(
                f"{where}: requests need each row of the encoder's results complete on a device, "
                "got rows that are sharded along their length"
            )

    def keep(self, slot: Slot, supply: Supply) -> None:
        """Keeps what was read for a request."""
        if self._pairs:
            self._kept[slot] = supply, {n: to_host(value) for n, value in supply.values.items()}

    def drop(self, slot: Slot) -> None:
        """Forgets a request, if it is known."""
        self._kept.pop(slot, None)

    def beside(self, slots: Collection[Slot], own: int, rows: int, shards: int) -> Supply:
        """Returns what was read for requests side by side.

        Args:
            slots: Their places.
            own: This rank's shard of the batch.
            rows: The number of rows of each shard.
            shards: The number of shards.
        """
        if not self._pairs:
            return NOTHING
        values: dict[str, Any] = {}
        given: dict[str, Array] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for pair in self._pairs:
            name = pair.input
            known = {slot: self._kept[slot][0].shapes[name][1:] for slot in slots}
            shapes[name] = (shards * rows, *np.max(list(known.values()), axis=0).tolist())
            if pair.given:
                parts = {s: self._kept[s][0].given[name] for s in slots}
                made = _padded(parts, {s: s.shard * rows + s.row for s in slots}, shards * rows)
                # A row without a request sees one column, so that its weights are numbers.
                made[made.sum(1) == 0, :1] = 1
                given[name] = made
            else:
                parts = {s: self._kept[s][1][name] for s in slots}
                mine = {s: s.row for s in slots if s.shard == own}
                values[name] = to_ort(_padded(parts, mine, rows))
        return Supply(values, given, shapes)

    @property
    def bytes(self) -> int:
        """The bytes of what is kept for each request."""
        return sum(a.nbytes for _, arrays in self._kept.values() for a in arrays.values())


def _padded(parts: dict[Slot, Array], places: dict[Slot, int], rows: int) -> Array:
    """Returns the first rows of arrays at their places, in an array as long as the longest."""
    sizes = np.max([part.shape[1:] for part in parts.values()], axis=0).tolist()
    made = np.zeros((rows, *sizes), next(iter(parts.values())).dtype)
    for slot, place in places.items():
        part = parts[slot][0]
        made[place][tuple(slice(size) for size in part.shape)] = part
    return made

"""A program that runs once before a decoder, on one rank; its results stay on the device.

Its outputs are inputs of the decoder in every step, in the sharding in which it made them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import COUNTERS, ProgramEntry, TensorEntry
from onnxpar_format.expressions import evaluate
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.executor import Executor
from onnxpar_runtime.generation.buffers import repeat_rows
from onnxpar_runtime.inputs import Feeds, Inputs
from onnxpar_runtime.loader import Loader
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.run_values import Given

Array = NDArray[Any]
Tokens = Sequence[int]


@dataclass(frozen=True)
class Supply:
    """What other programs give a decoder for a batch.

    Attributes:
        values: By input of the decoder the rank's shard on its device, an OrtValue.
        given: By input of the decoder the whole array of an input that both programs take.
        shapes: The global shape of each of these inputs.
    """

    values: Mapping[str, Any]
    given: Mapping[str, Array]
    shapes: Mapping[str, tuple[int, ...]]


NOTHING = Supply({}, {}, {})
"""For a decoder that needs no other program."""


def repeated(supply: Supply, count: int, place: tuple[str, int]) -> Supply:
    """Returns the inputs of a decoder in which each row of a batch is repeated, side by side.

    Args:
        supply: The inputs of the batch.
        count: The number of equal rows.
        place: Name and number of the device, which the values do not leave.
    """
    values = {name: repeat_rows(value, count, place) for name, value in supply.values.items()}
    given = {name: np.repeat(array, count, 0) for name, array in supply.given.items()}
    shapes = {name: (n * count, *rest) for name, (n, *rest) in supply.shapes.items()}
    return Supply(values, given, shapes)


class Encoder:
    """The program that supplies inputs of a decoder.

    Args:
        manifest: The manifest.
        decoder: The decoder's program.
        loader: Makes the session.

    Attributes:
        program: The program.
        executor: The rank's graph.

    Raises:
        InputError: Several programs supply inputs.
        DirectoryError: As `Executor`.
        LaunchError: As `Executor`.
    """

    def __init__(self, manifest: Manifest, decoder: ProgramEntry, loader: Loader) -> None:
        """Loads the rank's graph."""
        (name,) = _one_source(decoder)
        self._pairs = decoder.supplied
        self.program = manifest.program(name)
        self.executor = Executor(manifest, name, loader)
        self._inputs = Inputs(manifest, name, loader.rank.index)
        self._shapes = {spec.name: spec.shape for spec in self.program.outputs}

    def prepare(self, feeds: Mapping[str, Array]) -> Feeds:
        """Returns this rank's shards of whole arrays.

        Raises:
            InputError: An input is missing, unknown, of the wrong dtype or shape, or its sizes do
                not fit those of another.
            SymbolValueError: A symbol's value violates its constraint.
        """
        return self._inputs.shard_inputs(feeds)

    def run(self, feeds: Mapping[str, Array], inputs: Feeds) -> Supply:
        """Runs the program once; all ranks must call it.

        Args:
            feeds: The whole arrays.
            inputs: This rank's shards of them.

        Raises:
            RankError: onnxruntime failed on this rank, or another rank did.
        """
        counters = dict.fromkeys(COUNTERS, 0)
        made = self.executor.run_part(Given(inputs, counters), read=False).handed
        given = {p.input: np.asarray(feeds[p.value]) for p in self._pairs if p.given}
        shapes = {name: array.shape for name, array in given.items()}
        for pair in self._pairs:
            if not pair.given:
                sizes = self._shapes[pair.value]
                shapes[pair.input] = tuple(evaluate(size, inputs.values) for size in sizes)
        values = {p.input: made[p.value] for p in self._pairs if not p.given}
        return Supply(values, given, shapes)

    def close(self) -> None:
        """Frees the session."""
        self.executor.close()


class Reader:
    """An encoder that reads the prompts of requests, one at a time.

    Args:
        encoder: The encoder.
        start: The tokens with which the decoder begins.

    Attributes:
        encoder: The encoder.
        start: The tokens with which the decoder begins.

    Raises:
        InputError: There are no such tokens.
    """

    def __init__(self, encoder: Encoder, start: Sequence[int]) -> None:
        """Has read nothing."""
        if not start:
            raise InputError(
                "--start: expected the token with which the decoder begins, got none (it is "
                "decoder_start_token_id in the model's configuration)"
            )
        self.encoder, self.start = encoder, tuple(map(int, start))

    def prepare(self, prompt: Tokens, rows: int) -> tuple[dict[str, Array], Feeds]:
        """Returns the whole arrays of a prompt in a number of equal rows, and their shards.

        Raises:
            InputError: As `Encoder.prepare`.
            SymbolValueError: As `Encoder.prepare`.
        """
        feeds = token_feeds(self.encoder.program, [prompt] * rows)
        return feeds, self.encoder.prepare(feeds)

    def run(self, prompt: Tokens, rows: int) -> Supply:
        """Reads a prompt in a number of equal rows; all ranks must call it.

        Raises:
            RankError: As `Encoder.run`.
        """
        return self.encoder.run(*self.prepare(prompt, rows))


def _one_source(decoder: ProgramEntry) -> set[str]:
    sources = {pair.source for pair in decoder.supplied}
    if len(sources) != 1:
        raise InputError(
            f"program {decoder.name!r}: expected inputs from one other program, got "
            f"{sorted(sources)}"
        )
    return sources


def tokens_input(program: ProgramEntry) -> tuple[TensorEntry, TensorEntry | None] | None:
    """Returns an encoder's inputs for tokens and their mask; None if it takes no tokens."""
    integers = [s for s in program.inputs if _kind(s) == "i" and len(s.shape) == 2]
    masks = [s for s in program.inputs if "mask" in s.name and len(s.shape) == 2]
    tokens = [spec for spec in integers if spec not in masks]
    if len(tokens) != 1 or len(masks) > 1 or len(program.inputs) > 1 + len(masks):
        return None
    return tokens[0], masks[0] if masks else None


def token_feeds(program: ProgramEntry, texts: Sequence[Tokens]) -> dict[str, Array]:
    """Returns an encoder's inputs for tokens of different lengths, padded on the right.

    Raises:
        InputError: The encoder takes other inputs, a text is empty, or the lengths differ and
            nothing says what is padding.
    """
    found = tokens_input(program)
    if found is None:
        names = [spec.name for spec in program.inputs]
        raise InputError(
            f"program {program.name!r}: expected an encoder of tokens, got one with the inputs "
            f"{names}; give them with --inputs"
        )
    for index, text in enumerate(texts):
        if not len(text):
            raise InputError(f"prompt {index}: expected at least one token, got none")
    tokens, mask = found
    lengths = _lengths(texts)
    if mask is None and len(set(lengths)) > 1:
        raise InputError(
            "prompts: expected equal lengths, since the encoder has no mask, got "
            f"{sorted({*lengths})}"
        )
    ids = np.zeros((len(texts), max(lengths, default=0)), DTYPES[tokens.dtype].dtype)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    feeds = {tokens.name: ids}
    if mask is not None:
        real = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
        feeds[mask.name] = real.astype(DTYPES[mask.dtype].dtype)
    return feeds


def padded(program: ProgramEntry, feeds: Mapping[str, Array], rows: int) -> dict[str, Array]:
    """Returns an encoder's inputs with more rows, which equal the last one.

    Args:
        program: The encoder.
        feeds: Its inputs, as whole arrays.
        rows: The number of rows to add.
    """
    batches = {spec.name for spec in program.inputs if spec.shape and _named(spec.shape[0])}
    return {
        name: np.concatenate([array, *[array[-1:]] * rows]) if name in batches else array
        for name, array in feeds.items()
    }


def _named(size: object) -> bool:
    return isinstance(size, str)


def _lengths(texts: Iterable[Tokens]) -> list[int]:
    return [len(text) for text in texts]


def _kind(spec: TensorEntry) -> str:
    return DTYPES[spec.dtype].dtype.kind

"""Random inputs for an encoder, and what its undivided program leaves for the decoder."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.entries import ProgramEntry
from onnxpar_format.expressions import bare_name, evaluate
from onnxpar_runtime.generation.encoder import token_feeds, tokens_input
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.symbol_checks import symbol_values
from onnxpar_runtime.verify.cases import symbols_of
from onnxpar_runtime.verify.random_feeds import random_feeds
from onnxpar_runtime.verify.references import Undivided, open_reference, reference_run

Array = NDArray[Any]
_LENGTH = 16
"""Tokens of the longest text, and the size of other dims that are open."""


@dataclass(frozen=True)
class Encoded:
    """What an encoder reads and leaves.

    Attributes:
        left: For each sequence the inputs of the decoder that the encoder supplies.
        feeds: The whole arrays of the encoder's inputs; None without an encoder.
        runs: The values of the symbols in its run, by the name of the program.
    """

    left: Sequence[Mapping[str, Array]]
    feeds: Mapping[str, Array] | None = None
    runs: Mapping[str, Sequence[Mapping[str, int]]] = field(default_factory=dict)


def encode(
    manifest: Manifest,
    decoder: ProgramEntry,
    models: Undivided,
    rows: int,
    rng: np.random.Generator,
    custom_ops: Sequence[str | Path],
) -> Encoded:
    """Runs the undivided encoder of a decoder, if there is one, one sequence at a time.

    Args:
        manifest: The manifest.
        decoder: The decoder's program.
        models: The undivided model of each program, or a directory for one device.
        rows: Number of sequences.
        rng: Draws the inputs.
        custom_ops: Further custom-op libraries.

    Raises:
        OnnxparRuntimeError: There is no undivided encoder, or it fails.
    """
    if not decoder.supplied:
        return Encoded([{}] * rows)
    program = manifest.program(decoder.supplied[0].source)
    feeds = _inputs(manifest, program, rows, rng)
    text = tokens_input(program)
    mask = None if text is None or text[1] is None else text[1].name
    left = []
    with closing(open_reference(models, manifest, program.name, custom_ops)) as reference:
        for row in range(rows):
            given = {name: array[row : row + 1] for name, array in feeds.items()}
            if mask is not None:
                # Without padding, which the undivided program might not leave out.
                length = int(given[mask].sum())
                given = {name: array[:, :length] for name, array in given.items()}
            made = reference_run(reference, given, {"sequence": row})
            left.append({p.input: (given if p.given else made)[p.value] for p in decoder.supplied})
    shapes = {name: array.shape for name, array in feeds.items()}
    runs = {program.name: [symbol_values(manifest.symbols, program, shapes)]}
    return Encoded(left, feeds, runs)


def _inputs(
    manifest: Manifest, program: ProgramEntry, rows: int, rng: np.random.Generator
) -> dict[str, Array]:
    """Returns random inputs; texts differ in length if a mask tells what is padding."""
    text = tokens_input(program)
    if text is not None:
        tokens, mask = text
        sizes = [r.high for r in program.index_ranges if r.input == tokens.name]
        high = min([evaluate(size, {}) + 1 for size in sizes], default=2)
        lengths = [_LENGTH - 3 * (row % 4) if mask is not None else _LENGTH for row in range(rows)]
        return token_feeds(program, [rng.integers(0, high, n).tolist() for n in lengths])
    values = {
        name: (symbol.admissible(_LENGTH, 1) or symbol.admissible(1, 1))[0]
        for name, symbol in symbols_of(manifest, program).items()
    }
    values |= {name: rows for spec in program.inputs if (name := bare_name(spec.shape[0]))}
    return random_feeds(program, values, {}, rng)

"""What each input and output of a language model is for, from its name, type and shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import ProgramEntry, TensorEntry
from onnxpar_runtime.errors import InputError

Array = NDArray[Any]


@dataclass(frozen=True)
class Roles:
    """The inputs and outputs of a program that predicts the next token.

    Attributes:
        tokens: The new tokens, integers [batch, sequence].
        mask: Which tokens count, earlier ones included, integers or bool [batch, total]; None if
            the program takes no mask.
        positions: The place of each new token in its sequence, integers [..., batch, sequence], or
            [sequence] if it is one for all sequences; None if the program takes none.
        logits: The output that scores the next token, floats [batch, sequence, vocabulary] or
            [batch, vocabulary].
        rest: The other inputs that are not states, and that no other program supplies.
    """

    tokens: TensorEntry
    mask: TensorEntry | None
    positions: TensorEntry | None
    logits: TensorEntry
    rest: tuple[TensorEntry, ...]

    @property
    def width(self) -> int | None:
        """The number of tokens of each sequence in every run; None if it is open."""
        size = self.tokens.shape[1]
        return size if isinstance(size, int) else None

    @property
    def given(self) -> tuple[TensorEntry, ...]:
        """The inputs that change from step to step, besides states."""
        return tuple(x for x in (self.tokens, self.mask, self.positions) if x is not None)


def roles_of(program: ProgramEntry) -> Roles:
    """Returns the roles of a program's inputs and outputs.

    Raises:
        InputError: The program has no tokens or no logits, or several, or a role has another shape.
    """
    carried = {state.input for state in program.carried}
    carried |= {pair.input for pair in program.supplied}
    inputs = [spec for spec in program.inputs if spec.name not in carried]
    mask = _one([spec for spec in inputs if "mask" in spec.name], "attention mask")
    positions = _one([spec for spec in inputs if "position" in spec.name], "positions")
    named = [spec for spec in inputs if spec.name in ("input_ids", "tokens", "ids")]
    integers = [
        spec
        for spec in inputs
        if spec not in (mask, positions) and _kind(spec) == "i" and len(spec.shape) == 2
    ]
    tokens = _one(named or integers, "tokens")
    made = {state.output for state in program.carried}
    outputs = [spec for spec in program.outputs if spec.name not in made]
    scores = [spec for spec in outputs if "logits" in spec.name] or [
        spec for spec in outputs if _kind(spec) in "fV"
    ]
    logits = _one(scores, "logits")
    if tokens is None or logits is None:
        what = "no input for tokens" if tokens is None else "no output of logits"
        found = [spec.name for spec in (inputs if tokens is None else outputs)]
        raise InputError(
            f"program {program.name!r} cannot generate: it has {what} among {found} (a decoder "
            "has integers input_ids [batch, sequence] and floats logits [batch, sequence, vocab])"
        )
    _check(tokens, (2,))
    if mask is not None:
        _check(mask, (2,))
    if positions is not None:
        _check(positions, (1, 2, 3))
    _check(logits, (2, 3))
    used = (tokens, mask, positions)
    return Roles(
        tokens, mask, positions, logits, tuple(spec for spec in inputs if spec not in used)
    )


class Places(Protocol):
    """Where the new tokens of sequences side by side are."""

    @property
    def padded(self) -> bool:
        """Whether the sequences differ in length."""

    def mask(self) -> Array:
        """Returns which columns count, bool [batch, total]."""

    def positions(self, new: int) -> Array:
        """Returns the places of the last `new` columns in their sequences, [batch, new]."""


def feeds_of(roles: Roles, sequences: Places, tokens: Array) -> dict[str, Array]:
    """Returns the whole arrays of the inputs that change from step to step.

    Raises:
        InputError: Sequences differ in length, and positions are one for all of them.
    """
    feeds = {roles.tokens.name: tokens}
    if roles.mask is not None:
        feeds[roles.mask.name] = sequences.mask()
    if roles.positions is not None:
        spec = roles.positions
        positions = sequences.positions(tokens.shape[1])
        if len(spec.shape) == 1:
            if sequences.padded:
                raise InputError(
                    f"prompts: expected equal lengths, since {spec.name!r} has one position for "
                    "all sequences, got different ones"
                )
            positions = positions[0]
        elif len(spec.shape) == 3:
            count = spec.shape[0] if isinstance(spec.shape[0], int) else 1
            positions = np.broadcast_to(positions, (count, *positions.shape))
        feeds[spec.name] = positions
    return feeds


def _kind(spec: TensorEntry) -> str:
    return DTYPES[spec.dtype].dtype.kind


def _one(specs: Sequence[TensorEntry], what: str) -> TensorEntry | None:
    if len(specs) > 1:
        names = [spec.name for spec in specs]
        raise InputError(f"{what}: expected one of the program's inputs or outputs, got {names}")
    return specs[0] if specs else None


def _check(spec: TensorEntry, ranks: Sequence[int]) -> None:
    if len(spec.shape) not in ranks:
        expected = " or ".join(str(n) for n in ranks)
        raise InputError(
            f"{spec.name!r}: a program that generates needs {expected} dims there, got "
            f"{list(spec.shape)}"
        )

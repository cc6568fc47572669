"""Compares generated tokens, and the logits they were chosen from, with the undivided program's.

The undivided program generates from one prompt at a time, without padding, each output that is a
state fed to the next run as it is. The ranks generate from all prompts at once. Where the two best
logits are closer than logits may differ, either token is right; the sequences then differ, and are
compared no further.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import ProgramEntry
from onnxpar_format.expressions import ExpressionError, bare_name, evaluate
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.generator import Generator, Step
from onnxpar_runtime.generation.prompts import Sequences
from onnxpar_runtime.generation.roles import Roles, feeds_of, roles_of
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.options import parse_pairs
from onnxpar_runtime.verify.encoded import encode
from onnxpar_runtime.verify.findings import Case, Findings
from onnxpar_runtime.verify.references import Reference, Undivided, open_reference, reference_run

Array = NDArray[Any]
Tokens = Sequence[int]
LENGTHS = (1, 7, 64)
"""Tokens of the prompts, unless the longest is given."""


def verify_generation(
    directory: str | Path, models: Undivided, count: int, options: VerifyOptions
) -> list[Case]:
    """Returns the comparison of greedy steps from random prompts.

    Args:
        directory: The directory of a decoder with a cache.
        models: The undivided ONNX model of each program, or a directory for one device.
        count: New tokens of each prompt.
        options: What to compare and how strictly.

    Raises:
        OnnxparRuntimeError: As `onnxpar_runtime.verify.compare.verify`; or the program cannot
            generate.
    """
    manifest = Manifest.load(directory)
    manifest.verify_files()
    program = manifest.program("model")
    roles = roles_of(program)
    longest = LENGTHS[-1] if options.prompt_tokens is None else options.prompt_tokens
    lengths = [min(length, longest) for length in (*LENGTHS[:-1], longest)]
    if roles.mask is None:
        # What an encoder read may still differ in length.
        lengths = [longest] * (len(lengths) if program.supplied else 1)
    rng = np.random.default_rng(options.seed)
    prompts = [rng.integers(0, _vocabulary(program, roles), n).tolist() for n in lengths]
    encoded = encode(manifest, program, models, len(prompts), rng, options.custom_ops)
    with closing(open_reference(models, manifest, "model", options.custom_ops)) as reference:
        expected = [
            _greedy(reference, program, roles, prompt, count, left)
            for prompt, left in zip(prompts, encoded.left, strict=True)
        ]
    found = Findings(options)
    with Ranks(
        directory,
        Generator,
        ort_options=parse_pairs(options.ort),
        custom_ops=options.custom_ops,
    ) as ranks:
        ranks.reset_counters()

        def steps(member: Generator) -> list[Step]:
            made = member.steps(prompts, max_new_tokens=count, logits=True, encoder=encoded.feeds)
            return list(made)

        made = ranks.on_each(steps)
        runs = [values for step in made[0] for values in step.runs]
        found.sent({"model": runs, **encoded.runs}, ranks)
    for index, one in enumerate(made[1:], 1):
        if [step.tokens for step in one] != [step.tokens for step in made[0]]:
            found.problems.append(f"rank {index}: expected the tokens of rank 0, got others")
    for row in range(len(prompts)):
        _compare(found, roles, row, expected[row], made[0])
    return [found.case({"prompts": len(prompts), "longest": longest, "new_tokens": count})]


def _vocabulary(program: ProgramEntry, roles: Roles) -> int:
    """Returns the number of tokens that the program takes."""
    sizes = [r.high for r in program.index_ranges if r.input == roles.tokens.name]
    try:
        return min([evaluate(roles.logits.shape[-1], {}), *(evaluate(s, {}) + 1 for s in sizes)])
    except ExpressionError as error:
        raise InputError(f"the number of tokens of the vocabulary is not known: {error}") from None


def _greedy(
    reference: Reference,
    program: ProgramEntry,
    roles: Roles,
    prompt: Tokens,
    count: int,
    supplied: Mapping[str, Array],
) -> list[Array]:
    """Returns the logits of each step; the best token is the input of the next step."""
    if roles.rest:
        names = [spec.name for spec in roles.rest]
        raise InputError(
            f"--generate: expected only tokens, mask, positions and states as inputs, got {names}"
        )
    specs = {spec.name: spec for spec in program.inputs}
    batch = bare_name(roles.tokens.shape[0])
    held: dict[str, Array] = {}
    for state in program.carried:
        spec = specs[state.input]
        sizes = {} if state.grows is None else {bare_name(spec.shape[state.grows]) or "": 0}
        try:
            shape = tuple(evaluate(size, sizes | {batch or "": 1}) for size in spec.shape)
        except ExpressionError as error:
            raise InputError(f"state {spec.name!r}: its size is not known: {error}") from None
        held[spec.name] = np.zeros(shape, DTYPES[spec.dtype].dtype)
    sequence = Sequences([prompt], left=True)
    parts, found = list(sequence.parts(roles.width)), []
    for _ in range(count):
        for places, tokens in parts:
            given = feeds_of(roles, places, tokens)
            feeds = {name: a.astype(DTYPES[specs[name].dtype].dtype) for name, a in given.items()}
            feeds |= {**held, **supplied}
            outputs = reference_run(reference, feeds, {"length": sequence.total})
            held = {state.input: outputs[state.output] for state in program.carried}
        logits = outputs[roles.logits.name].astype(np.float64)
        found.append(logits[0] if logits.ndim == 2 else logits[0, -1])
        sequence.append()
        parts = [(sequence, found[-1].argmax(keepdims=True)[None])]
    return found


def _compare(
    found: Findings, roles: Roles, row: int, expected: Sequence[Array], made: Sequence[Step]
) -> None:
    for number, (logits, step) in enumerate(zip(expected, made, strict=True)):
        assert step.logits is not None
        where = f"prompt {row}, new token {number}: "
        want = {roles.logits.name: logits}
        got: Mapping[str, Array] = {roles.logits.name: step.logits[row].astype(np.float64)}
        found.outputs([roles.logits], want, got, where)
        best = int(logits.argmax())
        if step.tokens[row] != best:
            scale = float(np.abs(logits).max())
            limit = found.options.atol + found.rtol(roles.logits.dtype) * scale
            margin = float(logits[best] - logits[step.tokens[row]])
            if margin > 2 * limit:
                found.problems.append(f"{where}expected token {best}, got {step.tokens[row]}")
            return

"""`generate`, as the command line and `mpirun python` scripts start it."""

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from numpy.typing import NDArray

from onnxpar_format.entries import ProgramEntry
from onnxpar_format.options import BeamSearch, Execution, GenerationRun, Sampling
from onnxpar_format.records import FormatError, load_json
from onnxpar_runtime.agree import together
from onnxpar_runtime.commands import begin, interruptible, opened, start, tell, traced
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.beams import Hypothesis
from onnxpar_runtime.generation.candidates import Likelihood
from onnxpar_runtime.generation.encoder import token_feeds
from onnxpar_runtime.generation.generator import Generator, Step, Stop
from onnxpar_runtime.generation.text import Stream, Tokenizer
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.npz import read_npz

log = logging.getLogger(__name__)
_DEFAULT = Execution()
Array = NDArray[Any]


def generate(directory: str | Path, what: GenerationRun, how: Execution = _DEFAULT) -> int:
    """Generates and prints new tokens for prompts; the body of one rank.

    Args:
        directory: The directory of a decoder with a cache.
        what: The prompts, and how tokens are chosen.
        how: How to run.

    Returns:
        The exit code. Errors have been printed.
    """
    rank = start(how)

    def body() -> None:
        manifest = begin(rank, "generate", directory, how)

        encoder = encoder_of(manifest)

        def prepare() -> tuple[Tokenizer | None, list[list[int]], dict[str, Array] | None]:
            check_options(what)
            tokenizer = None if what.tokenizer is None else Tokenizer(what.tokenizer)
            return tokenizer, *given(what, tokenizer, encoder)

        tokenizer, prompts, feeds = together(rank, prepare)
        with traced(rank, "generate", manifest, how):
            generator = opened(Generator, rank, manifest, how)
            out = sys.stdout if rank.index == 0 else None
            printer = _Printer(out, what, tokenizer, len(prompts))
            stop = None if tokenizer is None or not what.stop else _stop(tokenizer, what.stop)
            most, eos = what.max_new_tokens, _eos(what, tokenizer)
            tell(rank, generator.notices)
            printer.begin()
            if what.search.beams > 1:
                printer.searched(
                    generator.beam_search(
                        prompts, what.search, max_new_tokens=most, eos=eos, encoder=feeds
                    )
                )
            else:
                for step in generator.steps(
                    prompts,
                    max_new_tokens=most,
                    sampling=what.sampling,
                    eos=eos,
                    stop=stop,
                    encoder=feeds,
                    chunk=what.chunk,
                    logprobs=what.logprobs,
                ):
                    printer.step(step)
                printer.end()
        generator.close()

    return interruptible(rank, body)


def _eos(what: GenerationRun, tokenizer: Tokenizer | None) -> frozenset[int]:
    return frozenset(what.eos or (() if tokenizer is None else tokenizer.eos))


def check_options(what: GenerationRun) -> None:
    """Checks that options go together.

    Raises:
        InputError: They do not.
    """
    if what.logprobs is not None and not what.as_json:
        raise InputError("--logprobs: expected --json as well, got none")
    search, plain = what.search, BeamSearch()
    if search.beams == 1:
        if search != plain:
            raise InputError(
                "--length-penalty, --early-stopping: expected --beams of at least 2 as well"
            )
        return
    for option, given in (
        ("--temperature, --top-k, --top-p, --repetition-penalty, --seed",
         what.sampling != Sampling()),
        ("--stop", what.stop),
        ("--logprobs", what.logprobs is not None),
    ):  # fmt: skip
        if given:
            raise InputError(f"{option}: expected no --beams, since beam search has no such option")


def encoder_of(manifest: Manifest) -> ProgramEntry | None:
    """Returns the program that supplies inputs of the decoder; None if there is none."""
    supplied = manifest.program("model").supplied
    return manifest.program(supplied[0].source) if supplied else None


def given(
    what: GenerationRun, tokenizer: Tokenizer | None, encoder: ProgramEntry | None
) -> tuple[list[list[int]], dict[str, Array] | None]:
    """Returns the tokens of the decoder's prompts, and the encoder's inputs if there is one.

    Raises:
        InputError: As `prompts_of`; or the options are not those of this kind of model.
    """
    if encoder is None:
        for option, found in (("--inputs", what.inputs), ("--start", what.start)):
            if found:
                raise InputError(f"{option}: only for an encoder-decoder, got a decoder alone")
        return prompts_of(what, tokenizer), None
    start = list(what.start or (() if tokenizer is None else tokenizer.start))
    if what.inputs is None:
        texts = prompts_of(what, tokenizer)
        return [list(_started(start)) for _ in texts], token_feeds(encoder, texts)
    feeds = read_npz(what.inputs)
    if what.tokens is not None or what.prompt:
        return [list(what.start) + prompt for prompt in prompts_of(what, tokenizer)], feeds
    rows = {array.shape[0] for array in feeds.values() if array.ndim}
    if len(rows) != 1:
        raise InputError(
            f"--inputs {what.inputs}: expected arrays with one number of rows, got {sorted(rows)}"
        )
    return [list(_started(start)) for _ in range(*rows)], feeds


def _started(start: Sequence[int]) -> Sequence[int]:
    if not start:
        raise InputError(
            "--start: expected the token with which the decoder begins, got none (it is "
            "decoder_start_token_id in the model's configuration)"
        )
    return start


def prompts_of(what: GenerationRun, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Returns the tokens of the prompts.

    Raises:
        InputError: There are none, texts without a tokenizer, or the file is not a list of lists of
            tokens.
    """
    if (what.tokens is None) == (not what.prompt):
        got = "neither" if what.tokens is None else "both"
        raise InputError(f"prompts: expected --tokens or --prompt, got {got}")
    if tokenizer is None and (what.prompt or what.stop):
        given = "--prompt" if what.prompt else "--stop"
        raise InputError(f"{given}: expected --tokenizer as well, got none")
    if what.chat or what.system is not None:
        return _chats(what, tokenizer)
    if what.tokens is None:
        assert tokenizer is not None
        return [tokenizer.encode(text) for text in what.prompt]
    try:
        found = load_json(what.tokens, f"{what.tokens.name}: No such file")
    except FormatError as error:
        raise InputError(f"--tokens {error}") from None
    right = isinstance(found, list) and all(
        isinstance(prompt, list)
        and all(isinstance(t, int) and not isinstance(t, bool) and 0 <= t < 1 << 31 for t in prompt)
        for prompt in found
    )
    if not right:
        raise InputError(
            f"--tokens {what.tokens}: expected a list of prompts, each a list of numbers "
            "from 0 to 2147483647"
        )
    prompts: list[list[int]] = found
    return prompts


def _chats(what: GenerationRun, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Returns the tokens of chats with one message of a user each.

    Raises:
        InputError: There are no messages, or no template, or it refuses them.
    """
    if not what.chat:
        raise InputError("--system: expected --chat as well, got none")
    if tokenizer is None or not what.prompt:
        raise InputError("--chat: expected --prompt and --tokenizer as well, got none")
    system = [] if what.system is None else [{"role": "system", "content": what.system}]
    return [tokenizer.chat([*system, {"role": "user", "content": text}]) for text in what.prompt]


def _stop(tokenizer: Tokenizer, texts: Sequence[str]) -> Stop:
    """Returns whether the end of a sequence's text is one of some texts."""

    def stops(row: int, tokens: Sequence[int]) -> bool:
        del row
        text = tokenizer.decode(tokens)
        return any(end in text for end in texts)

    return stops


class _Printer:
    """Prints tokens as they come, or at the end, on rank 0."""

    def __init__(
        self, out: TextIO | None, what: GenerationRun, tokenizer: Tokenizer | None, prompts: int
    ) -> None:
        self._out, self._what, self._tokenizer = out, what, tokenizer
        self._found: list[list[int]] = [[] for _ in range(prompts)]
        self._likely: list[list[Likelihood]] = [[] for _ in range(prompts)]
        self._streams = out is not None and prompts == 1 and not what.as_json
        self._stream = None if tokenizer is None else Stream(tokenizer)
        self._begun = self._last = self._first = 0.0
        self._steps = 0

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def step(self, step: Step) -> None:
        self._last = time.perf_counter()
        if not self._steps:
            self._first = self._last
        self._steps += 1
        for row, token in step.tokens.items():
            self._found[row].append(token)
        for row, likelihood in (step.likelihoods or {}).items():
            self._likely[row].append(likelihood)
        if self._streams and self._out is not None:
            (token,) = step.tokens.values()
            text = f"{token} " if self._stream is None else self._stream.add(token)
            self._out.write(text)
            self._out.flush()

    def end(self) -> None:
        first = 1000 * (self._first - self._begun)
        each = 1000 * (self._last - self._first) / (self._steps - 1) if self._steps > 1 else None
        found: dict[str, Any] = {"first_token_ms": first, "token_ms": each}
        if self._what.logprobs is not None:
            found["logprobs"] = [[asdict(one) for one in row] for row in self._likely]
        count = sum(len(tokens) for tokens in self._found)
        later = "" if each is None else f", then {each:.2f} ms per token"
        seconds = self._last - self._begun
        times = f"first token {first:.1f} ms{later}; {count} tokens, {count / seconds:.1f} tokens/s"
        self._write(found, times)

    def searched(self, found: Sequence[Sequence[Hypothesis]]) -> None:
        """Prints what beam search has found."""
        seconds = time.perf_counter() - self._begun
        self._streams = False
        self._found = [list(row[0].tokens) for row in found]
        beams = [[asdict(one) for one in row] for row in found]
        self._write({"beams": beams, "seconds": seconds}, f"{seconds:.2f} s")

    def _write(self, more: dict[str, Any], times: str) -> None:
        """Prints all sequences, unless they have been printed, and times to stderr.

        Args:
            more: Further entries of the JSON.
            times: The text for stderr.
        """
        if self._out is None:
            return
        tokenizer = self._tokenizer
        if self._what.as_json:
            found = {"sequences": self._found, **more}
            if tokenizer is not None:
                found["texts"] = [tokenizer.decode(tokens) for tokens in self._found]
            self._out.write(json.dumps(found) + "\n")
        elif self._streams:
            self._out.write("\n")
        else:
            for row, tokens in enumerate(self._found):
                text = " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)
                self._out.write(f"{row}: {text}\n")
        self._out.flush()
        sys.stderr.write(f"{times}\n")

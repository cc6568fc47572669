"""`Generator`: new tokens for prompts, on all ranks of a directory."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import ProgramEntry
from onnxpar_format.options import BeamSearch, Sampling
from onnxpar_format.trace import STEP
from onnxpar_runtime.agree import together
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.gather import gather_to_root
from onnxpar_runtime.generation.beam_steps import BeamSteps
from onnxpar_runtime.generation.beams import Hypothesis, check_search
from onnxpar_runtime.generation.candidates import Likelihood, likelihoods
from onnxpar_runtime.generation.decoder import Decoder
from onnxpar_runtime.generation.encoder import NOTHING, Encoder, Reader, Supply, padded
from onnxpar_runtime.generation.prefill import CHUNK as PROMPT_CHUNK
from onnxpar_runtime.generation.prefill import Prefill
from onnxpar_runtime.generation.prompts import Sequences
from onnxpar_runtime.generation.requests import CHUNK, GREEDY, Requests
from onnxpar_runtime.generation.roles import feeds_of
from onnxpar_runtime.generation.sampling import NO_TOKEN, Chooser, Draws, check, check_logprobs
from onnxpar_runtime.generation.slots import Room, batch_shards, in_turns, row_size
from onnxpar_runtime.generation.states import capacity
from onnxpar_runtime.generation.steps import Batch, begin, last_scores
from onnxpar_runtime.inputs import Feeds
from onnxpar_runtime.opened import Opened, Opening

Array = NDArray[Any]
Stop = Callable[[int, Sequence[int]], bool]
"""Whether a sequence, of this number and with these new tokens, is complete."""


@dataclass(frozen=True)
class Step:
    """One new token of each sequence.

    Attributes:
        tokens: By number of the sequence; sequences that were complete before are not in it.
        done: The sequences that these tokens complete.
        runs: Values of the symbols in each run since the last step; the last run scored them.
        logits: On rank 0 the logits from which they were chosen, [batch, vocabulary], if they were
            asked for.
        likelihoods: How likely each of these tokens was, by number of the sequence, if asked for.
    """

    tokens: Mapping[int, int]
    done: frozenset[int]
    runs: Sequence[Mapping[str, int]]
    logits: Array | None = None
    likelihoods: Mapping[int, Likelihood] | None = None


class Generation(TypedDict, total=False):
    """When `Generator` ends a sequence and how it continues it, as keyword arguments.

    Attributes:
        max_new_tokens: The largest number of new tokens for each prompt; 128 by default.
        sampling: How tokens are chosen; by default the most probable one.
        eos: Tokens that complete a sequence; they are the last of what is returned.
        stop: Further reasons to complete a sequence; it must say the same on every rank.
        constants: Whole arrays of further inputs, which stay the same in all steps.
        encoder: Whole arrays of the encoder's inputs, with a row for each prompt.
        chunk: The largest number of tokens of each prompt in a run; longer ones take several runs.
    """

    max_new_tokens: int
    sampling: Sampling
    eos: Collection[int]
    stop: Stop | None
    constants: Mapping[str, Array] | None
    encoder: Mapping[str, Array] | None
    chunk: int


class Generator(Opened):
    """A language model of a directory, ready to generate; every rank makes one.

    Its states (the cache of keys and values) stay on the device of each rank, sharded as they were
    planned. Only the best tokens of each shard of the vocabulary travel after a step. If the
    directory has an encoder, it runs once for each batch, and its results stay there too.

    Args:
        directory: The directory of a decoder with a cache.
        program: Which of its programs.
        opening: How to open the directory, see `Opening`.

    Raises:
        InputError: The program does not predict tokens, or has no states.
        DirectoryError: As `Session`.
        LaunchError: As `Session`.
    """

    def __init__(
        self, directory: str | Path, *, program: str = "model", **opening: Unpack[Opening]
    ) -> None:
        """Loads the rank's graphs."""
        super().__init__(directory, measured=False, **opening)
        self._decoder = Decoder(self.manifest, program, self._loader)
        self._roles = self._decoder.roles
        taken = self._decoder.program
        self._encoder = Encoder(self.manifest, taken, self._loader) if taken.supplied else None
        self._batch: Batch | None = None
        # A batch whose captured steps the next one may replay, and its number of sequences.
        self._idle: tuple[int, Batch] | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], **how: Unpack[Generation]
    ) -> list[list[int]]:
        """Returns the new tokens of each prompt, on every rank; every rank must call it alike.

        Args:
            prompts: The tokens of each prompt; their lengths may differ.
            how: See `Generation`.

        Raises:
            InputError: As `steps`.
            SymbolValueError: As `steps`.
            RankError: As `steps`.
        """
        found: list[list[int]] = [[] for _ in prompts]
        for step in self.steps(prompts, **how):
            for row, token in step.tokens.items():
                found[row].append(token)
        return found

    def steps(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        eos: Collection[int] = (),
        stop: Stop | None = None,
        constants: Mapping[str, Array] | None = None,
        encoder: Mapping[str, Array] | None = None,
        chunk: int = PROMPT_CHUNK,
        logits: bool = False,
        logprobs: int | None = None,
    ) -> Iterator[Step]:
        """Yields the new tokens as they come, on every rank; every rank must use all of them alike.

        Args:
            prompts: As `generate`.
            max_new_tokens: As in `Generation`.
            sampling: As in `Generation`.
            eos: As in `Generation`.
            stop: As in `Generation`.
            constants: As in `Generation`.
            encoder: As in `Generation`.
            chunk: As in `Generation`.
            logits: Whether to bring the logits of each step to rank 0.
            logprobs: If given, steps have the log-probabilities of their tokens and of this many of
                the likeliest ones, by the logits as the model gives them.

        Raises:
            InputError: A prompt, a setting or an input does not fit.
            SymbolValueError: A length violates a constraint on a symbol, such as the longest
                sequence of a table of positions.
            RankError: Another rank cannot go on.
        """
        decoder = self._decoder

        def prepare() -> tuple[Sequences, Prefill, Batch]:
            check(sampling)
            check_logprobs(logprobs)
            if max_new_tokens < 1:
                raise InputError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
            sequences = Sequences(prompts, left=not decoder.in_place)
            if sequences.padded and self._roles.mask is None:
                raise InputError(
                    "prompts: expected equal lengths, since the model has no attention mask, got "
                    f"{sorted({len(p) for p in prompts})}"
                )
            needed = sequences.total + max_new_tokens - 1
            batch = self._begin(sequences, needed, constants, supply, alike=alike)
            prefill = Prefill(decoder, batch, prompts, sequences, chunk, alike=alike)
            return sequences, prefill, batch

        supply = self._encoded(encoder)
        alike = not constants and supply is NOTHING
        sequences, prefill, batch = together(self.rank, prepare)
        self._batch, self._idle = batch, None
        open_rows = dict.fromkeys(range(len(prompts)))
        new: list[list[int]] = [[] for _ in prompts]
        chooser = None
        for number in range(max_new_tokens):
            began = monotonic_ns()
            runs: list[Mapping[str, int]] = []
            if not number:
                parts, runs = prefill.run()
            for places, tokens in parts:
                local = batch.run(feeds_of(self._roles, places, tokens))
                runs.append(dict(batch.values))
            width = tokens.shape[1]
            if chooser is None:
                share = batch.share()
                draws = [Draws(sampling, row, prompt) for row, prompt in enumerate(prompts)]
                chooser = Chooser(self.rank, share, draws)
            scores = last_scores(local, sequences.last(width), share)
            brought = self._brought(batch.scored(), scores) if logits else None
            chosen = chooser.choose(scores)
            picked = chosen.tolist()
            if NO_TOKEN in picked:
                raise InputError("logits: expected numbers, got NaN").as_agreed()
            likely = None
            if logprobs is not None:
                wanted = [logprobs if row in open_rows else None for row in range(len(prompts))]
                found = likelihoods(self.rank, share, scores, chosen, wanted)
                likely = {row: one for row, one in enumerate(found) if one is not None}
            done = set()
            for row in open_rows:
                token = picked[row]
                new[row].append(token)
                if token in eos or (stop is not None and stop(row, new[row])):
                    done.add(row)
            made = {row: new[row][-1] for row in open_rows}
            self.rank.timeline.add(STEP, f"token {number + 1}", began)
            yield Step(made, frozenset(done), runs, brought, likely)
            for row in done:
                del open_rows[row]
            if not open_rows:
                break
            sequences.append()
            parts = [(sequences, chosen[:, None])]
        if decoder.captures and alike:
            self._idle = len(prompts), batch

    def _begin(
        self,
        sequences: Sequences,
        needed: int,
        constants: Mapping[str, Array] | None,
        supply: Supply,
        *,
        alike: bool,
    ) -> Batch:
        """Returns a batch with empty states: the last one again if its captured steps fit.

        Args:
            sequences: The prompts.
            needed: Tokens of the longest sequence in the end.
            constants: As `steps`.
            supply: What another program gives.
            alike: Whether there is neither.
        """
        decoder = self._decoder
        length = needed
        if decoder.captures:
            # Few lengths, for each of which a step is captured.
            grown, limit = capacity(needed), decoder.longest({})
            length = grown if limit is None else max(needed, min(grown, limit))
        if decoder.in_place:
            sequences.room = length
        count, batch = self._idle or (0, None)
        if batch is None or not alike or (count, batch.length) != (len(sequences.tokens), length):
            batch = begin(decoder, sequences.tokens, length, constants, supply)
        else:
            batch.restart()
        decoder.check_length(batch.values, length, needed)
        return batch

    def beam_search(
        self,
        prompts: Sequence[Sequence[int]],
        search: BeamSearch,
        *,
        max_new_tokens: int = 128,
        eos: Collection[int] = (),
        encoder: Mapping[str, Array] | None = None,
    ) -> list[list[Hypothesis]]:
        """Returns the likeliest new tokens of each prompt, on every rank.

        They are those that transformers' `generate` finds with the same settings. Every rank must
        call it alike.

        Args:
            prompts: As `generate`.
            search: The number of beams, the penalty on length, and when to stop.
            max_new_tokens: As `generate`.
            eos: As `generate`.
            encoder: As `generate`.

        Returns:
            For each prompt, as many complete sequences as there are beams, or fewer, best first.

        Raises:
            InputError: As `steps`; or the batch is not the first dim of each state.
            SymbolValueError: As `steps`.
            RankError: As `steps`.
        """

        def shards() -> tuple[int, int]:
            check_search(search)
            if max_new_tokens < 1:
                raise InputError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
            return batch_shards(self._decoder)

        count, shard = together(self.rank, shards)
        # A shard of the batch has all beams of a prompt.
        extra = -len(prompts) % count
        asked = [*prompts, *list(prompts[-1:]) * extra]
        if encoder is not None and self._encoder is not None:
            encoder = padded(self._encoder.program, encoder, extra)
        supply = self._encoded(encoder)
        steps = together(
            self.rank,
            lambda: BeamSteps(
                self._decoder, asked, supply, search, max_new_tokens, eos, count, shard
            ),
        )
        return steps.search(len(prompts))

    def _encoded(self, feeds: Mapping[str, Array] | None) -> Supply:
        """Runs the encoder, if there is one."""

        def prepare() -> Feeds | None:
            if self._encoder is not None:
                return self._encoder.prepare(feeds or {})
            if feeds is not None:
                raise InputError(
                    f"{self.manifest.directory}: expected no inputs of an encoder, got "
                    f"{list(feeds)}: no program supplies inputs of {self._decoder.program.name!r}"
                )
            return None

        inputs = together(self.rank, prepare)
        if self._encoder is None or inputs is None:
            return NOTHING
        return self._encoder.run(feeds or {}, inputs)

    def requests(
        self,
        *,
        slots: int | None = None,
        length: int | None = None,
        chunk: int = CHUNK,
        cache_memory: int | None = None,
        start: Sequence[int] = (),
        prefixes: int | None = None,
    ) -> Requests:
        """Returns a queue for continuous batching; every rank must call it alike.

        Args:
            slots: The largest number of requests that run at the same time; by default 8, or as
                many as `cache_memory` admits, 64 at most.
            length: The largest number of tokens of a request, prompt and answer; by default as many
                as the model admits, 2048 at most. The caches of all slots are allocated for it if
                they are extended in place.
            chunk: The largest number of prompt tokens in one step; longer prompts take several
                steps.
            cache_memory: Bytes of caches on a device at most. A request waits until its complete
                cache fits beside those of the others.
            start: If an encoder reads the prompts, the tokens with which the decoder begins.
            prefixes: The largest number of prompt tokens whose caches are kept. A prompt that
                begins like one of these takes its cache, in blocks of 64 tokens. By default as many
                as a request may have; none if `cache_memory` is given.

        Raises:
            InputError: The model cannot run requests of different lengths side by side, or the
                numbers do not fit it.
        """
        room = in_turns(self._decoder, Room(slots, length, cache_memory, prefixes))
        size = row_size(self._decoder)

        def made() -> Requests:
            reader = None if self._encoder is None else Reader(self._encoder, start)
            return Requests(self._decoder, room, size, chunk, reader)

        return together(self.rank, made)

    def _brought(self, sharding: SizedSharding, scores: Array) -> Array | None:
        """Returns the logits of the last position on rank 0."""
        part = None
        if self._decoder.scores:
            part = np.zeros(sharding.local_shape, scores.dtype)
            part[: len(scores)] = scores
        dtype = DTYPES[self._roles.logits.dtype].dtype
        return gather_to_root(self.rank, sharding, part, self._decoder.first, dtype)

    @property
    def notices(self) -> list[str]:
        """What the user should know about how batches run."""
        waits = "one stage computes at a time; `serve` can keep all of them busy"
        return self._decoder.notices + [waits] * (self._decoder.stages is not None)

    @property
    def encoder(self) -> ProgramEntry | None:
        """The program that runs once for each batch; None if there is none."""
        return None if self._encoder is None else self._encoder.program

    @property
    def state_bytes(self) -> int:
        """The bytes of the buffers of states on this rank."""
        return 0 if self._batch is None else self._batch.state_bytes

    def close(self) -> None:
        """Frees the session, and the world of one rank if it made one."""
        self._batch = self._idle = None
        self._decoder.close()
        if self._encoder is not None:
            self._encoder.close()
        super().close()

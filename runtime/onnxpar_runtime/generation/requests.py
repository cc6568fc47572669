"""Continuous batching: each request enters between two steps and leaves when it is complete.

Rank 0 takes requests; in each step it tells the other ranks, in one small reduction, which are new
and which are cancelled. All else follows on all ranks alike: who waits, who gets which slot, which
tokens are chosen. A step fills the caches of requests that have just got a slot, up to a number of
tokens, so that a long prompt does not hold up the others; then it computes one token of each
request whose prompt is complete.
"""

import json
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.options import Sampling
from onnxpar_format.trace import STEP
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.candidates import Likelihood, Share, likelihoods
from onnxpar_runtime.generation.decoder import Decoder
from onnxpar_runtime.generation.encoder import NOTHING, Reader, Supply
from onnxpar_runtime.generation.read_rows import Slot
from onnxpar_runtime.generation.roles import feeds_of
from onnxpar_runtime.generation.sampling import NO_TOKEN, Chooser, Draws, check, check_logprobs
from onnxpar_runtime.generation.slots import Room, RowSize, slots_of
from onnxpar_runtime.generation.steps import Batch, last_scores
from onnxpar_runtime.symbol_checks import check_index_ranges

Array = NDArray[Any]
GREEDY = Sampling()
CHUNK = 256
"""Tokens of prompts in a step at most."""
_WORDS = 64
"""Words of the first message of a step: how long the text is, whether to end, the beginning."""


@dataclass(frozen=True)
class Request:
    """A prompt whose new tokens are wanted.

    Attributes:
        prompt: Its tokens.
        max_new_tokens: New tokens at most.
        sampling: How they are chosen.
        eos: Tokens that complete it.
        number: The number under which its tokens are drawn, as that of a prompt in
            `Generator.generate`: equal requests with different numbers get different tokens.
        logprobs: If given, events have the log-probabilities of their tokens and of this many of
            the likeliest ones, by the logits as the model gives them.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    eos: frozenset[int]
    number: int
    logprobs: int | None = None


@dataclass(frozen=True)
class Event:
    """A new token of a request, or its end.

    Attributes:
        request: The number that `submit` returned.
        token: The token; None if it ends without one.
        finished: Why it is complete: `stop` (its token is one of `eos`), `length`, `cancelled`, or
            `error` (its logits are not numbers); None if it goes on.
        likelihood: How likely the token was, if the request asks for it.
    """

    request: int
    token: int | None
    finished: str | None
    likelihood: Likelihood | None = None


class _Running:
    """A request with a slot.

    Attributes:
        request: The request.
        number: Its number.
        prompt: The tokens with which the decoder begins.
        slot: Where it is.
        draws: How its tokens are chosen.
        length: The number of its tokens in the cache.
        last: Its last token, which the next run takes.
    """

    def __init__(self, number: int, request: Request, prompt: tuple[int, ...], slot: Slot) -> None:
        self.number, self.request, self.slot = number, request, slot
        self.prompt = prompt
        self.draws = Draws(request.sampling, request.number, prompt)
        self.length, self.last = 0, 0

    def event(self, token: int, likelihood: Likelihood | None) -> Event:
        """Takes the next token."""
        if token == NO_TOKEN:
            return Event(self.number, None, "error")
        self.last = token
        finished = None
        if token in self.request.eos:
            finished = "stop"
        elif self.draws.step == self.request.max_new_tokens:
            finished = "length"
        return Event(self.number, token, finished, likelihood)


class Requests:
    """Requests on all ranks of a decoder; every rank makes one and calls `step` alike.

    The tokens of a request are those that it would get alone, whatever runs beside it, but for
    rounding: where its two best tokens score alike to the last digits, either may be chosen.

    Args:
        decoder: The program.
        room: How many requests may run at the same time, and how long they may be.
        size: The memory for a row of the cache.
        chunk: The largest number of prompt tokens in one step.
        reader: What reads the prompts; None if the decoder does.

    Attributes:
        ended: Whether a rank has asked to end; then `step` has cancelled all requests.

    Raises:
        InputError: Requests cannot share the program's batch, or the numbers do not fit.
    """

    def __init__(
        self,
        decoder: Decoder,
        room: Room,
        size: RowSize,
        chunk: int = CHUNK,
        reader: Reader | None = None,
    ) -> None:
        """Holds no request."""
        self._decoder, self._rank = decoder, decoder.loader.rank
        self._chunk, self._width = chunk, decoder.roles.width or chunk
        if chunk < 1:
            raise InputError(f"chunk: expected at least 1 token, got {chunk}")
        self._reader = reader
        self._slots = slots_of(decoder, room, size, None if reader is None else reader.encoder)
        self._numbers = count()
        self._told: deque[dict[str, Any]] = deque()
        self._waiting: deque[tuple[int, Request]] = deque()
        self._filling: tuple[_Running, Batch] | None = None
        self._live: dict[Slot, _Running] = {}
        self._chooser: Chooser | None = None
        self._shares: dict[int, Share] = {}
        self._ending = self.ended = False

    # -- what rank 0 is asked for ------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        eos: Collection[int] = (),
        number: int = 0,
        logprobs: int | None = None,
    ) -> int:
        """Asks for new tokens of a prompt, from the next step on, and returns a number for it.

        Only rank 0 may call it, in any thread.

        Args:
            prompt: As of `Request`.
            max_new_tokens: As of `Request`.
            sampling: As of `Request`.
            eos: As of `Request`.
            number: As of `Request`.
            logprobs: As of `Request`.

        Raises:
            InputError: Something does not fit; nothing has been asked for.
            ValueError: This is not rank 0.
        """
        self._only_first()
        # Tokens may be NumPy's integers.
        tokens, ends = tuple(map(int, prompt)), frozenset(map(int, eos))
        request = Request(tokens, max_new_tokens, sampling, ends, number, logprobs)
        self.check(request)
        found = next(self._numbers)
        self._told.append(
            {
                "request": found,
                "prompt": request.prompt,
                "max": max_new_tokens,
                "sampling": asdict(sampling),
                "eos": sorted(request.eos),
                "number": number,
                "logprobs": logprobs,
            }
        )
        return found

    def check(self, request: Request) -> None:
        """Checks that a request can be taken.

        Raises:
            InputError: It cannot.
        """
        check(request.sampling)
        check_logprobs(request.logprobs)
        if not request.prompt:
            raise InputError("prompt: expected at least one token, got none")
        if request.max_new_tokens < 1:
            raise InputError(f"max_new_tokens: expected at least 1, got {request.max_new_tokens}")
        needed = self._needed(request)
        if needed > self.length:
            begin = len(self._begin(request))
            raise InputError(
                f"prompt and new tokens: expected at most {self.length} tokens in the cache, got "
                f"{begin} and {request.max_new_tokens}, which need {needed}"
            )
        if self._reader is not None:
            if len(request.prompt) > self.length:
                raise InputError(
                    f"prompt: expected at most {self.length} tokens, got {len(request.prompt)}"
                )
            self._reader.prepare(request.prompt, self._slots.shards)
            return
        tokens = np.array([request.prompt])
        name = self._decoder.roles.tokens.name
        if tokens.min() < 0:
            raise InputError(f"prompt: expected tokens from 0 on, got {tokens.min()}")
        check_index_ranges(self._decoder.checked, {name: tokens}, {}, of="")

    def cancel(self, request: int) -> None:
        """Ends a request in the next step; nothing happens if it is complete.

        Raises:
            ValueError: This is not rank 0.
        """
        self._only_first()
        self._told.append({"cancel": request})

    def _only_first(self) -> None:
        if self._rank.index:
            raise ValueError(
                f"requests: expected them from rank 0, got one from {self._rank.index}"
            )

    def end(self) -> None:
        """Cancels all requests in the next step, on all ranks. Any rank may ask for it."""
        self._ending = True

    # -- what all ranks do -------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of requests without a slot, as of the last step."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of requests with a slot, as of the last step."""
        return len(self._live) + (self._filling is not None)

    @property
    def slots(self) -> int:
        """The largest number of requests that run at the same time."""
        return self._slots.shards * self._slots.rows

    @property
    def length(self) -> int:
        """The largest number of tokens of a request."""
        return self._slots.length

    @property
    def reused(self) -> int:
        """The number of prompt tokens whose cache was that of an earlier prompt."""
        return self._slots.prefixes.reused

    @property
    def state_bytes(self) -> int:
        """The bytes of the caches on this rank."""
        return self._slots.bytes

    def events(self) -> Iterator[Event]:
        """Yields what happens until no request is left, on every rank; all must use it alike."""
        while True:
            yield from self.step()
            if not self.running and not self.waiting:
                return

    def step(self) -> list[Event]:
        """Computes one token of each request that has a slot; every rank must call it.

        Returns:
            What has happened, equal on all ranks.

        Raises:
            RankError: A rank failed.
        """
        began = monotonic_ns()
        events = self._follow()
        events += self._fill()
        if self._live:
            events += self._advance()
        if events:
            self._rank.timeline.add(STEP, "step of the running requests", began)
        return events

    def _follow(self) -> list[Event]:
        """Does what rank 0 has been asked for."""
        told: list[dict[str, Any]] = []
        if self._rank.index == 0:
            while self._told:
                told.append(self._told.popleft())
        told, self.ended = _told(self._rank, told, self._ending)
        events = []
        for one in told:
            if "cancel" in one:
                events += self._drop(one["cancel"])
            else:
                sampling, eos = Sampling(**one["sampling"]), frozenset(one["eos"])
                prompt = tuple(one["prompt"])
                request = Request(prompt, one["max"], sampling, eos, one["number"], one["logprobs"])
                self._waiting.append((one["request"], request))
        if self.ended:
            filling = [] if self._filling is None else [self._filling[0].number]
            live = [running.number for running in self._live.values()]
            for number in [*live, *filling, *[number for number, _ in self._waiting]]:
                events += self._drop(number)
        return events

    def _drop(self, number: int) -> list[Event]:
        """Cancels a request, wherever it is."""
        for waiting in self._waiting:
            if waiting[0] == number:
                self._waiting.remove(waiting)
                break
        else:
            running = [one for one in self._live.values() if one.number == number]
            if running:
                self._leave(running[0])
            elif self._filling is not None and self._filling[0].number == number:
                self._slots.leave(self._filling[0].slot)
                self._filling = None
            else:
                return []
        return [Event(number, None, "cancelled")]

    def _leave(self, running: _Running) -> None:
        del self._live[running.slot]
        self._slots.leave(running.slot)
        self._chooser = None

    def _begin(self, request: Request) -> tuple[int, ...]:
        """Returns the tokens with which the decoder begins."""
        return request.prompt if self._reader is None else self._reader.start

    def _needed(self, request: Request) -> int:
        """Returns the tokens of a request that its cache has in the end."""
        return len(self._begin(request)) + request.max_new_tokens - 1

    def _read(self, request: Request) -> Supply:
        """Runs the encoder on a request, if there is one, in one row for each shard."""
        if self._reader is None:
            return NOTHING
        return self._reader.run(request.prompt, self._slots.shards)

    def room(self, prompt: Sequence[int]) -> int:
        """Returns how many new tokens a request with a prompt may have at most."""
        begin = len(prompt) if self._reader is None else len(self._reader.start)
        return self.length - begin + 1

    def _next_slot(self) -> Slot | None:
        """Returns a slot for the first request that waits, if there are both."""
        if not self._waiting:
            return None
        request = self._waiting[0][1]
        read = 0 if self._reader is None else len(request.prompt)
        return self._slots.take(self._needed(request), read)

    def _fill(self) -> list[Event]:
        """Runs prompts, up to a number of tokens."""
        events, left = [], self._chunk
        while left:
            if self._filling is None:
                slot = self._next_slot()
                if slot is None:
                    break
                number, request = self._waiting.popleft()
                running = _Running(number, request, self._begin(request), slot)
                batch = self._slots.filling(slot, self._read(request))
                running.length = self._slots.prefixes.take(running.prompt, batch)
                self._filling = running, batch
            running, batch = self._filling
            prompt, begin = running.prompt, running.length
            new = min(left, len(prompt) - begin, self._width)
            shards = self._slots.shards
            tokens = np.repeat(np.array([prompt[begin : begin + new]]), shards, 0)
            local = self._run(batch, np.full(shards, begin), tokens)
            running.length += new
            left -= new
            if running.length < len(prompt):
                continue
            share = batch.share()
            draws = [running.draws if n == running.slot.shard else None for n in range(shards)]
            scores = last_scores(local, np.full(shards, new - 1), share)
            chosen = Chooser(self._rank, share, draws).choose(scores)
            self._filling = None
            shard = running.slot.shard
            likely = self._likelihoods(share, scores, chosen, [(shard, running)])
            event = running.event(int(chosen[shard]), likely.get(shard))
            if event.token is not None:
                self._slots.prefixes.keep(prompt, batch)
            if event.finished is None:
                self._live[running.slot] = running
                self._chooser = None
            else:
                self._slots.leave(running.slot)
            events.append(event)
        return events

    def _advance(self) -> list[Event]:
        """Computes one token of each request whose prompt is in the cache."""
        lengths = {slot: running.length for slot, running in self._live.items()}
        batch, rows = self._slots.running(lengths)
        size = rows * self._slots.shards
        places = [(s.shard * rows + s.row, running) for s, running in self._live.items()]
        past, tokens = np.zeros(size, np.int64), np.zeros((size, 1), np.int64)
        for row, running in places:
            past[row], tokens[row] = running.length, running.last
        if self._filling is not None and self._filling[0].slot.row < rows:
            # This row runs as well, and must write where the rest of the prompt will.
            filling = self._filling[0]
            past[filling.slot.shard * rows + filling.slot.row] = filling.length
        local = self._run(batch, past, tokens)
        if self._chooser is None:
            share = self._shares.get(rows)
            if share is None:
                share = self._shares[rows] = batch.share()
            draws: list[Draws | None] = [None] * size
            for row, running in places:
                draws[row] = running.draws
            self._chooser = Chooser(self._rank, share, draws)
            self._share = share
        scores = last_scores(local, np.zeros(size, np.int64), self._share)
        chosen = self._chooser.choose(scores)
        likely = self._likelihoods(self._share, scores, chosen, places)
        events = []
        for row, running in places:
            running.length += 1
            events.append(running.event(int(chosen[row]), likely.get(row)))
            if events[-1].finished is not None:
                self._leave(running)
        return events

    def _likelihoods(
        self, share: Share, scores: Array, chosen: Array, places: Sequence[tuple[int, _Running]]
    ) -> dict[int, Likelihood]:
        """Returns how likely new tokens were, by row, for the requests that ask for it."""
        asked = {row: running.request.logprobs for row, running in places}
        if all(count is None for count in asked.values()):
            return {}
        wanted = [asked.get(row) for row in range(share.batch)]
        found = likelihoods(self._rank, share, scores, chosen, wanted)
        return {row: one for row, one in enumerate(found) if one is not None}

    def _run(self, batch: Batch, past: Array, tokens: Array) -> Array:
        """Runs a batch on new tokens and returns this rank's shard of the logits."""
        window = self._slots.window(batch, past, tokens.shape[1])
        return batch.run(feeds_of(self._decoder.roles, window, tokens))


def _told(rank: Rank, told: list[dict[str, Any]], ends: bool) -> tuple[list[dict[str, Any]], bool]:
    """Returns what rank 0 tells, and whether any rank ends."""
    text = json.dumps(told).encode() if told else b""
    if rank.world.size == 1:
        return json.loads(text) if text else [], ends
    words = np.zeros(-(-len(text) // 8), np.int64)
    words.view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    first = np.zeros(_WORDS, np.int64)
    first[0], first[1] = len(text), ends
    held = words[: _WORDS - 2]
    first[2 : 2 + len(held)] = held
    first = rank.all_reduce(first)
    size = int(first[0])
    rest = -(-size // 8) - (_WORDS - 2)
    found = first[2:]
    if rest > 0:
        more = words[_WORDS - 2 :] if rank.index == 0 else np.zeros(rest, np.int64)
        found = np.concatenate([found, rank.all_reduce(more)])
    return json.loads(found.tobytes()[:size]) if size else [], bool(first[1])

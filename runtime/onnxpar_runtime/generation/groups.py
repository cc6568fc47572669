"""Requests that run side by side in one batch, with a cache of their own."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.options import Sampling
from onnxpar_runtime.generation.candidates import Likelihood, Share, likelihoods
from onnxpar_runtime.generation.decoder import Decoder
from onnxpar_runtime.generation.encoder import NOTHING, Reader, Supply
from onnxpar_runtime.generation.read_rows import Slot
from onnxpar_runtime.generation.roles import feeds_of
from onnxpar_runtime.generation.sampling import NO_TOKEN, Chooser, Draws
from onnxpar_runtime.generation.slots import Slots
from onnxpar_runtime.generation.steps import Batch, last_scores

Array = NDArray[Any]


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


class Running:
    """A request with a slot.

    Attributes:
        request: The request.
        number: Its number.
        prompt: The tokens with which the decoder begins.
        slot: Where it is.
        draws: How its tokens are chosen.
        length: The number of its tokens in the cache.
        last: Its last token, which the next run takes.
        gone: Whether it has been cancelled.
    """

    def __init__(self, number: int, request: Request, prompt: tuple[int, ...], slot: Slot) -> None:
        """Has no token in the cache."""
        self.number, self.request, self.slot = number, request, slot
        self.prompt = prompt
        self.draws = Draws(request.sampling, request.number, prompt)
        self.length, self.last, self.gone = 0, 0, False

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


@dataclass(frozen=True)
class Run:
    """A run of a batch that is prepared.

    Attributes:
        batch: The batch.
        places: The rows whose next tokens it scores, and their requests.
        rows: The number of rows.
        last: The column of each row's last token.
        fills: Whether it completes the prompt of its request.
    """

    batch: Batch
    places: Sequence[tuple[int, Running]]
    rows: int
    last: int
    fills: bool


class Group:
    """Requests that run side by side in one batch, on all ranks alike.

    Args:
        decoder: The program.
        slots: Their caches.
        chunk: The largest number of prompt tokens in one step.
        reader: What reads the prompts; None if the decoder does.

    Attributes:
        slots: Their caches.
    """

    def __init__(self, decoder: Decoder, slots: Slots, chunk: int, reader: Reader | None) -> None:
        """Holds no request."""
        self._decoder, self._rank = decoder, decoder.loader.rank
        self.slots, self._reader = slots, reader
        self._chunk, self._width = chunk, decoder.roles.width or chunk
        self._filling: tuple[Running, Batch] | None = None
        self._filled: dict[Slot, Running] = {}
        self._live: dict[Slot, Running] = {}
        self._chooser: tuple[tuple[int, ...], Chooser] | None = None
        self._shares: dict[int, Share] = {}

    @property
    def all(self) -> list[Running]:
        """The requests with a slot."""
        filling = [] if self._filling is None else [self._filling[0]]
        return [*self._live.values(), *self._filled.values(), *filling]

    def drop(self, running: Running) -> None:
        """Cancels a request with a slot."""
        running.gone = True
        if self._filling is not None and self._filling[0] is running:
            self._filling = None
        self._live.pop(running.slot, None)
        self._filled.pop(running.slot, None)
        self.slots.leave(running.slot)

    def begin(self, request: Request) -> tuple[int, ...]:
        """Returns the tokens with which the decoder begins."""
        return request.prompt if self._reader is None else self._reader.start

    def needed(self, request: Request) -> int:
        """Returns how many tokens of a request its cache has when it is complete."""
        return len(self.begin(request)) + request.max_new_tokens - 1

    def _read(self, request: Request) -> Supply:
        """Runs the encoder on a request, if there is one, in one row for each shard."""
        if self._reader is None:
            return NOTHING
        return self._reader.run(request.prompt, self.slots.shards)

    def runs(self, waiting: deque[tuple[int, Request]]) -> Iterator[Run]:
        """Yields the runs of a step, prepared, the last one for all whose prompt is complete.

        Args:
            waiting: Requests without a slot; those that get one are taken from it.

        Raises:
            RankError: A rank failed.
        """
        left = self._chunk
        while left:
            if self._filling is None:
                slot = self._next_slot(waiting)
                if slot is None:
                    break
                number, request = waiting.popleft()
                running = Running(number, request, self.begin(request), slot)
                batch = self.slots.filling(slot, self._read(request))
                running.length = self.slots.prefixes.take(running.prompt, batch)
                self._filling = running, batch
            running, batch = self._filling
            prompt, begin = running.prompt, running.length
            new = min(left, len(prompt) - begin, self._width)
            shards = self.slots.shards
            tokens = np.repeat(np.array([prompt[begin : begin + new]]), shards, 0)
            self._prepare(batch, np.full(shards, begin), tokens)
            running.length += new
            left -= new
            places = []
            if running.length == len(prompt):
                places = [(running.slot.shard, running)]
                self._filling, self._filled[running.slot] = None, running
            yield Run(batch, places, shards, new - 1, fills=True)
        if self._live:
            yield self._advance()

    def _next_slot(self, waiting: deque[tuple[int, Request]]) -> Slot | None:
        """Returns a slot for the first request that waits, if there are both."""
        if not waiting:
            return None
        request = waiting[0][1]
        read = 0 if self._reader is None else len(request.prompt)
        return self.slots.take(self.needed(request), read)

    def _advance(self) -> Run:
        """Prepares a run for the next token of each request whose prompt is in the cache."""
        lengths = {slot: running.length for slot, running in self._live.items()}
        batch, rows = self.slots.running(lengths)
        size = rows * self.slots.shards
        places = [(s.shard * rows + s.row, running) for s, running in self._live.items()]
        past, tokens = np.zeros(size, np.int64), np.zeros((size, 1), np.int64)
        for row, running in places:
            past[row], tokens[row] = running.length, running.last
            running.length += 1
        for running in self.all:
            if running.slot not in self._live and running.slot.row < rows:
                # This row runs as well, and must write behind what it has of its prompt.
                past[running.slot.shard * rows + running.slot.row] = running.length
        self._prepare(batch, past, tokens)
        return Run(batch, places, size, 0, fills=False)

    def _prepare(self, batch: Batch, past: Array, tokens: Array) -> None:
        window = self.slots.window(batch, past, tokens.shape[1])
        batch.prepare(feeds_of(self._decoder.roles, window, tokens))

    def finish(self, run: Run) -> list[Event]:
        """Chooses the tokens of a run that has been executed; every rank must call it.

        Raises:
            RankError: A rank failed.
        """
        places = [(row, running) for row, running in run.places if not running.gone]
        if not places:
            return []
        local = run.batch.result()
        share = self._shares.get(run.rows)
        if share is None:
            share = self._shares[run.rows] = run.batch.share()
        chooser = self._chooser_of(run.rows, places, share)
        scores = last_scores(local, np.full(run.rows, run.last), share)
        chosen = chooser.choose(scores)
        likely = self._likelihoods(share, scores, chosen, places)
        events = []
        for row, running in places:
            event = running.event(int(chosen[row]), likely.get(row))
            events.append(event)
            if run.fills and event.token is not None:
                self.slots.prefixes.keep(running.prompt, run.batch)
            if event.finished is not None:
                self.drop(running)
            elif run.fills:
                self._live[running.slot] = self._filled.pop(running.slot)
        return events

    def _chooser_of(
        self, rows: int, places: Sequence[tuple[int, Running]], share: Share
    ) -> Chooser:
        """Returns what chooses for some requests; that of the last time if they are the same."""
        key = (rows, *(number for row, running in places for number in (row, running.number)))
        if self._chooser is None or self._chooser[0] != key:
            draws: list[Draws | None] = [None] * rows
            for row, running in places:
                draws[row] = running.draws
            self._chooser = key, Chooser(self._rank, share, draws)
        return self._chooser[1]

    def _likelihoods(
        self, share: Share, scores: Array, chosen: Array, places: Sequence[tuple[int, Running]]
    ) -> dict[int, Likelihood]:
        """Returns how likely new tokens were, by row, for the requests that ask for it."""
        asked = {row: running.request.logprobs for row, running in places}
        if all(count is None for count in asked.values()):
            return {}
        wanted = [asked.get(row) for row in range(share.batch)]
        found = likelihoods(self._rank, share, scores, chosen, wanted)
        return {row: one for row, one in enumerate(found) if one is not None}

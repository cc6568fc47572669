"""Continuous batching: each request enters between two steps and leaves when it is complete.

Rank 0 takes requests; in each step it tells the other ranks, in one small reduction, which are new
and which are cancelled. Each rank derives everything else from this in the same way: which requests
wait, which get a slot, and which tokens are chosen. A step fills the caches of requests that have
just got a slot, up to a number of tokens, so that a long prompt does not hold up the others; then
it computes one token of each request whose prompt is complete.

In a pipeline, the requests form as many groups as there are stages, and the groups take turns
(`groups`). In each step, a stage runs what the stage before it ran in the step before, so all
stages compute, for different groups. The tokens of a group are chosen when its runs have left the
last stage.
"""

import json
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from itertools import count
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.options import Sampling
from onnxpar_format.trace import STEP
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.decoder import Decoder
from onnxpar_runtime.generation.encoder import Reader
from onnxpar_runtime.generation.groups import Event, Group, Request, Run
from onnxpar_runtime.generation.sampling import check, check_logprobs
from onnxpar_runtime.generation.slots import Room, RowSize, slots_of
from onnxpar_runtime.symbol_checks import check_index_ranges

Array = NDArray[Any]
GREEDY = Sampling()
CHUNK = 256
"""Tokens of prompts in a step at most."""
_WORDS = 64
"""Words of the first message of a step: how long the text is, whether to end, the beginning."""


class Requests:
    """Requests on all ranks of a decoder; every rank makes one and calls `step` alike.

    A request gets the tokens that it would get alone, whatever runs beside it, except for rounding:
    if the scores of its two best tokens are equal up to rounding, either may be chosen.

    Args:
        decoder: The program.
        room: How many requests may run at the same time, and how long they may be.
        size: The memory for a row of the cache.
        chunk: The largest number of prompt tokens in one step.
        reader: What reads the prompts; None if the decoder does.

    Attributes:
        notices: What the user should know about how they run.
        ended: Whether a rank has asked to end; then `step` has cancelled all requests.

    Raises:
        InputError: As `Slots`, or `chunk` is less than 1.
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
        if chunk < 1:
            raise InputError(f"chunk: expected at least 1 token, got {chunk}")
        self._reader = reader
        self.notices = list(decoder.notices)
        if room.waits:
            self.notices.append(
                f"all requests are in one group, so one stage computes at a time: {room.waits}"
            )
        encoder, turns = None if reader is None else reader.encoder, room.groups
        self._groups = [
            Group(decoder, slots_of(decoder, room, size, encoder), chunk, reader)
            for _ in range(turns)
        ]
        for group in self._groups[1:]:
            group.slots.prefixes = self._groups[0].slots.prefixes
        # The runs of the last steps that have not left the last stage.
        self._flight: deque[list[Run]] = deque()
        stage = decoder.manifest.stage_of(self._rank.index) if turns > 1 else 0
        self._steps, self._turns, self._stage = 0, turns, stage
        self._numbers = count()
        self._told: deque[dict[str, Any]] = deque()
        self._waiting: deque[tuple[int, Request]] = deque()
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
        group = self._groups[0]
        needed = group.needed(request)
        if needed > self.length:
            begin = len(group.begin(request))
            raise InputError(
                f"prompt and new tokens: expected at most {self.length} tokens in the cache, got "
                f"{begin} and {request.max_new_tokens}, which need {needed}"
            )
        if self._reader is not None:
            if len(request.prompt) > self.length:
                raise InputError(
                    f"prompt: expected at most {self.length} tokens, got {len(request.prompt)}"
                )
            self._reader.prepare(request.prompt, group.slots.shards)
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
        return sum(len(group.all) for group in self._groups)

    @property
    def slots(self) -> int:
        """The largest number of requests that run at the same time."""
        return sum(group.slots.shards * group.slots.rows for group in self._groups)

    @property
    def length(self) -> int:
        """The largest number of tokens of a request."""
        return self._groups[0].slots.length

    @property
    def reused(self) -> int:
        """The number of prompt tokens whose cache was taken over from an earlier prompt."""
        return self._groups[0].slots.prefixes.reused

    @property
    def state_bytes(self) -> int:
        """The bytes of the caches on this rank."""
        prefixes = self._groups[0].slots.prefixes.bytes
        return sum(group.slots.bytes - prefixes for group in self._groups) + prefixes

    def events(self) -> Iterator[Event]:
        """Yields what happens until no request is left, on every rank; all must use it alike."""
        while True:
            yield from self.step()
            if not self.running and not self.waiting:
                return

    def step(self) -> list[Event]:
        """Computes one token of each request that has a slot; every rank must call it.

        In a pipeline in which groups of requests take turns, it computes the tokens of one group.

        Returns:
            What has happened, equal on all ranks.

        Raises:
            RankError: A rank failed.
        """
        began = monotonic_ns()
        events = self._follow()
        group = self._groups[self._steps % self._turns]
        self._steps += 1
        if self._turns == 1:
            for run in group.runs(self._waiting):
                run.batch.execute()
                events += group.finish(run)
        else:
            events += self._take_turns(group)
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
            running = [one.number for group in self._groups for one in group.all]
            for number in [*running, *[number for number, _ in self._waiting]]:
                events += self._drop(number)
        return events

    def _drop(self, number: int) -> list[Event]:
        """Cancels a request, wherever it is."""
        for waiting in self._waiting:
            if waiting[0] == number:
                self._waiting.remove(waiting)
                break
        else:
            found = [(g, one) for g in self._groups for one in g.all if one.number == number]
            if not found:
                return []
            ((group, running),) = found
            group.drop(running)
        return [Event(number, None, "cancelled")]

    def _take_turns(self, group: Group) -> list[Event]:
        """Begins the runs of a group, and finishes those that leave the last stage.

        This rank executes the runs that the stage before has executed in the step before.
        """
        self._flight.append(list(group.runs(self._waiting)))
        self._execute(self._stage)
        events = []
        if len(self._flight) == self._turns:
            done = self._groups[self._steps % self._turns]
            for run in self._flight.popleft():
                events += done.finish(run)
        if not self.running and not self.waiting:
            # What was cancelled has still been sent from stage to stage.
            for _ in range(self._stage):
                self._flight.append([])
                self._execute(self._stage)
            self._flight.clear()
        return events

    def _execute(self, ago: int) -> None:
        """Executes the runs that were begun a number of steps ago."""
        if len(self._flight) > ago:
            for run in self._flight[-1 - ago]:
                run.batch.execute()

    def room(self, prompt: Sequence[int]) -> int:
        """Returns how many new tokens a request with a prompt may have at most."""
        begin = len(prompt) if self._reader is None else len(self._reader.start)
        return self.length - begin + 1


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

"""A player of programs that moves names instead of arrays, its ranks taking turns at random."""

import random
from collections import defaultdict

from onnxpar_runtime.pipeline.schedule import (
    Action,
    Kind,
    Message,
    Payload,
    PlayedSchedule,
    Point,
    Transfer,
)

# What a virtual stage holds about a micro-batch: payload, virtual stage that made it, name.
Held = tuple[Payload, int, str]


class Player:
    """Plays a program where sends and receives of a channel meet by their order alone.

    A transfer happens when both sides have posted it; a wait before that blocks. Where it is
    `late`, receivers post only when they wait. A computation fails unless everything that it reads
    has come. `play` returns False where no rank can go on.
    """

    def __init__(self, program: PlayedSchedule, seed: int, late: bool) -> None:
        self.program = program
        self.schedule = program.schedule
        self.late = late
        self.random = random.Random(seed)
        self.at = [0] * self.schedule.stages
        # By channel, what was posted on either side, in order.
        self.sends: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
        self.receives: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
        self.waited: defaultdict[tuple[int, int], set[Message]] = defaultdict(set)
        # By virtual stage and micro-batch.
        self.held: defaultdict[tuple[int, int], set[Held]] = defaultdict(set)
        self.made: defaultdict[tuple[int, int], set[Payload]] = defaultdict(set)
        self.computed: list[tuple[int, Action]] = []

    def play(self) -> bool:
        while moving := [rank for rank in range(self.schedule.stages) if self.can_move(rank)]:
            self.move(self.random.choice(moving))
        return all(at == len(steps) for at, steps in zip(self.at, self.program.ranks, strict=True))

    def can_move(self, rank: int) -> bool:
        if self.at[rank] == len(self.program.ranks[rank]):
            return False
        step = self.program.ranks[rank][self.at[rank]]
        if isinstance(step, Action) or step.point in (Point.SEND, Point.RECEIVE):
            return True
        channel = (rank, step.peer) if step.point is Point.WAIT_SEND else (step.peer, rank)
        sends, receives = self.sends[channel], self.receives[channel]
        posted = sends if step.point is Point.WAIT_SEND else receives
        index = posted.index(step.message)
        taken = self.waited[channel] if self.late else set(receives)
        if step.point is Point.WAIT_SEND:
            return index < len(receives) and receives[index] in taken
        self.waited[channel].add(step.message)
        return index < len(sends)

    def move(self, rank: int) -> None:
        step = self.program.ranks[rank][self.at[rank]]
        self.at[rank] += 1
        if isinstance(step, Action):
            self.compute(self.schedule.virtual_stage(rank, step.chunk), step)
            self.computed.append((rank, step))
        else:
            self.transfer(rank, step)

    def transfer(self, rank: int, step: Transfer) -> None:
        message = step.message
        if step.point is Point.SEND:
            assert message.payload in self.made[message.source, message.micro_batch]
            self.sends[rank, step.peer].append(message)
        elif step.point is Point.RECEIVE:
            self.receives[step.peer, rank].append(message)
        elif step.point is Point.WAIT_RECEIVE:
            channel = (step.peer, rank)
            sent = self.sends[channel][self.receives[channel].index(message)]
            self.held[message.target, message.micro_batch].update(
                (sent.payload, sent.source, name) for name in sent.values
            )

    def compute(self, stage: int, action: Action) -> None:
        key = stage, action.micro_batch
        if action.kind is Kind.BACKWARD_WEIGHT:
            assert Payload.COTANGENT in self.made[key]
            return
        forward = action.kind is Kind.FORWARD
        payload = Payload.ACTIVATION if forward else Payload.COTANGENT
        if not forward:
            assert Payload.ACTIVATION in self.made[key]
        assert payload not in self.made[key]
        self.made[key].add(payload)
        for edge in self.program.edges:
            source, target = edge.source, edge.target
            names = edge.values if forward else edge.cotangents
            if not forward:
                source, target = target, source
            if target == stage:
                self.held[key] -= self.taken(key, source, payload, names)
            if source == stage and (target - source) % self.schedule.stages == 0:
                self.held[target, action.micro_batch].update(
                    (payload, source, name) for name in names
                )

    def taken(
        self, key: tuple[int, int], source: int, payload: Payload, names: tuple[str, ...]
    ) -> set[Held]:
        wanted = {(payload, source, name) for name in names}
        assert wanted <= self.held[key], f"{key} lacks {wanted - self.held[key]}"
        return wanted

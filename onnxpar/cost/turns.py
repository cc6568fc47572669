"""The time and memory of two micro-batches that take turns in one program.

In the partitioned program, `onnxpar.schedule.pair_micro_batches` lets a micro-batch compute up to a
collective, then the other one up to the same collective, and so on. Here the same is done to what
is known of a plan: its timeline, and the steps from which its memory is counted.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from onnxpar.cost.live_memory import Made, MemoryStep
from onnxpar.cost.timeline import (
    Gather,
    Member,
    Transfer,
    delayed,
    elapsed,
    finished_later,
    gathered_ahead,
    in_buckets,
)

_Event = TypeVar("_Event", Transfer, Gather)


@dataclass(frozen=True)
class Turns:
    """The places of two micro-batches that take turns.

    Attributes:
        cuts: The places at which a micro-batch lets the other one compute, ascending.
        end: The number of nodes of a micro-batch.
    """

    cuts: tuple[int, ...]
    end: int

    def place(self, place: int, second: bool) -> int:
        """Returns the place, among the nodes of both, of a node of one micro-batch."""
        if place == self.end:
            return 2 * self.end
        number = bisect_right(self.cuts, place)
        if second:
            return place + (self.cuts[number] if number < len(self.cuts) else self.end)
        return place + (self.cuts[number - 1] if number else 0)

    def behind(self, place: int, second: bool) -> int:
        """Returns the place behind the node of one micro-batch that stands before a place."""
        return self.place(place - 1, second) + 1 if place else 0

    def computing(
        self, seconds: Sequence[float], shared: Collection[int] = frozenset()
    ) -> list[float]:
        """Returns the seconds of the nodes of both, in order.

        Args:
            seconds: The seconds of the nodes of one.
            shared: The nodes that are there once, by number; they come with the first.
        """
        return [
            0.0 if second and number in shared else seconds[number]
            for a, b in self._parts()
            for second in (False, True)
            for number in range(a, b)
        ]

    def _parts(self) -> Iterator[tuple[int, int]]:
        return pairwise([0, *self.cuts, self.end])


@dataclass(frozen=True)
class Events:
    """What happens in a run of a training program; places are as in `onnxpar.cost.timeline`.

    Attributes:
        computing: The seconds of each node.
        transfers: Reshards of values.
        gathers: Gathers of parameters.
        leaving: Reductions of gradients that the program writes.
        reductions: Reductions of gradients that the optimizer's program needs.
        updated: Gathers of updated parameters.
        shared: The nodes that do not depend on the micro-batch, by number.
    """

    computing: Sequence[float]
    transfers: Sequence[Transfer]
    gathers: Sequence[Gather]
    leaving: Sequence[Transfer]
    reductions: Sequence[Member]
    updated: Sequence[Member]
    shared: Collection[int] = frozenset()

    def once(self) -> tuple[Transfer, ...]:
        """Returns what happens once in a step, in its last run."""
        # The step before leaves the gathers of updated parameters running.
        calls = in_buckets(self.reductions, len(self.computing))
        return (*finished_later(self.updated), *calls)

    def elapsed(self, *, once: bool = False) -> float:
        """Returns the seconds of a run; `once`: of the last one of a step."""
        left = delayed(self.leaving, len(self.computing))
        inside = sorted((*self.transfers, *gathered_ahead(self.gathers), *left), key=_ready)
        every = (*self.once(), *inside) if once else inside
        return elapsed(self.computing, sorted(every, key=_ready))

    def foreground(self) -> "Events":
        """Returns the events with every collective of the program in the foreground.

        No gathered parameter is kept for the next gather of it.
        """
        gathers = (Transfer(g.seconds, g.needed, g.needed, overlaps=False) for g in self.gathers)
        inside = (*self.transfers, *gathers)
        return replace(
            self,
            transfers=[replace(t, overlaps=False) for t in inside],
            gathers=(),
            leaving=[replace(t, overlaps=False) for t in self.leaving],
        )

    def turns(self) -> Turns:
        """Returns where micro-batches take turns: at each collective."""
        needed = [*(t.needed for t in self.transfers), *(g.needed for g in self.gathers)]
        cuts = {*needed, *(t.ready for t in self.leaving)}
        end = len(self.computing)
        return Turns(tuple(sorted(cut for cut in cuts if 0 < cut < end)), end)

    def in_turns(self) -> "Events":
        """Returns the events of two micro-batches that take turns at each collective."""
        turns = self.turns()

        def both(events: Sequence[_Event]) -> list[_Event]:
            return [
                replace(
                    event,
                    ready=turns.behind(event.ready, second),
                    needed=turns.place(event.needed, second),
                )
                for event in events
                for second in (False, True)
                if not (second and isinstance(event, Transfer) and event.shared)
            ]

        return Events(
            turns.computing(self.computing, self.shared),
            both(self.transfers),
            # The program gathers a parameter once for two readers in succession.
            sorted(both(self.gathers), key=lambda g: g.needed),
            sorted(both(self.leaving), key=_ready),
            [replace(m, ready=turns.behind(m.ready, True)) for m in self.reductions],
            [replace(m, ready=turns.place(m.ready, False)) for m in self.updated],
        )


def _ready(event: Transfer) -> int:
    return event.ready


@dataclass
class PairedSteps:
    """The steps from which the memory of a micro-batch is counted, and what a pair makes of them.

    Attributes:
        steps: The steps of one micro-batch.
        places: The place of each: the number of nodes that have been computed.
        once: The steps that are there once, by number: whether they come with the second.
        sent: The reshards that run in the background, by number.
    """

    steps: list[MemoryStep] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    once: dict[int, bool] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)

    def in_turns(self, turns: Turns, outputs: Collection[str]) -> Iterator[MemoryStep]:
        """Yields the steps of two micro-batches.

        What runs in the background has its operand and its result in memory while the other
        micro-batch computes.

        Args:
            turns: Where they take turns.
            outputs: The values that leave the program, which are sums over both.
        """
        shared = {m.name for number in self.once for m in self.steps[number].makes}
        parts: dict[int, list[int]] = {}
        starting: dict[int, list[int]] = {}
        for number, place in enumerate(self.places):
            part = bisect_right(turns.cuts, place)
            begins_part = part > 0 and turns.cuts[part - 1] == place
            if number in self.sent and begins_part:
                starting.setdefault(part, []).append(number)
            else:
                parts.setdefault(part, []).append(number)

        def named(name: str, second: bool) -> str:
            if name in shared or (name not in outputs and not second):
                return name
            return f"{name} of the {'second' if second else 'first'}"

        def copied(number: int, second: bool) -> MemoryStep:
            step = self.steps[number]
            makes = (
                Made(
                    named(m.name, second),
                    m.bytes,
                    m.view_of and named(m.view_of, second),
                    () if number in self.sent else tuple(named(o, second) for o in m.over),
                )
                for m in step.makes
            )
            reads = tuple(named(name, second) for name in step.reads)
            return MemoryStep(step.name, reads, tuple(makes), step.work)

        for part in range(len(turns.cuts) + 1):
            for second in (False, True):
                for number in starting.get(part, ()):
                    step = copied(number, second)
                    yield MemoryStep("wait", (*step.reads, *(m.name for m in step.makes)), ())
                for number in (*parts.get(part, ()), *starting.get(part + 1, ())):
                    if self.once.get(number, second) != second:
                        continue
                    yield copied(number, second)
                    for made in self.steps[number].makes if second else ():
                        if made.name in outputs and made.name not in shared:
                            both = tuple(named(made.name, which) for which in (False, True))
                            yield MemoryStep("sum", both, (Made(made.name, made.bytes),))

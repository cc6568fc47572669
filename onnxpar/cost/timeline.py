"""The time of a step in which collectives run in the background of computation.

Computing is on one timeline, the links that overlap are on another. The room `schedule` decides in
the partitioned program when a collective starts and who waits for it; here the same rules are
applied to a plan, which has the nodes of the program and the reshards between them.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from onnxpar.core.machine import Link

_PER_LATENCY = 32
"""How many times its latency the transfer of a bucket takes at least, so that latencies add little.

A larger bucket starts later, and the last one, which nothing hides, takes longer.
"""
_LEAST = 4 << 20
"""Bytes of a bucket at least: smaller messages do not fill a link."""
AHEAD_AT_MOST = 2
"""Gathered parameters that no node has read yet are no larger than the largest times this."""
T = TypeVar("T")


@dataclass(frozen=True)
class Transfer:
    """A reshard on the timeline. A place is a number of nodes that have been computed.

    Attributes:
        seconds: What its collectives take.
        ready: The place from which it may run.
        needed: The place at which it must be complete.
        overlaps: Whether its link overlaps; otherwise it runs when it is needed, and nothing is
            computed meanwhile.
        size: Bytes that are in memory from there on only if it runs in the background: its result,
            or the operand if no node reads the result.
        shared: Whether two micro-batches in one program share its result.
        handing: Seconds that the device spends if it runs in the background.
    """

    seconds: float
    ready: int
    needed: int
    overlaps: bool
    size: int = 0
    shared: bool = False
    handing: float = 0.0


@dataclass(frozen=True)
class Gather:
    """A gather of a parameter for one node.

    Attributes:
        shard: What is gathered, and how: equal for gathers with equal results.
        seconds: What it takes.
        ready: The place from which its operand is there.
        needed: The place of the node.
        size: Bytes of its result.
        overlaps: As in `Transfer`, like the next one.
        handing: Seconds that the device spends if it runs in the background.
    """

    shard: Hashable
    seconds: float
    ready: int
    needed: int
    size: int
    overlaps: bool
    handing: float = 0.0


@dataclass(frozen=True)
class Member:
    """A collective that may share a call: a gradient's reduction, or an updated parameter's gather.

    Attributes:
        kind: Collectives of one kind may be in one bucket.
        seconds: What it takes alone.
        start: The part of it that a call takes however little it sends.
        ready: The place from which its operand is there; of an updated parameter, the place of its
            first reader in the next step.
        size: The bytes of the tensor.
        link: Its link.
    """

    kind: Hashable
    seconds: float
    start: float
    ready: int
    size: int
    link: Link


def pays(computing: float, seconds: float, handing: float) -> bool:
    """Whether a collective saves time in the background.

    What passes there is hidden as long as the device computes. This must be at least what the
    device spends to hand the collective over.

    Args:
        computing: Seconds of what is computed between its operand and its first reader.
        seconds: What the collective takes.
        handing: Seconds that the device spends to run it in the background.
    """
    return min(computing, seconds) >= handing


def together(bucket: Sequence[Member]) -> float:
    """Returns the seconds of one call."""
    return sum(m.seconds for m in bucket) - sum(m.start for m in bucket[1:])


@dataclass(frozen=True)
class Played:
    """When nodes and transfers run, in seconds from the beginning.

    Attributes:
        begins: When each node begins.
        spans: When each transfer begins and ends, in the order given.
        end: When all is done.
    """

    begins: tuple[float, ...]
    spans: tuple[tuple[float, float], ...]
    end: float


def elapsed(computing: Sequence[float], transfers: Iterable[Transfer]) -> float:
    """Returns the seconds of nodes and transfers; the arguments are those of `played`."""
    return played(computing, transfers).end


def played(computing: Sequence[float], transfers: Iterable[Transfer]) -> Played:
    """Returns when nodes and transfers run.

    A transfer whose link overlaps begins when it is ready and the link is free of those before it,
    if that pays; else it begins when it is needed. A node waits until the transfers are complete
    that it needs.

    Args:
        computing: The seconds of each node, in order.
        transfers: The transfers; those that are ready at one place begin in this order.
    """
    beginning: dict[int, list[int]] = {}
    needed: dict[int, list[int]] = {}
    row = tuple(transfers)
    before = list(accumulate(computing, initial=0.0))
    for number, transfer in enumerate(row):
        between = before[transfer.needed] - before[transfer.ready]
        worth = transfer.overlaps and pays(between, transfer.seconds, transfer.handing)
        if worth and transfer.ready < transfer.needed:
            beginning.setdefault(transfer.ready, []).append(number)
        needed.setdefault(transfer.needed, []).append(number)
    spans: dict[int, tuple[float, float]] = {}
    begins = []
    now = free = 0.0
    for place in range(len(computing) + 1):
        for number in beginning.get(place, ()):
            start = max(now, free)
            free = start + row[number].seconds
            spans[number] = start, free
        for number in needed.get(place, ()):
            if number in spans:
                now = max(now, spans[number][1]) + row[number].handing
                continue
            start = max(now, free) if row[number].overlaps else now
            now = start + row[number].seconds
            free = now if row[number].overlaps else free
            spans[number] = start, now
        if place < len(computing):
            begins.append(now)
            now += computing[place]
    ordered = tuple(spans[number] for number in range(len(row)))
    return Played(tuple(begins), ordered, now)


def in_buckets(members: Iterable[Member], end: int) -> Iterator[Transfer]:
    """Yields a transfer for each bucket, which begins when the last operand is there.

    Args:
        members: The collectives.
        end: The place at which all must be complete.
    """
    for bucket in sorted(_calls(members), key=lambda b: b[-1].ready):
        yield Transfer(together(bucket), bucket[-1].ready, end, bucket[0].link.overlaps)


def finished_later(members: Iterable[Member]) -> Iterator[Transfer]:
    """Yields the calls that gather updated parameters, each needed by its first reader.

    They run from the beginning of the next step, in the order of the readers.
    """
    for bucket in sorted(_calls(members), key=lambda b: b[0].ready):
        yield Transfer(together(bucket), 0, bucket[0].ready, bucket[0].link.overlaps)


def _calls(members: Iterable[Member]) -> Iterator[list[Member]]:
    found = sorted(members, key=lambda m: m.ready)
    return buckets(found, lambda m: (m.kind, m.link), lambda m: m.size, lambda m: m.link)


def buckets(
    items: Iterable[T],
    kind: Callable[[T], Hashable],
    size: Callable[[T], int],
    link: Callable[[T], Link],
) -> Iterator[list[T]]:
    """Divides collectives, in their order, into buckets of one call.

    Args:
        items: The collectives.
        kind: Those of one kind may be in one bucket.
        size: The bytes of each tensor.
        link: The link of each.
    """
    filling: dict[Hashable, list[T]] = {}
    for item in items:
        bucket = filling.setdefault(kind(item), [])
        bucket.append(item)
        wire = link(item)
        least = max(_LEAST, _PER_LATENCY * wire.latency * wire.bandwidth)
        if sum(map(size, bucket)) >= least:
            yield filling.pop(kind(item))
    yield from filling.values()


def latest_first(sizes: Sequence[int], number: int) -> Iterator[int]:
    """Yields the later collectives to which the wait for one may be delayed, the latest first.

    Operands of those under way are together no larger than the largest, or there are two.

    Args:
        sizes: The bytes of the operands, in order.
        number: The number of the collective. The number after the last one stands for the end of
            the program.
    """
    most, last = max(sizes), number + 1
    while last < len(sizes) and sum(sizes[number : last + 1]) <= most:
        last += 1
    yield from range(last, number, -1)


def delayed(transfers: Sequence[Transfer], end: int) -> Iterator[Transfer]:
    """Yields transfers whose results no node reads, each awaited at a later one or at the end."""
    places, sizes = [*(t.ready for t in transfers), end], [t.size for t in transfers]
    for number, transfer in enumerate(transfers):
        yield replace(transfer, needed=places[next(latest_first(sizes, number))])


def gathered_ahead(gathers: Sequence[Gather]) -> Iterator[Transfer]:
    """Yields the gathers of parameters; each begins before the program waits for an earlier one.

    Results that nobody reads yet are together no larger than `AHEAD_AT_MOST` of the largest. A
    result is kept if the next gather has the same one.
    """
    kept = [g for n, g in enumerate(gathers) if not n or g.shard != gathers[n - 1].shard]
    most = AHEAD_AT_MOST * max((g.size for g in kept), default=0)
    first = 0
    for number, gather in enumerate(kept):
        while first < number - 1 and sum(g.size for g in kept[first + 1 : number + 1]) > most:
            first += 1
        ready = max(kept[first].needed, gather.ready) if number else gather.needed
        yield Transfer(
            gather.seconds,
            ready,
            gather.needed,
            gather.overlaps,
            gather.size,
            handing=gather.handing,
        )

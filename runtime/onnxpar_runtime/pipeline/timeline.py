"""When each step of each rank happens, where ranks wait for one another."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.schedule import Place, Step

# The places that must have ended before a place can begin, each with the time that lies between.
Needs = Mapping[Place, Sequence[tuple[Place, float]]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of all steps, in the unit of the durations.

    Attributes:
        starts: For each rank the times at which its steps begin, as far as it comes.
        ends: The times at which they end.
        stuck: For each rank the index of the step that it waits in forever; None where it has none.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    stuck: tuple[int | None, ...]


def timeline(durations: Sequence[Sequence[float]], needs: Needs) -> Timeline:
    """Returns when each step happens: as soon as the one before it, and what it needs, have ended.

    Args:
        durations: For each rank the durations of its steps.
        needs: What a step needs, of its own rank or of others.
    """
    starts: list[list[float]] = [[] for _ in durations]
    ends: list[list[float]] = [[] for _ in durations]
    waiting: defaultdict[Place, list[int]] = defaultdict(list)
    runnable = deque(range(len(durations)))
    while runnable:
        rank = runnable.popleft()
        while (index := len(ends[rank])) < len(durations[rank]):
            needed = needs.get((rank, index), ())
            missing = next((place for place, _ in needed if place[1] >= len(ends[place[0]])), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            start = ends[rank][-1] if index else 0.0
            start = max([start, *(ends[at][of] + delay for (at, of), delay in needed)])
            starts[rank].append(start)
            ends[rank].append(start + durations[rank][index])
            runnable.extend(waiting.pop((rank, index), ()))
    return Timeline(
        tuple(map(tuple, starts)),
        tuple(map(tuple, ends)),
        tuple(
            len(done) if len(done) < len(wanted) else None
            for done, wanted in zip(ends, durations, strict=True)
        ),
    )


def require_end(name: str, lists: Sequence[Sequence[Step]], needs: Needs, result: Timeline) -> None:
    """Returns if all ranks come to the end of their lists.

    Raises:
        ScheduleError: They do not: each stuck rank, its step, and what this waits for.
    """
    texts = []
    for rank, index in enumerate(result.stuck):
        if index is None:
            continue
        other, position = next(
            (at, of) for (at, of), _ in needs[rank, index] if of >= len(result.ends[at])
        )
        texts.append(
            f"rank {rank} waits at step {index}, {lists[rank][index]}, until rank {other} "
            f"reaches step {position}, {lists[other][position]}"
        )
    if texts:
        raise ScheduleError(f"schedule {name!r} deadlocks: {'; '.join(texts)}")

"""The times of each rank's steps, if ranks wait for one another."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.schedule import Place, Step

# The places whose steps must end before a step can begin, each with the time in between.
Needs = Mapping[Place, Sequence[tuple[Place, float]]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of all steps, in the unit of the durations.

    Attributes:
        starts: For each rank the times at which its steps begin, up to a step that is stuck.
        ends: The times at which they end.
        stuck: For each rank the index of the step in which it waits forever; None if it ends.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    stuck: tuple[int | None, ...]


def timeline(durations: Sequence[Sequence[float]], needs: Needs) -> Timeline:
    """Returns the times of all steps. A step begins when the last step and its needs have ended.

    Args:
        durations: For each rank the durations of its steps.
        needs: The steps that a step needs, on its own rank or on others.
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
    """Checks that all ranks come to the end of their lists.

    Raises:
        ScheduleError: They do not; names each stuck rank, its step, and what the step waits for.
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

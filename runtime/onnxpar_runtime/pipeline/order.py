"""The order of a schedule's computations, and whether they are complete."""

from collections import Counter
from itertools import pairwise

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.schedule import Action, Kind, Place, Schedule
from onnxpar_runtime.pipeline.timeline import Timeline, require_end, timeline

# A virtual stage, a micro-batch, and one of FORWARD, BACKWARD (also that of the inputs alone) and
# BACKWARD_WEIGHT.
Unit = tuple[int, int, Kind]


def unit(schedule: Schedule, rank: int, action: Action) -> Unit:
    """Returns the unit of an action; the inputs' part of a split backward counts as a backward."""
    kind = Kind.BACKWARD if action.kind is Kind.BACKWARD_INPUT else action.kind
    return schedule.virtual_stage(rank, action.chunk), action.micro_batch, kind


def where(schedule: Schedule) -> dict[Unit, Place]:
    """Returns the place of every unit of a schedule."""
    return {
        unit(schedule, rank, action): (rank, index) for rank, index, action in schedule.places()
    }


def require_complete(schedule: Schedule) -> None:
    """Checks that every virtual stage computes every micro-batch once.

    Each has one forward. Unless the schedule is for evaluation, it then has one backward, either
    unsplit or as the inputs' part and then the weights' part.

    Raises:
        ScheduleError: A computation is missing or doubled, has an unknown chunk or micro-batch, or
            comes before one that it needs; the message names rank and computation.
    """
    name = f"schedule {schedule.name!r}"
    if len(schedule.ranks) != schedule.stages:
        raise ScheduleError(
            f"{name}: expected the lists of {schedule.stages} ranks, got {len(schedule.ranks)}"
        )
    has_backward = schedule.has_backward
    for rank, actions in enumerate(schedule.ranks):
        for action, count in Counter(actions).items():
            if not (
                0 <= action.chunk < schedule.chunks
                and 0 <= action.micro_batch < schedule.micro_batches
            ):
                raise ScheduleError(
                    f"{name}, rank {rank}: {action}, but there are {schedule.chunks} chunks and "
                    f"{schedule.micro_batches} micro-batches"
                )
            if count > 1:
                raise ScheduleError(f"{name}, rank {rank}: {action} {count} times, expected once")
        at = {action: index for index, action in enumerate(actions)}
        for chunk in range(schedule.chunks):
            for micro_batch in range(schedule.micro_batches):
                _require_unit(f"{name}, rank {rank}", has_backward, at, chunk, micro_batch)


def _require_unit(
    place: str, has_backward: bool, at: dict[Action, int], chunk: int, micro_batch: int
) -> None:
    """Checks the actions of one rank, with their indices `at`, for one micro-batch and chunk."""
    forward, unsplit, inputs, weights = (
        Action(kind, chunk, micro_batch)
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    if unsplit in at and (inputs in at or weights in at):
        part = inputs if inputs in at else weights
        raise ScheduleError(f"{place}: both {unsplit} and {part}, expected one of them")
    wanted = [forward]
    if has_backward:
        wanted += [inputs, weights] if inputs in at or weights in at else [unsplit]
    for action in wanted:
        if action not in at:
            raise ScheduleError(f"{place}: {action} is missing")
    for before, after in pairwise(wanted):
        if at[before] > at[after]:
            raise ScheduleError(
                f"{place}: {after} is step {at[after]}, expected it after {before}, which is step"
                f" {at[before]}"
            )


def in_order(schedule: Schedule) -> Timeline:
    """Returns a timeline of a schedule's computations, each virtual stage after the one before it.

    Forwards take 1, unsplit backwards 2, and each part of a split backward 1. No edge between
    virtual stages needs another order.

    Raises:
        ScheduleError: The computations wait for one another in a circle.
    """
    durations = [
        [2.0 if action.kind is Kind.BACKWARD else 1.0 for action in actions]
        for actions in schedule.ranks
    ]
    found = where(schedule)
    needs = {
        (rank, index): [
            (found[key], 0.0) for key in _sources(unit(schedule, rank, action)) if key in found
        ]
        for rank, index, action in schedule.places()
    }
    result = timeline(durations, needs)
    require_end(schedule.name, schedule.ranks, needs, result)
    return result


def _sources(key: Unit) -> tuple[Unit, ...]:
    """Returns the units whose results a unit reads, in a pipeline that is a chain."""
    stage, micro_batch, kind = key
    if kind is Kind.FORWARD:
        return ((stage - 1, micro_batch, Kind.FORWARD),)
    if kind is Kind.BACKWARD:
        return (stage, micro_batch, Kind.FORWARD), (stage + 1, micro_batch, Kind.BACKWARD)
    return ((stage, micro_batch, Kind.BACKWARD),)

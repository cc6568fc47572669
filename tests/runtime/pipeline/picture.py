"""A schedule as text, a row over time for each rank, and the activations that ranks keep."""

from itertools import accumulate

from onnxpar_runtime.pipeline.schedule import Action, Kind, PlayedSchedule, Schedule
from onnxpar_runtime.pipeline.simulate import Times, simulate

# The characters that fill a computation after its label, and idle time.
_FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.BACKWARD_INPUT: "=", Kind.BACKWARD_WEIGHT: "~"}
_IDLE = "."


def render(program: PlayedSchedule, times: Times, width: int | None = None) -> str:
    """Returns the program over time, a line for each rank, for example `|F0-F1-......B0====`.

    A computation is shown as its kind (F forward, B backward; I and W its parts for inputs and
    weights), the chunk as a letter if there are several, and the micro-batch; its width is its
    time. Dots are idle time. The share of idle time and the peak of activations end the line.

    Args:
        program: The program.
        times: The times of its computations and transfers.
        width: Columns of time; None for as many as the label of the shortest computation needs. A
            label that does not fit is truncated.

    Raises:
        ScheduleError: As `simulate`.
    """
    schedule = program.schedule
    simulation = simulate(program, times)
    if width is None:
        shortest = min(
            times.of(action.kind, schedule.virtual_stage(rank, action.chunk))
            for rank, _, action in schedule.places()
        )
        longest = max(len(_label(action, schedule.chunks)) for _, _, action in schedule.places())
        width = round((longest + 1) * simulation.makespan / shortest)
    scale = width / simulation.makespan
    margin = len(f"rank {schedule.stages - 1} ")
    lines = []
    for rank, (peak, bubble) in enumerate(
        zip(activation_peaks(schedule), simulation.bubbles, strict=True)
    ):
        line = ""
        for action, start, end in zip(
            schedule.ranks[rank], simulation.starts[rank], simulation.ends[rank], strict=True
        ):
            line = line.ljust(round(start * scale), _IDLE)
            size = round(end * scale) - len(line)
            line += _label(action, schedule.chunks)[:size].ljust(size, _FILL[action.kind])
        lines.append(
            f"{f'rank {rank}':<{margin}}|{line.ljust(width, _IDLE)}| idle {bubble:.1%}, {peak} kept"
        )
    return "\n".join(lines)


def _label(action: Action, chunks: int) -> str:
    """Returns the label of a computation."""
    letter = chr(ord("a") + action.chunk) if chunks > 1 else ""
    return f"{action.kind.value}{letter}{action.micro_batch}"


def activation_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Returns for each rank the largest number of activations that it keeps at a time.

    An activation (of one micro-batch in one chunk) is kept from the forward to the end of the
    backward, or of the weights' part of a split backward. Without a backward it is kept during the
    forward alone.

    Args:
        schedule: A complete schedule.
    """
    if not schedule.has_backward:
        return (1,) * schedule.stages
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: 0, Kind.BACKWARD_WEIGHT: -1}
    return tuple(
        max(accumulate(changes[action.kind] for action in actions)) for actions in schedule.ranks
    )

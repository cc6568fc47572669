"""The activations that a schedule keeps for its backwards."""

from itertools import accumulate

from onnxpar_runtime.pipeline.schedule import Kind, Schedule


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

"""How much a schedule keeps of its forwards for its backwards."""

from collections.abc import Sequence

from onnxpar_runtime.pipeline.schedule import Kind, Schedule


def activation_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Returns for each rank the most activations, of one micro-batch in one chunk, kept at a time.

    They are kept from the forward to the end of the backward; of a split one, to the end of the
    weights' part. Where nothing is differentiated they live during the forward alone.
    """
    return peak_bytes(schedule, [1] * schedule.virtual_stages)


def peak_bytes(
    schedule: Schedule, kept: Sequence[int], kept_for_weights: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns for each rank the most bytes of activations that it keeps at a time.

    Args:
        schedule: A complete schedule.
        kept: For each virtual stage the bytes that the forward of a micro-batch keeps.
        kept_for_weights: Those of them that are still kept after the inputs' part of a split
            backward; None for all.
    """
    later = kept if kept_for_weights is None else kept_for_weights
    peaks = []
    for rank, actions in enumerate(schedule.ranks):
        live = peak = 0
        for action in actions:
            stage = schedule.virtual_stage(rank, action.chunk)
            if action.kind is Kind.FORWARD:
                live += kept[stage]
                peak = max(peak, live)
                if not schedule.has_backward:
                    live -= kept[stage]
            elif action.kind is Kind.BACKWARD:
                live -= kept[stage]
            elif action.kind is Kind.BACKWARD_INPUT:
                live += later[stage] - kept[stage]
                # What the weights' part alone needs may be more, made by the inputs' part.
                peak = max(peak, live)
            else:
                live -= later[stage]
        peaks.append(peak)
    return tuple(peaks)

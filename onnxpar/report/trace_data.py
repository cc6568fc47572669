"""What the page shows of a trace, as plain data."""

from typing import Any

from onnxpar.report.measured_times import measured_times
from onnxpar.report.step_timelines import step_timelines
from onnxpar.report.trace_segments import rank_segments
from onnxpar.report.trace_table import TraceTable
from onnxpar_format.trace_times import spans_of_ranks, steps_of_ranks


def trace_data(found: TraceTable) -> dict[str, Any]:
    """Returns the trace's summary, timelines of steps, and the times to compare with predictions.

    Keys: `columns`, `ranks` and `remarks` of the summary; `device`; `stage_devices`, the ranks of a
    stage; `timelines`, as `step_timelines`; and `measured`, as `measured_times`.
    """
    trace, steps = found.trace, steps_of_ranks(found.trace)
    seen = [
        rank_segments(spans, own) for spans, own in zip(spans_of_ranks(trace), steps, strict=True)
    ]
    return {
        "columns": found.columns(),
        "ranks": [vars(rank) for rank in found.times.ranks],
        "remarks": found.remarks(),
        "device": trace.device,
        "stage_devices": trace.stage_devices,
        "timelines": step_timelines(trace, steps, seen),
        "measured": measured_times(trace, steps, seen),
    }

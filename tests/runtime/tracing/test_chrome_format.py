"""The check of a trace's format finds what Chrome or Perfetto would not accept."""

import json
from typing import Any

import pytest

from onnxpar_format.trace import FOREGROUND, MAIN, Clock, Trace, TraceSpan, trace_json
from tests.chrome_trace import complaints


def document() -> dict[str, Any]:
    """A step of two ranks with two programs, each with a call in it."""
    spans = []
    for rank in range(2):
        # Thirds of a second have no decimal notation: the ends must still be rounded alike.
        spans.append(TraceSpan(rank, MAIN, "step", "step 1", 0.0, 1.0))
        for number in range(2):
            begin = number / 3
            end = 1.0 if number else 1 / 3
            spans.append(TraceSpan(rank, MAIN, "program", "model", begin, end))
            spans.append(TraceSpan(rank, FOREGROUND, "call", "sum", begin, end, {"op": "sum"}))
    found: dict[str, Any] = json.loads(trace_json(Trace("train", 2, [Clock()] * 2, spans)))
    return found


def test_a_trace_is_in_order() -> None:
    assert complaints(document()) == []


AT = {"ts": 0, "pid": 0, "tid": 0, "name": "x"}
FLOW = AT | {"ph": "s", "id": 1, "cat": "c"}


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ([AT | {"ph": "X"}], "X without dur"),
        ([AT | {"ph": "X", "dur": -1}], "X with the times [0, -1]"),
        ([AT | {"ph": "?"}], "phase '?'"),
        ([AT | {"ph": "X", "dur": 1, "pid": "0"}], "X of 0, 0"),
        ([AT | {"ph": "M", "args": {}}], "metadata"),
        ([AT | {"ph": "X", "dur": 1}], "behind"),
        ([AT | {"ph": "X", "ts": 9e5, "dur": 2e5}], "ends 100000000 ns after"),
        ([AT | {"ph": "E", "ts": 2e6}], "an end without a beginning"),
        ([AT | {"ph": "B", "ts": 2e6}], "a beginning without an end"),
        ([AT | {"ph": "X", "ts": 2e6, "dur": 1, "tid": 7}], "0, 7: no thread_name"),
        ([AT | {"ph": "X", "ts": 2e6, "dur": 1, "pid": 7}], "7, 0: no process_name"),
        ([FLOW], "('c', 1): ['s']"),
        ([FLOW | {"ph": "f"}, FLOW | {"ts": 1}], "('c', 1): ['f', 's']"),
        ([FLOW, FLOW | {"ph": "f", "id": 2}], "('c', 2): ['f']"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_wrong_is_found(more: list[dict[str, Any]], complaint: str) -> None:
    found = document()
    found["traceEvents"] += more
    assert any(complaint in text for text in complaints(found))


def test_what_is_complete_is_right() -> None:
    found = document()
    late = AT | {"ts": 2e6}
    found["traceEvents"] += [late | {"ph": "B"}, late | {"ph": "E"}, FLOW, FLOW | {"ph": "f"}]
    assert complaints(found) == []

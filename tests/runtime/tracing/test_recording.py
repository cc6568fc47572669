"""Who waits for whom, in calls on GPUs."""

from onnxpar_format.trace import BACKGROUND, CALL, WAITING, TraceSpan
from onnxpar_runtime.tracing.recording import _name_last


def call(rank: int, start: float, end: float, place: int, *, device: bool = True) -> TraceSpan:
    more = {"op": "collective", "ranks": [0, 1, 2], "lane": 0, "place": place}
    more |= {"device": True} if device else {}
    return TraceSpan(rank, BACKGROUND, CALL, "sum", start, end, more)


def test_a_rank_waits_until_the_last_one_begins() -> None:
    spans = [call(0, 1, 5, 0), call(1, 3, 5, 0), call(2, 2, 5, 0)]
    # Only rank 0 has begun this one within the recording.
    spans.append(call(0, 6, 7, 1))
    # Calls on hosts are counted apart, and the library knows when the last rank came.
    spans += [call(rank, 8 + rank, 11, 0, device=False) for rank in range(3)]
    spans.append(TraceSpan(0, BACKGROUND, WAITING, "waiting", 8, 10, {}))
    waits = [(s.rank, s.track, s.kind, s.start, s.end) for s in _name_last(spans)]
    assert waits == [(0, BACKGROUND, WAITING, 1, 3), (2, BACKGROUND, WAITING, 2, 3)]
    assert [s.more.get("last") for s in spans] == [1, 1, 1, None, 2, 2, 2, 2]


def test_a_wait_is_no_longer_than_its_call() -> None:
    """Clocks of GPUs are compared to some microseconds."""
    wait, *_ = _name_last([call(0, 1, 2, 0), call(1, 3, 4, 0), call(2, 3, 4, 0)])
    assert (wait.rank, wait.end) == (0, 2)

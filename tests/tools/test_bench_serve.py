"""The test of a server: what it sends, and its verdicts."""

from typing import Any

import pytest
import serve

SENT = serve.requests(200, 0)


def test_requests_are_of_all_kinds() -> None:
    assert sum(one.leave is not None for one in SENT) == 20
    assert {one.status for one in SENT} == {None, 400, 404}
    assert sum(one.status is not None for one in SENT) == 20
    plain = [one for one in SENT if one.leave is None and one.status is None]
    assert {(one.stream, one.body["temperature"] > 0) for one in plain} == {
        (stream, drawn) for stream in (False, True) for drawn in (False, True)
    }


@pytest.mark.parametrize(
    ("sent", "want", "got", "right"),
    [
        (serve.Sent({}, False), [1, 2], {"status": None, "tokens": [1, 2]}, True),
        (serve.Sent({}, False), [1, 2], {"status": None, "tokens": [1]}, False),
        (serve.Sent({}, False), [1, 2], {"status": 503, "tokens": None}, False),
        (serve.Sent({}, True, leave=2), [1, 2, 3], {"status": None, "tokens": [1, 2]}, True),
        (serve.Sent({}, True, leave=2), [1, 2, 3], {"status": None, "tokens": [1, 3]}, False),
        (serve.Sent({}, True, status=400), None, {"status": 400, "tokens": None}, True),
        (serve.Sent({}, True, status=400), None, {"status": None, "tokens": [1]}, False),
        (serve.Sent({}, True, status=404), None, {"status": 400, "tokens": None}, False),
    ],
)
def test_each_answer_is_judged(
    sent: serve.Sent, want: list[int] | None, got: dict[str, Any], right: bool
) -> None:
    assert (serve.wrong(sent, want, got) is None) == right

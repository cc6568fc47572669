"""The benchmark of steps on two nodes: its arithmetic, and that its sides run and agree."""

from dataclasses import replace

import pytest
import step_sides
import two_nodes
from step_cases import Side

LINKED = Side("onnxpar", "dp", 2, 1, link="1gbit")
RATE = 100e6


def row(side: Side, seconds: tuple[float, ...], sent: float = 0.0) -> step_sides.Row:
    both = {"forward_backward": seconds, "update": seconds}
    every = tuple(sent for _ in seconds)
    return step_sides.Row(
        "gpt", "sgd", side, seconds, seconds, seconds, 0.0, least=1.0, parts=both, sent=every
    )


@pytest.mark.parametrize(
    ("level", "megabytes", "told"),
    [
        # The backward pass takes 300 - 100 ms, the wire 50 or 800.
        (0, 5, "40 ms saved; computation 200 ms, wire 50 ms: 80% hidden"),
        (0, 80, "40 ms saved; computation 200 ms, wire 800 ms: 20% hidden"),
        # Both passes.
        (1, 80, "40 ms saved; computation 300 ms, wire 800 ms: 13% hidden"),
    ],
)
def test_what_is_hidden_is_a_share_of_the_shorter_one(
    level: int, megabytes: float, told: str
) -> None:
    side = replace(LINKED, level=level)
    rows = [
        row(two_nodes.ONE_NODE, (0.3, 0.3, 9.0)),
        row(two_nodes.FORWARD, (0.2, 0.1, 0.1)),
        row(side, (0.46, 8.0, 0.5), megabytes * 1e6),
        row(replace(side, overlap=False), (0.5, 9.0, 0.6), megabytes * 1e6),
    ]
    (found,) = two_nodes.hidden(rows, RATE)
    assert found.startswith(f"level {level}:") and found.endswith(told)


@pytest.mark.full
def test_all_sides_run_and_agree(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = two_nodes.main(["--quick", "--rounds", "1", "--level", "0", "3"])
    except step_sides.SideError as error:
        if "tools/two-nodes: " not in str(error):
            raise
        pytest.skip(f"no two nodes here: {error}")
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    sent = {
        (text[:34].strip(), text[34:44].strip()): float(text[44:].split()[5])
        for text in lines
        if text.startswith("onnxpar dp2")
    }
    assert sent.pop(("onnxpar dp2", "one node")) == 0
    assert set(sent) == {
        (f"onnxpar dp2{level}{overlap}", "at 1gbit")
        for level in ("", " level 3")
        for overlap in ("", " no overlap")
    }
    # The gradients are 0.5 MB. Level 3 gathers parameters in the forward and in the backward pass.
    # Headers, acknowledgements and the loss are a fifth of so little.
    for (side, _), megabytes in sent.items():
        assert megabytes == pytest.approx(0.7 if "level 3" in side else 0.5, abs=0.15), side
    assert sum(text.startswith("level ") for text in lines) == 2

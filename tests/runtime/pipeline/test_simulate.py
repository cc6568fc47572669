"""Times, bytes and the picture of small schedules whose numbers can be counted by hand."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.schedule import PlayedSchedule
from onnxpar_runtime.pipeline.schedule_kinds import make
from onnxpar_runtime.pipeline.simulate import Times, simulate
from onnxpar_runtime.pipeline.transfers import chain, with_transfers
from tests.runtime.pipeline.picture import activation_peaks, render


def program(name: str, stages: int, micro_batches: int, chunks: int = 1) -> PlayedSchedule:
    schedule = make(name, stages, micro_batches, chunks)
    return with_transfers(schedule, chain(schedule))


def test_unequal_stages() -> None:
    # The slow stage works without a pause: 1 until its input is there, 3 · (2 + 3), then the
    # other's backward of the last micro-batch.
    times = Times((1, 2), (2, 3), (1, 1), (1, 2), (0, 0))
    result = simulate(program("1f1b", 2, 3), times)
    assert result.makespan == 1 + 3 * 5 + 2
    assert result.busy == (9, 15)
    assert result.bubbles == (0.5, pytest.approx(1 / 6))
    assert result.starts[1] == (1, 3, 6, 8, 11, 13)
    assert result.ends[0] == (1, 2, 8, 9, 13, 18)


def test_transfers_take_the_sender_s_time() -> None:
    times = Times((1, 1), (2, 2), (1, 1), (1, 1), (0.5, 0.25))
    result = simulate(program("gpipe", 2, 1), times)
    assert result.starts == ((0, 4.75), (1.5, 2.5))
    assert result.makespan == 6.75


def test_times_for_each_virtual_stage() -> None:
    times = replace(Times.equal(4), transfer=(0.0,) * 2)
    with pytest.raises(ScheduleError, match="times of transfer: expected 4, one for each virt"):
        simulate(program("interleaved", 2, 2, 2), times)


@pytest.mark.parametrize(
    ("schedule", "peaks"),
    [
        # Rank 0 keeps its first chunk of both micro-batches, then its second of both.
        (("interleaved", 2, 2, 2), (4, 3)),
        # The last rank computes the parameters' gradients two micro-batches late.
        (("zb-h1", 3, 4), (3, 3, 3)),
        (("forward", 3, 5, 2), (1, 1, 1)),
    ],
)
def test_activations_kept(schedule: tuple[Any, ...], peaks: tuple[int, ...]) -> None:
    assert activation_peaks(make(*schedule)) == peaks


def test_picture() -> None:
    assert render(program("1f1b", 2, 3), Times.equal(2)).splitlines() == [
        "rank 0 |F0-F1-......B0====F2-B1====...B2====| idle 25.0%, 2 kept",
        "rank 1 |...F0-B0====F1-B1====F2-B2====......| idle 25.0%, 1 kept",
    ]
    assert render(program("interleaved", 2, 2, 2), Times.equal(4), width=30).splitlines() == [
        "rank 0 |FaFaFbFb....Bb0=..Bb1=Ba0=Ba1=| idle 20.0%, 4 kept",
        "rank 1 |..FaFaFbBb0=FbBb1=Ba0=Ba1=....| idle 20.0%, 3 kept",
    ]
    assert render(program("zb-h1", 2, 2), Times.equal(2)).splitlines() == [
        "rank 0 |F0-F1-...I0=W0~I1=W1~| idle 14.3%, 2 kept",
        "rank 1 |...F0-I0=F1-I1=W0~W1~| idle 14.3%, 2 kept",
    ]


def test_pictures_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs/design/0016-pipeline.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```text\n(gpipe.*?)^```", page, re.MULTILINE | re.DOTALL)
    pictures = block.strip().split("\n\n")
    assert len(pictures) == 4
    for picture in pictures:
        title, *lines = picture.splitlines()
        name, *numbers = re.findall(r"^[\w-]+|\d+(?= )", title)
        drawn = program(name, *map(int, numbers))
        assert render(drawn, Times.equal(drawn.schedule.virtual_stages)).splitlines() == lines

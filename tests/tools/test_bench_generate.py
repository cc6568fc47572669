"""The benchmark of generation: its verdicts, and that its sides run and agree."""

import sys
from dataclasses import replace
from pathlib import Path

import generate
import pytest
from generate_cases import Job
from step_cases import Side
from step_sides import SideError

from onnxpar.api.shard_model import shard_model

PLAIN = Side("onnxruntime", "plain", 1, 2)
ONE, TENSOR = Side("onnxpar", "one", 1, 2), Side("onnxpar", "tp", 2, 1)


def row(side: Side, *ratios: tuple[float, ...]) -> generate.Row:
    first = tuple(turns[0] for turns in ratios)
    return generate.Row(32, side, first, ratios, ratios, first, ratios, None)


@pytest.mark.parametrize(
    ("side", "ratios", "missed"),
    [
        (ONE, (1.0, 1.02, 1.02), 0),
        (ONE, (1.03, 1.03, 1.0), 1),
        (TENSOR, (1.01, 1.01, 1.0), 1),
        (TENSOR, (0.5, 0.5, 1.03), 1),
        (ONE, (1.1, 1.1, 1.2), 2),
        (PLAIN, (9.0, 9.0, 19.0), 0),
    ],
)
def test_goals_are_for_all_tokens_and_for_the_last(
    side: Side, ratios: tuple[float, ...], missed: int
) -> None:
    assert len(row(side, ratios).missed(generate.goal_of(side))) == missed


def test_thirds_are_of_all_rounds() -> None:
    found = row(ONE, (1.0, 2.0, 3.0), (1.0, 2.0, 5.0), (1.5, 2.0, 4.0))
    assert found.thirds == (1.0, 4.0) and found.ratio == 2.0


def test_a_side_that_cannot_start_says_why(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "absent"), 5, 5, 16)
    with (
        generate.start(ONE, job, sys.executable, tmp_path) as running,
        pytest.raises(SideError, match="absent"),
    ):
        running.connect()


@pytest.mark.full
@pytest.mark.parametrize("bits", [4, 32])
def test_all_sides_make_the_same_tokens(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    generate.export(folder, bits, quick=True)
    job = Job(str(folder), prompt=4, new=9, vocabulary=generate.QUICK["vocab_size"])
    sides = {PLAIN: (job, sys.executable)}
    for side, strategy in ((ONE, "dp"), (TENSOR, "tp=2")):
        out = tmp_path / side.way
        shard_model(folder / "model.onnx", strategy, out, devices=side.ranks)
        sides[side] = (replace(job, files=str(out)), sys.executable)
    rows = generate.measure(sides, bits, rounds=2, turn=4, folder=tmp_path)
    assert [row.side for row in rows] == [PLAIN, ONE, TENSOR]
    assert [row.differs for row in rows] == [None] * 3
    assert [len(turns) for turns in rows[2].ratios] == [2, 2] and len(rows[2].first) == 2
    assert rows[0].ratio == 1.0

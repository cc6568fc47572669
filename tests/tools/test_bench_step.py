"""The benchmark of training steps: its verdicts, and that its sides run and agree."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import step
from step_cases import BATCHES, QUICK, Job, Side

from tests.tiers import FULL

ONE, DATA, TENSOR = step.OURS


def row(side: Side, ratios: tuple[float, ...], difference: float = 0.0) -> step.Row:
    seconds = tuple(2 * r for r in ratios)
    return step.Row("mlp", "sgd", side, seconds, ratios, ratios, difference, least=1.0)


def test_goals_are_pytorch_s_own_where_it_was_measured() -> None:
    base = row(step.BASE, (1.0, 1.0, 1.0))
    ours = [row(side, (1.0, 1.0, 1.0)) for side in step.OURS]
    assert step.goals([base, *ours]) == {ONE: 1.05, DATA: 2.45, TENSOR: 1.58}
    theirs = [row(step.THEIRS[0], (3.0, 1.3, 1.4)), row(step.THEIRS[1], (1.1, 1.2, 9.0))]
    assert step.goals([base, *ours, *theirs]) == {ONE: 1.05, DATA: 1.4, TENSOR: 1.2}


@pytest.mark.parametrize(
    ("ratios", "difference", "missed"),
    [
        ((1.0, 1.04, 9.0), 0.0, 0),
        ((1.0, 1.06, 1.07), 0.0, 1),
        ((1.0, 1.0, 1.0), 2e-5, 1),
        ((2.0, 2.0, 2.0), float("nan"), 2),
    ],
)
def test_the_median_of_the_rounds_is_what_counts(
    ratios: tuple[float, ...], difference: float, missed: int
) -> None:
    assert len(row(ONE, ratios, difference).missed(1.05)) == missed


def test_profiles_are_added_up_by_operator(tmp_path: Path) -> None:
    def node(operator: str, name: str, micros: int) -> dict[str, object]:
        return {"cat": "Node", "name": name, "dur": micros, "args": {"op_name": operator}}

    events = [
        node("Gemm", "a_kernel_time", 3000),
        node("Gemm", "b_kernel_time", 1000),
        node("Gemm", "a_fence_before", 500),
        node("Relu", "c_kernel_time", 10),
        {"cat": "Session", "name": "model_run", "dur": 5000},
        {"cat": "Session", "name": "session_initialization", "dur": 7000},
    ]
    (tmp_path / "p.json").write_text(json.dumps(events))
    found = step.by_operator([tmp_path / "p.json", tmp_path / "p.json"])
    assert found == {
        "Gemm": (pytest.approx(8e-3), 4),
        "Relu": (pytest.approx(20e-6), 2),
        "run": (pytest.approx(10e-3), 2),
    }


def test_a_side_that_cannot_start_says_why(tmp_path: Path) -> None:
    job = Job(model="mlp", optimizer="sgd", quick=True, files=str(tmp_path / "absent"))
    with step.start(ONE, job, tmp_path) as running, pytest.raises(step.SideError, match="absent"):
        running.connect()


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.full), "adamw"])
def test_two_ranks_take_the_steps_of_one(optimizer: str, tmp_path: Path) -> None:
    prepared, found = step.PreparedModels(tmp_path, quick=True), {}
    for side in (ONE, TENSOR):
        job = Job(model="mlp", optimizer=optimizer, quick=True)
        job = replace(job, files=str(prepared.files(side, "mlp", optimizer)))
        with step.start(side, job, tmp_path) as running:
            running.connect()
            # In two parts: the second continues after the first.
            found[side] = [x for count in (BATCHES, 5) for x in running.steps(count).losses]
    assert len(found[ONE]) == BATCHES + 5
    # Step 21 takes the batch of step 1 again, which has been learned from.
    assert found[ONE][BATCHES] < found[ONE][0]
    assert found[TENSOR] == pytest.approx(found[ONE], abs=step.DECIMALS)


@pytest.mark.full
@pytest.mark.parametrize("model", list(QUICK) if FULL else ["mlp"])
def test_pytorch_takes_the_same_steps(model: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    prepared, job = (
        step.PreparedModels(tmp_path, quick=True),
        Job(model=model, optimizer="adamw", quick=True),
    )
    base, ours = step.measure([step.BASE, ONE], job, prepared, rounds=1, turn=0.01)
    assert 0 < ours.difference < step.DECIMALS  # exactly equal floats would be one side twice
    assert base.ratios == (1.0,) and len(ours.ratios) == 1

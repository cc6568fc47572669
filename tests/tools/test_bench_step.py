"""The benchmark of training steps: its verdicts, and that its sides run and agree."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import step
from step_cases import BATCHES, QUICK, Job, Side
from step_plot import plot
from step_profile import profile_of
from step_sides import DECIMALS, PreparedModels, Row, SideError, measure, start

from onnxpar_format.trace import MAIN, OPERATOR, OPERATORS, PROGRAM, STEP, Clock, Trace, TraceSpan
from tests.tiers import FULL

ONE, DATA, TENSOR, STAGES, LEVEL1, LEVEL3 = step.sides("onnxpar", list(step.MODES), [2], "gpt")


def row(side: Side, ratios: tuple[float, ...], difference: float = 0.0) -> Row:
    seconds = tuple(2 * r for r in ratios)
    return Row("mlp-dynamo", "sgd", side, seconds, ratios, ratios, difference, least=1.0)


def test_every_mode_of_two_ranks_has_a_goal() -> None:
    ours = [row(side, (1.0,)) for side in (ONE, DATA, TENSOR, STAGES, LEVEL1, LEVEL3)]
    assert [step.goal(r) for r in ours] == [0.68, 0.90, 0.75, 1.2, 0.95, 1.1]
    assert step.goal(replace(ours[0], model="gpt", optimizer="adamw")) == 0.80
    assert step.goal(replace(ours[1], side=replace(DATA, ranks=4))) is None
    assert step.goal(row(step.BASE, (1.0,))) is None


def test_tiny_networks_have_no_goals(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(ONE, (1.0,))]
    assert len(step.tell(rows, quick=False)) == 1 and "0.680" in capsys.readouterr().out
    assert step.tell(rows, quick=True) == [] and "0.680" not in capsys.readouterr().out


def test_a_network_is_not_cut_into_more_stages_than_it_has_parts() -> None:
    modes = ["one", "pp"]
    assert [s.ranks for s in step.sides("torch", modes, [2, 4], "mlp")] == [1, 2]
    assert [s.ranks for s in step.sides("torch", modes, [2, 4], "gpt")] == [1, 2, 4]


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


def test_profiles_are_added_up_by_rank_and_operator() -> None:
    def span(rank: int, kind: str, start: float, end: float, op: str = "") -> TraceSpan:
        track = OPERATORS if kind == OPERATOR else MAIN
        return TraceSpan(rank, track, kind, "x", start, end, {"op": op} if op else {})

    spans = []
    for rank in (0, 1):
        for begin in (0.0, 1.0, 2.0):  # the first step is not counted
            spans += [
                span(rank, STEP, begin, begin + 0.5),
                span(rank, PROGRAM, begin, begin + 0.4),
                span(rank, OPERATOR, begin, begin + 0.2, "Gemm"),
                span(rank, OPERATOR, begin + 0.2, begin + 0.3, "Relu"),
                span(rank, OPERATOR, begin + 0.3, begin + 0.4, "AllReduce"),
            ]
    found = profile_of(Trace("train", 2, [Clock(0, 0, 0)] * 2, spans, [], "cpu"))
    assert found.products == pytest.approx((0.2, 0.2))
    assert found.operators == {"Gemm": pytest.approx((0.2, 1)), "Relu": pytest.approx((0.1, 1))}
    lines = list(found.lines("a side"))
    assert "rank 1: step 500.00 ms, products 40.0%, other computation 40.0%" in lines[2]
    assert lines[3].split() == ["Gemm", "200.000", "ms", "1.0", "calls", "66.7%"]


def test_bars_are_drawn_for_all_rows() -> None:
    drawing = ElementTree.fromstring(plot([row(step.BASE, (1.0,)), row(ONE, (0.5,))]))
    bars = [e for e in drawing.iter() if e.tag.endswith("rect") and "fill" in e.attrib][1:]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[1] == pytest.approx(widths[0] / 2)


def test_a_side_that_cannot_start_says_why(tmp_path: Path) -> None:
    job = Job(model="mlp", optimizer="sgd", quick=True, files=str(tmp_path / "absent"))
    with start(ONE, job, tmp_path) as running, pytest.raises(SideError, match="absent"):
        running.connect()


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.full), "adamw"])
def test_two_ranks_take_the_steps_of_one(optimizer: str, tmp_path: Path) -> None:
    prepared, found = PreparedModels(tmp_path, quick=True), {}
    for side in (ONE, TENSOR):
        job = Job(model="mlp", optimizer=optimizer, quick=True)
        job = replace(job, files=str(prepared.files(side, "mlp", optimizer)))
        with start(side, job, tmp_path) as running:
            running.connect()
            # In two parts: the second continues after the first.
            found[side] = [x for count in (BATCHES, 5) for x in running.steps(count).losses]
    assert len(found[ONE]) == BATCHES + 5
    # Step 21 takes the batch of step 1 again, which has been learned from.
    assert found[ONE][BATCHES] < found[ONE][0]
    assert found[TENSOR] == pytest.approx(found[ONE], abs=DECIMALS)


@pytest.mark.full
@pytest.mark.parametrize("model", list(QUICK) if FULL else ["mlp-dynamo"])
def test_pytorch_takes_the_same_steps(model: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    prepared, job = (
        PreparedModels(tmp_path, quick=True),
        Job(model=model, optimizer="adamw", quick=True),
    )
    base, ours = measure([step.BASE, ONE], job, prepared, rounds=1, turn=0.01)
    assert 0 < ours.difference < DECIMALS  # exactly equal floats would be one side twice
    assert base.ratios == (1.0,) and len(ours.ratios) == 1


@pytest.mark.full
@pytest.mark.parametrize("mode", ["tp", "pp", "level1", "level3"])
def test_modes_of_pytorch_take_the_same_steps(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = Job(model="gpt-dynamo", optimizer="adamw", quick=True)
    beside = [step.sides(system, [mode], [2], "gpt")[0] for system in ("torch", "onnxpar")]
    sides, prepared = [step.BASE, *beside], PreparedModels(tmp_path, quick=True)
    rows = measure(sides, job, prepared, rounds=1, turn=0.01)
    assert all(r.difference < DECIMALS for r in rows)

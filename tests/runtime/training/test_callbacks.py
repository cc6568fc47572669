"""What callbacks are told, and what TensorBoard reads back of a run."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar_format.options import Saving, Settings, TrainingRun
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.errors import OnnxparRuntimeError
from onnxpar_runtime.training.callbacks import Callback
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.results import Evaluated, Fitted
from onnxpar_runtime.training.run import train_with
from onnxpar_runtime.training.step_record import StepRecord
from tests.runtime.hand_trained import batch_of, regression


class Told(Callback):
    def __init__(self, fails_at: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails_at = fails_at

    def on_step(self, step: int, record: StepRecord) -> None:
        if step == self.fails_at:
            raise RuntimeError("no connection")
        self.calls.append(("step", step, record.epoch, record.step))

    def on_evaluation(self, step: int, result: Evaluated) -> None:
        self.calls.append(("evaluation", step, result.samples))

    def on_checkpoint(self, step: int, folder: Path) -> None:
        self.calls.append(("checkpoint", step, folder.name))

    def on_end(self, result: Fitted) -> None:
        self.calls.append(("end", result.steps))


def run(folder: Path, **options: Any) -> TrainingRun:
    """Two epochs of three steps; in a pair of ranks."""
    np.savez(folder / "a.npz", **batch_of(9, 1))
    data = f"npz:{folder / 'a.npz'}"
    return TrainingRun(data, lr=0.1, batch_size=4, epochs=2, print_every=0, **options)


def test_calls_on_rank_0(tmp_path: Path) -> None:
    told = Told()
    wanted = run(tmp_path, evaluate=True, checkpoints=Saving(tmp_path / "c", every=4))
    with TrainerGroup(regression(tmp_path / "a")) as group:
        assert len(group.members) > 1
        group.on_each(lambda member: train_with(member, wanted, [told]))
    assert told.calls == [
        *(("step", n, 1, n) for n in (1, 2, 3)),
        ("evaluation", 3, 9),
        ("step", 4, 2, 1),
        ("checkpoint", 4, "step-00000004"),
        ("step", 5, 2, 2),
        ("step", 6, 2, 3),
        ("evaluation", 6, 9),
        ("checkpoint", 6, "step-00000006"),
        ("end", 6),
    ]
    assert all((tmp_path / "c" / c[2]).is_dir() for c in told.calls if c[0] == "checkpoint")


def test_steps_that_are_not_read_are_not_told(tmp_path: Path) -> None:
    told = Told()
    with TrainerGroup(regression(tmp_path / "a")) as group:
        wanted = run(tmp_path, log_every=4)
        group.on_each(lambda member: train_with(member, wanted, [told]))
    assert told.calls == [("step", 4, 2, 1), ("step", 6, 2, 3), ("end", 6)]


def test_an_exception_ends_all_ranks(tmp_path: Path) -> None:
    told = Told(fails_at=2)
    wanted = run(tmp_path)
    with (
        TrainerGroup(regression(tmp_path / "a")) as group,
        pytest.raises(Exception, match=r"(?s)callback Told: .*in on_step.*no connection"),
    ):
        group.on_each(lambda member: train_with(member, wanted, [told]))
    assert told.calls == [("step", 1, 1, 1)]


def test_tensorboard_reads_the_log_back(tmp_path: Path) -> None:
    loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_file_loader",
        reason="needs the package tensorboard",
    )
    wanted = run(
        tmp_path, evaluate=True, log=tmp_path / "log", tensorboard=tmp_path / "board" / "run"
    )
    with TrainerGroup(regression(tmp_path / "a")) as group:
        group.on_each(lambda member: train_with(member, wanted))
    (file,) = (tmp_path / "board" / "run").iterdir()
    found: dict[int, dict[str, float]] = {}
    for event in loader.LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            found.setdefault(event.step, {})[value.tag] = value.simple_value
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(found) == [1, 2, 3, 4, 5, 6] and len(lines) == 6
    for step, line in enumerate(lines, 1):
        numbers = {
            f"train/{key}": v for key, v in line.items() if key not in ("epoch", "step", "run_step")
        }
        assert found[step].keys() - {"eval/loss"} == numbers.keys()
        assert ("eval/loss" in found[step]) == (step in (3, 6))
        for tag, number in numbers.items():
            assert found[step][tag] == np.float32(number)  # as event files store it


def test_tensorboard_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    wanted = run(tmp_path, log=tmp_path / "log", tensorboard=tmp_path / "board")
    with (
        TrainerGroup(regression(tmp_path / "a")) as group,
        pytest.raises(OnnxparRuntimeError, match=r"pip install 'onnxpar\[tensorboard\]'"),
    ):
        group.on_each(lambda member: train_with(member, wanted))
    assert not (tmp_path / "log").exists() and not (tmp_path / "board").exists()


@pytest.mark.parametrize("micro", [False, True])
def test_norms_of_groups_are_those_of_the_gathered_gradients(tmp_path: Path, micro: bool) -> None:
    directory = regression(tmp_path / "a")
    with TrainerGroup(directory) as group:
        hyper = hyperparameters("momentum", Settings(momentum=0.5)).at(1, 0.1)
        batches = [batch_of(4, 1), batch_of(4, 2)][: 1 + micro]
        norm = group.train_step(batches, hyper).grad_norm
        found = group.on_each(lambda member: member.gradient_norms(["*", "w"]))
        # Sums of some ten float64 squares in another order.
        for each in found:
            assert each == pytest.approx({"*": norm, "w": norm}, rel=1e-12)
        with pytest.raises(OnnxparRuntimeError, match=r"^grad_norm b\*: expected the name"):
            group.on_each(lambda member: member.gradient_norms(["b*"]))


def test_mistakes_name_arguments(tmp_path: Path) -> None:
    with pytest.raises(OnnxparRuntimeError, match=r"^loss_scale 3: the programs"):
        TrainerGroup(regression(tmp_path / "a"), loss_scale="3")


def test_fit_of_a_trainer_is_the_command(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **batch_of(9, 1))
    told, data = Told(), f"npz:{tmp_path / 'a.npz'}"
    options: dict[str, Any] = {"batch_size": 4, "print_every": 0, "lr": 0.1, "momentum": 0.5}
    log, folder = tmp_path / "log", tmp_path / "c"
    with TrainerGroup(regression(tmp_path / "a")) as group:
        done = group.on_each(
            lambda member: member.fit(
                data, epochs=2, callbacks=[told], log=str(log), grad_norm=["w"], **options
            )
        )
        assert [d.steps for d in done] == [6, 6] and told.calls[-1] == ("end", 6)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for line in lines:
            assert line["grad_norm/w"] == pytest.approx(line["grad_norm"], rel=1e-12)
        group.on_each(lambda member: member.save(tmp_path / "w.safetensors"))
        written = group.on_each(lambda member: member.checkpoint(folder))
        assert written == [folder / "step-00000006"] * 2
        after = group.gather("w")
    with TrainerGroup(regression(tmp_path / "a2")) as group:
        assert [p.step for p in group.on_each(lambda member: member.resume(folder))] == [6, 6]
        np.testing.assert_array_equal(group.gather("w"), after)
        for wrong, message in (
            ({**options, "batch_siz": 4}, "got 'batch_siz'; did you mean batch_size?"),
            ({"batch_size": 4}, "^lr: expected a learning rate"),
            ({**options, "lr": "x"}, "^lr: expected float, got 'x'"),
            ({**options, "batch_size": 4.5}, "^batch_size: expected int, got 4.5"),
            ({**options, "metric": "top5"}, "^metric: expected a list, got 'top5'"),
            ({**options, "eval_every": 3}, "^eval_every: expected evaluate, eval_data or valid"),
            ({**options, "batch_size": 0}, "^batch_size and accumulate: expected numbers >= 1"),
            ({**options, "loss_scale": "3"}, "^loss_scale: expected as an argument of Trainer"),
        ):
            with pytest.raises(OnnxparRuntimeError, match=message):
                group.on_each(lambda member, given=wrong: member.fit(data, **given))

"""The reports of a run: their form, and the rank that prints them."""

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from onnxpar_format.manifest import Loss, Training, TrainingTensor
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.training.live_line import LiveLine
from onnxpar_runtime.training.log import Reporter, on_terminal, what_is_trained
from onnxpar_runtime.training.results import Evaluated
from onnxpar_runtime.training.step_record import StepRecord

RECORD = StepRecord(
    epoch=2, step=10, run_step=1210, loss=2.302585092994046, lr=0.5, samples_per_s=8.0,
    grad_norm=1.5, step_s=0.25, input_s=0.125, memory_bytes=1 << 30,
)  # fmt: skip


def numbered(step: int) -> StepRecord:
    return StepRecord(1, step, step, 1.0, 0.1, 1.0, 1.0, 0.5, 0.0, 1)


def test_forms() -> None:
    assert RECORD.line == "epoch: 2 step: 10, loss is 2.302585"
    assert json.loads(RECORD.json) == {
        "epoch": 2, "step": 10, "run_step": 1210, "loss": 2.302585092994046, "lr": 0.5,
        "samples_per_s": 8.0, "grad_norm": 1.5, "step_s": 0.25, "input_s": 0.125,
        "memory_bytes": 1 << 30,
    }  # fmt: skip
    infinite = StepRecord(1, 1, 1, 1.0, 0.1, 1.0, float("inf"), 0.5, 0.0, 1)
    assert json.loads(infinite.json)["grad_norm"] is None


FULL = replace(
    RECORD, tokens_per_s=12345.6, flops_per_s=1.234e12, mfu=0.4321, eta_s=3725.0,
    communication_s=0.05, optimizer_s=0.025, checkpoint_s=0.0,
)  # fmt: skip


def test_the_live_line() -> None:
    line = LiveLine(5000)
    assert line.text(80).plain.rstrip("━") == "    0/5,000  "
    line.show(FULL)
    wide = line.text(250).plain
    assert re.sub("  ━+", "", wide) == (
        "epoch 2  1,210/5,000  ETA 1h02  loss 2.3026  lr 0.5  250 ms   12,346 tokens/s  "
        "MFU 43.2%  1.23 TFLOP/s  1 GiB     compute 20%  communication 20%, input 50%, "
        "optimizer 10%"
    )
    # 30 columns for 5,000 steps.
    assert wide.count("━") == 30
    done = [s.end - s.start for s in line.text(250).spans if s.style == "bar.complete"]
    assert done == [30 * 1210 // 5000]
    # What matters least is left out, and nothing is wider than the terminal.
    for width in range(1, 260):
        assert len(line.text(width).plain) <= width
    assert line.text(60).plain == "1,210/5,000  ETA 1h02  loss 2.3026  250 ms   MFU 43.2%"
    assert line.text(80).plain == (
        "1,210/5,000  ETA 1h02  loss 2.3026  250 ms   MFU 43.2%  1 GiB     compute 20%"
    )
    assert line.text(10).plain == "1,210/5,0…"


def test_the_live_line_has_all_that_is_asked_for_in_80_columns() -> None:
    line = LiveLine(9999)
    one = replace(FULL, mfu=None, eta_s=754.4, memory_bytes=5 << 28, loss=0.065123)
    line.show(one)
    assert line.text(80).plain == (
        "1,210/9,999  ETA 13m   loss 0.0651  250 ms   1.23 TFLOP/s  1.25 GiB  compute 20%"
    )
    for step, loss in ((9, 1e-5), (987, 0.5), (9999, 123456.0)):
        before = line.text(80).plain
        line.show(replace(one, run_step=step, loss=loss, step_s=0.3))
        # Numbers of other lengths leave the parts in their places.
        assert line.text(80).plain.index("ETA") == before.index("ETA")
        assert line.text(80).plain.index("GiB") == before.index("GiB")


def test_the_time_left() -> None:
    line = LiveLine(9999)
    for seconds, text in (
        (0.2, "0s"), (59.4, "59s"), (59.6, "1m00"), (599.0, "9m59"), (600.0, "10m"),
        (3599.0, "1h00"), (86_399.0, "1d00"), (300_000.0, "3d11"),
    ):  # fmt: skip
        line.show(replace(FULL, eta_s=seconds))
        assert f"  ETA {text} " in line.text(80).plain


def test_the_live_line_of_a_run_about_which_little_is_known() -> None:
    line = LiveLine(None, 3)
    assert line.text(80).plain == "step 3"
    line.show(RECORD)
    assert line.text(90).plain == (
        "epoch 2  step 1,210  loss 2.3026  lr 0.5  250 ms   8 samples/s     1 GiB     input 50%"
    )


def test_lines_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    """Also if not every step was logged; logs of old runs have a line for each step."""
    log = tmp_path / "a.jsonl"
    lines = [replace(RECORD, run_step=step).json + "\n" for step in (4, 8, 12, 16)]
    for steps, kept in ((0, 0), (3, 0), (11, 2), (12, 3), (99, 4)):
        log.write_text("".join(lines) + '{"run_step": 17')
        with Reporter(True, log=log, keep=steps, live=False):
            pass
        assert log.read_text() == "".join(lines[:kept])
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 1}\n')
    with Reporter(True, log=log, keep=2, live=False):
        pass
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_lines_and_file(tmp_path: Path) -> None:
    out = io.StringIO()
    with Reporter(True, log=tmp_path / "a.jsonl", out=out) as reporter:
        reporter.begin(2)
        reporter.tell("hello")
        reporter.step(numbered(1))
        # Every line is there at once: a run may be followed, or killed.
        assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1
        reporter.step(numbered(2))
    assert out.getvalue().splitlines() == ["hello", numbered(1).line, numbered(2).line]
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_evaluations_have_lines(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    with Reporter(True, log=log, out=io.StringIO()) as reporter:
        reporter.begin(2)
        reporter.step(numbered(1))
        reporter.evaluated(1, Evaluated(0.5, 10, 4, 8))
        reporter.evaluated(2, Evaluated(float("nan"), 10, None, 0))
    _, *found = map(json.loads, log.read_text().splitlines())
    at = {"run_step": numbered(1).run_step}
    assert found == [
        {"epoch": 1, **at, "evaluation_loss": 0.5, "evaluation_accuracy": 0.5},
        {"epoch": 2, **at, "evaluation_loss": None},
    ]


@pytest.mark.parametrize(("every", "printed"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_some_steps(tmp_path: Path, every: int, printed: list[int]) -> None:
    out = io.StringIO()
    with Reporter(True, log=tmp_path / "a.jsonl", every=every, out=out) as reporter:
        for step in range(1, 5):
            reporter.step(numbered(step))
    assert out.getvalue().splitlines() == [numbered(step).line for step in printed]
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 4


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    out = io.StringIO()
    with Reporter(False, log=tmp_path / "a.jsonl", out=out, live=True) as reporter:
        reporter.begin(1)
        reporter.tell("hello")
        reporter.step(RECORD)
    assert out.getvalue() == "" and list(tmp_path.iterdir()) == []


def test_the_live_line_leaves_the_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    with Reporter(True, out=out, live=True) as reporter:
        reporter.tell("[before]")
        reporter.begin(5000)
        reporter.tell("[during]")
        reporter.step(RECORD)
    text = out.getvalue()
    assert text.startswith("[before]\n")
    assert "[during]\n" in text and RECORD.line + "\n" in text
    assert "1,210/5,000  " in text and "loss 2.3026" in text
    # The cursor is shown again.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"its folder .* does not exist"):
        Reporter(True, log=tmp_path / "nowhere" / "a")
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / "full").symlink_to("/dev/full")
    with (
        pytest.raises(InputError, match="full: cannot be written: No space left on device"),
        Reporter(True, log=tmp_path / "full", every=0) as reporter,
    ):
        reporter.step(RECORD)


def test_what_is_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not on_terminal(io.StringIO())
    assert on_terminal(Terminal())
    # Under mpirun the terminal that counts is the parent's.
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for place, expected in (("/dev/pts/3", True), ("pipe:[5]", False), ("/tmp/out", False)):
        monkeypatch.setattr(os, "readlink", lambda path, place=place: place)
        assert on_terminal(Terminal()) == expected
    monkeypatch.undo()


def tensor(name: str, trained: bool = True, reason: str = "", *nodes: str) -> TrainingTensor:
    return TrainingTensor(name, 1000, trained, reason != "constant", reason, "its name", nodes)


def test_what_is_trained() -> None:
    loss = Loss("softmax_cross_entropy", "labels", None, "batch")
    tensors = (
        tensor("a", True, "", "n1", "n2"),
        tensor("b"),
        tensor("c", False, "frozen"),
        tensor("d", False),
        tensor("e", False, "constant"),
    )
    lines = what_is_trained(Training(loss, "adamw", {}, None, tensors, ("untied x",), {}, None))
    assert lines == [
        "training 2,000 of 4,000 parameters, in 2 of 4 tensors, with adamw on "
        "softmax_cross_entropy",
        "not trained: c (1,000): frozen",
        "not trained: d (1,000): the loss does not need it",
        "shared: a by n1, n2",
        "notice: untied x",
    ]


def test_long_lists_are_shortened() -> None:
    loss = Loss("mse", None, None, None)
    tensors = tuple(tensor(f"t{i}", False, "frozen") for i in range(8))
    lines = what_is_trained(Training(loss, "sgd", {}, None, tensors, (), {}, None))
    assert len(lines) == 7 and lines[-1] == "not trained: and 3 more"

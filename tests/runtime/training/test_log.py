"""The reports of a run: their form, and the rank that prints them."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from onnxpar_format.manifest import Loss, Training, TrainingTensor
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.training.log import Reporter, on_terminal, what_is_trained
from onnxpar_runtime.training.step_record import StepRecord

RECORD = StepRecord(
    epoch=2, step=10, loss=2.302585092994046, lr=0.5, samples_per_s=8.0, grad_norm=1.5,
    step_s=0.25, input_s=0.125, memory_bytes=1 << 30,
)  # fmt: skip


def numbered(step: int) -> StepRecord:
    return StepRecord(1, step, 1.0, 0.1, 1.0, 1.0, 0.5, 0.0, 1)


def test_forms() -> None:
    assert RECORD.line == "epoch: 2 step: 10, loss is 2.302585"
    assert json.loads(RECORD.json) == {
        "epoch": 2, "step": 10, "loss": 2.302585092994046, "lr": 0.5, "samples_per_s": 8.0,
        "grad_norm": 1.5, "step_s": 0.25, "input_s": 0.125, "memory_bytes": 1 << 30,
    }  # fmt: skip
    infinite = StepRecord(1, 1, 1.0, 0.1, 1.0, float("inf"), 0.5, 0.0, 1)
    assert json.loads(infinite.json)["grad_norm"] is None


def test_speed() -> None:
    assert RECORD.speed == "8 samples/s"
    assert (
        replace(RECORD, tokens_per_s=12345.6, mfu=0.4321).speed == "1.235e+04 tokens/s  MFU 43.2%"
    )


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
    with Reporter(False, log=tmp_path / "a.jsonl", out=out, bar=True) as reporter:
        reporter.begin(1)
        reporter.tell("hello")
        reporter.step(RECORD)
    assert out.getvalue() == "" and list(tmp_path.iterdir()) == []


def test_a_bar_leaves_the_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    with Reporter(True, out=out, bar=True) as reporter:
        reporter.tell("[before]")
        reporter.begin(10)
        reporter.tell("[during]")
        reporter.step(RECORD)
    text = out.getvalue()
    assert text.startswith("[before]\n")
    assert "[during]\n" in text and RECORD.line + "\n" in text
    assert "epoch 2" in text and "1/10" in text and "loss 2.303" in text
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

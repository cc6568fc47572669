"""The comparison of losses that the quickstart's verdict rests on."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "compare_logs.py"
WANT = [2.0, 1.0, 0.5]


def compare(folder: Path, got: Sequence[float], want: Sequence[float], *options: str) -> int:
    for name, losses in (("got", got), ("want", want)):
        lines = [json.dumps({"epoch": 1, "step": i + 1, "loss": x}) for i, x in enumerate(losses)]
        lines += [json.dumps({"epoch": 1, "run_step": len(lines), "evaluation_loss": len(name)})]
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    command = [sys.executable, SCRIPT, folder / "got.jsonl", folder / "want.jsonl", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode


@pytest.mark.parametrize(
    ("got", "options", "code"),
    [
        (WANT, (), 0),
        ([2.0, 1.000009, 0.5], (), 0),
        ([2.0, 1.00002, 0.5], (), 1),
        ([2.0, 1.00002, 0.5], ("--rtol", "1e-4"), 0),
        ([2.0, 1.0, 0.7], ("--rtol", "1e-4"), 1),
        ([2.0, float("nan"), 0.5], (), 1),
        ([2.0, 1.0], (), 1),
        ([], (), 1),
    ],
)
def test_code_tells_whether_the_losses_agree(
    tmp_path: Path, got: Sequence[float], options: Sequence[str], code: int
) -> None:
    assert compare(tmp_path, got, WANT, *options) == code


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "got.jsonl: cannot be read: No such file or directory"),
        ('{"epoch": 1, "step": 1, "loss": 2.0}\n{"epoch": 1}\n', "got.jsonl:2: expected a line of"),
        ("3\n", "got.jsonl:1: expected a line of"),
        ("not json\n", "got.jsonl:1: expected a line of"),
    ],
)
def test_a_file_that_is_not_a_log_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    (tmp_path / "want.jsonl").write_text(json.dumps({"epoch": 1, "step": 1, "loss": 2.0}) + "\n")
    if text is not None:
        (tmp_path / "got.jsonl").write_text(text)
    command = [sys.executable, SCRIPT, tmp_path / "got.jsonl", tmp_path / "want.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_two_empty_logs_show_nothing(tmp_path: Path) -> None:
    assert compare(tmp_path, [], []) == 1

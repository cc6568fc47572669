"""The programs that the documentation shows of `onnxpar.shard`."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.launching import mpirun

ROOT = Path(__file__).parents[1]


def shown(kind: str, page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    (program,) = re.findall(rf"^```python {kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return str(program)


def ran(program: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_function_shown_runs_on_threads_and_under_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown("shard", "docs/reference/python.md")
    program = tmp_path / "dense.py"
    program.write_text(text, encoding="utf-8")
    expected = "(32, 10) True 1\n(16, 10) True 1\n"
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out == expected
    # Two processes stand for eight here.
    (tmp_path / "two.py").write_text(text.replace("(4, 2)", "(1, 2)"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = mpirun(2, ["two.py"])
    assert done.code == 0, done.err
    assert sorted(done.out.split("\n")) == sorted(2 * expected.split("\n"))[1:]


def test_the_blocks_shown_can_be_sharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "models", "models")
    program = tmp_path / "blocks.py"
    program.write_text(shown("blocks", "docs/guide.md"), encoding="utf-8")
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out == "(16, 32)\n"


@pytest.mark.timeout(400)
@pytest.mark.full
def test_the_module_shown_trains_on_threads_and_under_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    program = tmp_path / "block.py"
    program.write_text(shown("block", "docs/guide.md"), encoding="utf-8")
    alone = ran(program)
    assert float(alone.split()[-1]) < 0.5
    done = mpirun(2, ["block.py"], limit=240)
    assert done.code == 0, done.err
    # The last digit may differ, since sums have another order.
    losses = [float(line.split()[-1]) for line in done.out.strip().split("\n")]
    assert losses == pytest.approx(2 * [float(alone.split()[-1])], abs=0.002)

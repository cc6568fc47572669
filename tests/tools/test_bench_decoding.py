"""The benchmarks of steps of one decoder, and of requests side by side: both run and print."""

import re
import sys
from pathlib import Path

import decode_step
import decoder
import pytest
from _exporter import save

from onnxpar.api.shard_model import shard_model
from tests.runtime.launching import mpirun

pytestmark = pytest.mark.full
BENCH = Path(__file__).parents[2] / "tools" / "bench"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    save(decoder.build(decoder.configuration("llama"))[1], path)
    return path


def test_steps_of_both_sides(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "4", "--new", "24", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["decode_step.py", str(model), *options])
    decode_step.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["plain loop", "Generator"]
    # Medians of parts need not add up; each is a time.
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


@pytest.mark.parametrize("slots", [4, 3])
def test_requests_in_a_pipeline(model: Path, tmp_path: Path, slots: int) -> None:
    out = shard_model(model, "pp=2", tmp_path / "out").out
    options = ["--slots", str(slots), "--prompt", "3", "--new", "5", "--rounds", "2"]
    result = mpirun(2, [str(BENCH / "requests.py"), str(out), *options])
    assert result.code == 0, result.text
    found = re.findall(rf"{slots * 5} tokens in [\d.]+ s, [\d.]+ tokens/s", result.out)
    assert len(found) == 2, result.text

"""The table of how training compares with PyTorch: rows, what is kept of them, and its verdict."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("zoo", reason="needs transformers: the extra zoo")

from tests.models.conftest import SCRIPT


def made(folder: Path, *options: str) -> tuple[int, list[str], list[dict[str, Any]]]:
    """Runs the tool for one row of `mlp`; returns its code, its rows and those that are kept."""
    kept = folder / "kept.jsonl"
    done = subprocess.run(
        [sys.executable, SCRIPT, "mlp", "--exporter", "ours", "--strategy", "tp=2", *options,
         "--results", kept, "--models", folder / "models"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    rows = [line for line in done.stdout.splitlines() if line.startswith("| mlp ")]
    return done.returncode, rows, [json.loads(line) for line in kept.read_text().splitlines()]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_row_that_holds_is_made_once(tmp_path: Path) -> None:
    failed = {"model": "mlp", "exporter": "ours", "strategy": "tp=2", "problem": "not done in 1 s"}
    (tmp_path / "kept.jsonl").write_text(json.dumps(failed) + "\n")
    code, (row,), (_, kept) = made(tmp_path)
    assert code == 0
    assert kept["problem"] == "" and row.endswith("| yes |")
    assert kept["trained"] == kept["expected"] == "43,146 / 12"
    # What the table of the zoo allows: 1e-5 of a loss, and twice that of an output.
    assert float(kept["loss"]) <= 1e-5 and float(kept["forward"]) <= 2e-5
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["mlp.20.ours.onnx"]
    # The second run changes nothing, not even the seconds.
    code, again, rows = made(tmp_path)
    assert code == 0 and again == [row] and len(rows) == 2


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_network_that_takes_too_long_is_reported(tmp_path: Path) -> None:
    code, (row,), (kept,) = made(tmp_path, "--limit", "0.01")
    assert code == 1
    assert kept["problem"] == "not done in 0 s" and "no: not done in 0 s" in row


def bench_of(table: ModuleType, ours: Any, losses: list[float], exact: list[float]) -> Any:
    """A network of which PyTorch trains a matrix and a bias, and the ranks what is given."""
    from zoo_pytorch import Trained

    class Bench:
        folder = Path()
        theirs = Trained(losses, {}, SAME)

        def exported(self, exporter: str) -> Any:
            return table.Exported(Path(), "softmax_cross_entropy", 1e-6, ())

        def shard(self, row: Any, out: Path) -> None:
            pass

        def ranks(self, out: Path, steps: int) -> Any:
            assert steps == 3
            return ours

    bench: Any = Bench()
    bench.exact = Trained(exact, {}, {})
    return bench


SAME = {"w": (6, True), "b": (3, False)}
LOSSES = [2.0, 1.5, 1.0, 0.9, 0.8]
OFF = [2.0, 1.5, 1.0001]


@pytest.mark.parametrize(
    ("losses", "trained", "exact", "reason"),
    [
        (LOSSES[:3], SAME, LOSSES, ""),
        ([2.0, 1.5, 1.000009], SAME, LOSSES, ""),
        (OFF, SAME, LOSSES, "losses differ by 1.0e-04"),
        # PyTorch's own rounding is a third of it, and later steps are none of those compared.
        (OFF, SAME, [2.0, 1.5, 1.00003, 0.9, 0.8], ""),
        (OFF, SAME, [2.0, 1.5, 1.00002, 0.5, 0.5], "losses differ"),
        ([2.0, math.nan, 1.0], SAME, LOSSES, "losses differ by nan"),
        (LOSSES[:3], {"w": (6, True)}, LOSSES, "6 elements train, but 9 in PyTorch"),
        (
            LOSSES[:3],
            {"w": (6, True), "b": (3, True)},
            LOSSES,
            "9 elements decay, but 6 in PyTorch",
        ),
        (
            LOSSES[:3],
            {"w": (6, True), "c": (3, False)},
            LOSSES,
            "trained only here or only in PyTorch: ['b', 'c']",
        ),
    ],
)
def test_its_verdict(
    table: ModuleType, losses: list[float], trained: Any, exact: list[float], reason: str
) -> None:
    from zoo_pytorch import Trained

    row = table.Compared("net", "ours", "tp=2")
    table.compare(row, bench_of(table, Trained(losses, {}, trained), LOSSES, exact))
    assert (reason in row.problem) if reason else not row.problem

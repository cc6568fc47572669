"""The benches of GPUs run, on libraries that stand in for CUDA, and go on after a failure."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import gpu
import pytest
from step_cases import Job, Side
from step_sides import PreparedModels, Row, SideError

BENCH = Path(gpu.__file__).parent


def bench(
    standin: Mapping[str, str], *command: str, **more: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **standin, "STANDIN_DEVICES": "2", **more},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.full
def test_collectives_are_measured(standin_cuda: Mapping[str, str]) -> None:
    command = str(BENCH / "gpu.py"), "--quick", "--only", "collectives"
    done = bench(standin_cuda, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ +(\d+)(?: +[\d.]+){4}$", done.stdout, re.MULTILINE)
    assert [int(size) for size in rows] == [1 << 10, 1 << 14, 1 << 18]
    failed = bench(standin_cuda, *command, STANDIN_NCCL_FAIL="AllReduce:40")
    assert failed.returncode == 1
    assert re.search(r"wrong: collectives: failed: r\d \| .*NCCL", failed.stdout), failed.stdout


def test_a_rank_is_heard_through_reports_of_mpirun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "mpirun"
    script.write_text("#!/bin/sh\nprintf 'a | report\\n\\0r1 | no memory\\n' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(gpu, "find_mpirun", lambda: str(script))
    assert gpu.collectives(2, True, [].append) == ["collectives: failed: r1 | no memory"]


@pytest.mark.full
@pytest.mark.parametrize("system", ["onnxpar", "torch"])
def test_steps_are_profiled(system: str) -> None:
    """On the CPU, where the profiler sees PyTorch's operators and nothing of onnxruntime."""
    pytest.importorskip("torch")
    command = [str(BENCH / "gpu_kernels.py"), system, "--device", "cpu", "--quick"]
    done = bench({}, *command)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^losses( 5\.5\d{5}){5}$", done.stdout, re.MULTILINE), done.stdout
    assert ("AdamW.step" in done.stdout) == (system == "torch")


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_products_are_measured(standin_cuda: Mapping[str, str], kind: str) -> None:
    done = bench(standin_cuda, str(BENCH / "gpu_gemm.py"), "cuda", kind, "64")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


def measured(sides: Sequence[Side], job: Job, *_: object) -> list[Row]:
    """As `step_sides.measure`; tensor parallel and compiled sides fail."""
    if sides[1].way in ("tp", "compile"):
        raise SideError("it wrote much\nand then: no memory\n")
    one = (1.0,)
    return [Row(job.model, "adamw", side, one, one, one, 0.0, least=1.0) for side in sides]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PreparedModels:
    monkeypatch.setattr(gpu, "measure", measured)
    monkeypatch.setattr(gpu, "gemm_rate", lambda *_: 1e12)
    return PreparedModels(tmp_path, quick=True)


def test_losses_of_sides_that_run_are_compared(prepared: PreparedModels) -> None:
    lines: list[str] = []
    wrong = gpu.parity("cuda", prepared, True, lines.append)
    assert len(wrong) == 4 and all(" tp" in line and "failed" in line for line in wrong)
    assert sum("failed: and then: no memory" in line for line in lines) == 4
    assert sum(line.endswith(" 0.0e+00") for line in lines) == 6  # one, dp2, dp4 of both models


def test_steps_of_sides_that_run_are_reported(prepared: PreparedModels) -> None:
    lines: list[str] = []
    tables = gpu.cases("cuda", 4, shares=False)
    failed, missed = gpu.steps("cuda", tables, prepared, True, 2, lines.append)
    eager = [line for line in lines if "torch one " in line]
    assert len(eager) == len(tables)  # once each, though the side beside it failed
    assert len(failed) == 4 * len(tables) and all(" tp" in line for line in failed)
    assert not missed


@pytest.mark.parametrize(("gpus", "shares"), [(1, True), (1, False), (2, False), (4, False)])
def test_nccl_is_measured_where_it_can_be(gpus: int, shares: bool) -> None:
    for _, _, sides in gpu.cases("cuda", gpus, shares):
        nccl = {side.ranks for side in sides if side.transport == "nccl"}
        assert nccl == {n for n in (2, 4) if gpus >= n or (shares and n == 2)}

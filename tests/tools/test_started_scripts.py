"""Benchmark scripts that other scripts start, run by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.onnxpar.ops.op_harness import chosen

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
DRIVERS = {
    "generate_genai.py": "generate.py",
    "generate_onnxpar.py": "generate.py",
    "generate_onnxruntime.py": "generate.py",
    "gpu_gemm.py": "gpu.py",
    "plan_ranks.py": "plan.py",
    "serve_client.py": "serve.py",
    "step_onnxpar.py": "step.py",
    "step_socket.py": "two_nodes.py",
    "step_torch.py": "step.py",
}


@pytest.mark.parametrize("script", chosen([*DRIVERS], 3))
def test_a_script_names_the_one_that_starts_it(script: str) -> None:
    driver = f"tools/bench/{DRIVERS[script]}"
    for arguments in [], ["--help"]:
        done = subprocess.run(
            [sys.executable, str(BENCH / script), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr == f"{script} is started by {driver}; run `{driver} --help` instead\n"
        assert (BENCH / DRIVERS[script]).is_file()


def test_scripts_with_an_interpreter_can_be_run() -> None:
    scripts = [p for p in BENCH.parent.rglob("*") if p.is_file() and p.read_bytes()[:2] == b"#!"]
    assert len(scripts) > 20
    assert [p for p in scripts if not os.access(p, os.X_OK)] == []

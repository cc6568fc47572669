"""A decoding step is captured as a CUDA graph if the cache is extended in place, and replayed.

The devices are of compute capability 8.0: for newer ones, onnxruntime asks cuDNN for attention.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from onnxpar_runtime.launch import find_mpirun, mpirun_environment
from tests.gpu import requests_worker
from tests.gpu.captured_worker import NEW, PROMPTS, directory, expected

CAPTURED = ["--ort", "cuda.enable_cuda_graph=1"]


def run(command: Sequence[str], standin: Mapping[str, str], log: Path) -> tuple[str, str]:
    """Returns what a program of this Python prints, on stdout and stderr."""
    started = {"STANDIN_CC": "80", "STANDIN_GUARD": "1", "STANDIN_LOG": str(log)}
    done = subprocess.run(
        command,
        env={**mpirun_environment(standin), **started, "STANDIN_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def generate(out: Path, tokens: Path, *more: str) -> list[str]:
    """Returns the command that generates on a GPU."""
    command = [sys.executable, "-m", "onnxpar.cli", "generate", str(out), "--device", "cuda"]
    asked = ["--tokens", str(tokens), "--max-new-tokens", str(NEW), "--json"]
    return [*command, *asked, *more]


def test_a_step_is_captured_once_for_each_number_of_rows(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    """Tokens are those of the model in each case; a batch like the last one replays its steps."""
    out, log = directory(tmp_path, "replicate", 1), tmp_path / "log"
    worker = [sys.executable, "-m", "tests.gpu.captured_worker", str(out), CAPTURED[1]]
    ends = [0, *map(int, run(worker, standin_cuda, log)[0].split())]
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    parts = [lines[a:b] for a, b in pairwise(ends)]
    # A prompt and a step run before a step is captured, and that step runs once more for it.
    found = [[sum(line[0] == w for line in p) for w in ("capture", "graph")] for p in parts]
    assert found[:3] == [[1, NEW - 2], [0, NEW - 1], [1, NEW - 2]]
    # Requests come in one after another: few numbers of rows run.
    assert found[3][0] == 1 and found[3][1] >= NEW - 4
    # Of the second batch, inputs and logits alone go between host and device.
    copies = [line[1] for line in parts[1] if line[0] == "memcpy" and line[1] != "same"]
    assert copies.count("DtoH") == NEW and copies.count("HtoD") == 3 * NEW


def test_collectives_of_a_step_are_replayed(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    out, log, tokens = directory(tmp_path, "tp=2", 2), tmp_path / "log", tmp_path / "tokens.json"
    tokens.write_text(json.dumps(PROMPTS))
    start = [find_mpirun(), "--oversubscribe", "-n", "2"]
    command = generate(out, tokens, "--transport", "nccl", *CAPTURED)
    printed, _ = run([*start, *command], standin_cuda, log)
    assert json.loads(printed)["sequences"] == [expected(prompt) for prompt in PROMPTS]
    lines = [line.split("\t")[0] for line in log.read_text().splitlines()]
    assert lines.count("capture") == 2 and lines.count("graph") == 2 * (NEW - 2)


def test_a_cache_that_grows_is_not_captured(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    out, log = requests_worker.directory(tmp_path), tmp_path / "log"
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[[1, 2]]")
    _, errors = run(generate(out, tokens, *CAPTURED), standin_cuda, log)
    notice = "notice: steps are not captured as CUDA graphs: each run writes its states anew\n"
    assert errors.startswith(notice)
    assert not any(line.startswith("capture") for line in log.read_text().splitlines())

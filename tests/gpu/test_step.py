"""The calls of a training step to a GPU, read from the log of the stand-in CUDA libraries."""

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxpar.cli import main
from onnxpar_runtime.launch import find_mpirun, mpirun_environment
from tests.cli import linear

STEPS, ROWS = 12, 100
BATCH_BYTES = ROWS * linear.PIXELS * 4
STATE_BYTES = linear.PIXELS * linear.CLASSES * 4
LEGACY = "(nil)"


class Log:
    """The calls of one training and of the probe before it.

    Attributes:
        lines: The calls.
        copies: Of each direction, size, stream and way how many there were.
    """

    def __init__(self, text: str) -> None:
        self.lines = [line.split("\t") for line in text.splitlines()]
        copies = [line for line in self.lines if line[0] == "memcpy"]
        self.copies = Counter((line[1], int(line[2]), line[3], line[4]) for line in copies)

    def streams(self, way: str, size: int) -> dict[str, int]:
        """On which streams what of a size was copied how often, without waiting."""
        return {
            stream: count
            for (direction, bytes_, stream, waits), count in self.copies.items()
            if (direction, bytes_, waits) == (way, size, "async")
        }


@pytest.fixture(scope="module")
def log(standin_cuda: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Log:
    folder = tmp_path_factory.mktemp("step")
    out = linear.shard(folder, 1)
    arguments = ["--data", "digits", "--batch-size", str(ROWS), "--steps", str(STEPS), "--lr", "1"]
    saving = [
        "--device",
        "cuda",
        "--log-every",
        "4",
        "--checkpoint",
        str(folder / "ck"),
        "--every",
        "5",
    ]
    log_file = folder / "log"
    done = subprocess.run(
        [sys.executable, "-m", "onnxpar.cli", "train", str(out), *arguments, *saving],
        env={**standin_cuda, "STANDIN_GUARD": "1", "STANDIN_LOG": str(log_file)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss is") == STEPS // 4
    return Log(log_file.read_text())


def test_a_batch_goes_to_the_gpu_once_and_ahead(log: Log) -> None:
    inward, computing = log.streams("HtoD", BATCH_BYTES), log.streams("same", BATCH_BYTES)
    assert list(inward.values()) == [STEPS] == list(computing.values())
    # From pinned memory on a stream of its own, and from there to where the session reads it.
    assert set(inward).isdisjoint(computing) and LEGACY not in (*inward, *computing)
    assert ("HtoD", BATCH_BYTES, LEGACY, "waits") not in log.copies


def test_nothing_else_goes_between_host_and_gpu_in_a_step(log: Log) -> None:
    sizes = {
        size
        for (direction, size, _, _), count in log.copies.items()
        if direction in ("HtoD", "DtoH") and count >= STEPS
    }
    assert sizes == {BATCH_BYTES, ROWS * 8}  # images and classes


def test_the_loss_comes_back_only_where_it_is_reported(log: Log) -> None:
    # Loss and norm of the steps 4, 8 and 12.
    assert log.copies["DtoH", 4, LEGACY, "waits"] == 2 * STEPS // 4


def test_a_checkpoint_is_copied_beside_the_next_step(log: Log) -> None:
    (computing,) = log.streams("same", BATCH_BYTES)
    outward = {s: n for s, n in log.streams("DtoH", STATE_BYTES).items() if s != computing}
    # After the steps 5, 10 and 12.
    assert list(outward.values()) == [3]
    assert LEGACY not in outward


def test_captured_steps_are_replayed_where_collectives_allow_it(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    log_file = tmp_path / "log"
    options = ["--data", "digits", "--batch-size", "100", "--steps", "6", "--lr", "1"]
    options += ["--device", "cuda", "--ort", "cuda.enable_cuda_graph=1"]

    def train(ranks: int, *more: str) -> "subprocess.CompletedProcess[str]":
        start = [find_mpirun(), "--oversubscribe", "-n", str(ranks)] if ranks > 1 else []
        command = [sys.executable, "-m", "onnxpar.cli", "train", str(linear.shard(tmp_path, ranks))]
        return subprocess.run(
            [*start, *command, *options, *more],
            env={**mpirun_environment(standin_cuda), "STANDIN_LOG": str(log_file)},
            capture_output=True,
            text=True,
            timeout=100,
        )

    done = train(1)
    assert done.returncode == 0, done.stderr
    captured = Log(log_file.read_text())
    # Training and optimizer, in every step and when they are captured: onnxruntime runs them three
    # times for that, so that the state is put back before the first step is made.
    assert sum(line[0] == "graph" for line in captured.lines) == 2 * (6 + 1)
    last = max(i for i, line in enumerate(captured.lines) if line[:2] == ["launch", "sgd_step"])
    after = Log("\n".join("\t".join(line) for line in captured.lines[last:]))
    assert after.copies["HtoD", STATE_BYTES, LEGACY, "waits"] == 1
    # What other threads call breaks no capture: each has said so.
    assert ["mode", "1"] in captured.lines
    refused = train(2, "--transport", "mpi")
    assert refused.returncode == 2
    assert "a captured step cannot copy tensors through the host" in refused.stderr


DROPS = """<ir_version: 10, opset_import: ["" : 18]>
g (float[batch, 64] x) => (float[batch, 10] logits) <float ratio = {0.5}, bool train = {1}> {
  dropped = Dropout(x, ratio, train)
  logits = MatMul(dropped, w)
}"""
SIZES = """<ir_version: 10, opset_import: ["" : 18]>
g (float[batch, seq, 64] x) => (float[batch, 10] logits) <int64[1] axis = {1}> {
  mean = ReduceMean<keepdims = 0>(x, axis)
  logits = MatMul(mean, w)
}"""


@pytest.mark.parametrize(
    ("text", "shape", "constraints", "replays"),
    [
        # The optimizer's steps alone, in every step and when they are captured.
        (DROPS, (linear.PIXELS,), [], 6 + 1),
        # Ranks may have different sizes, so that one captures where another one replays.
        (SIZES, (3, linear.PIXELS), ["--symbol", "seq:per_rank=true"], 0),
    ],
    ids=["random numbers", "sizes of each rank"],
)
def test_what_changes_between_replays_is_not_captured(
    standin_cuda: Mapping[str, str],
    tmp_path: Path,
    text: str,
    shape: tuple[int, ...],
    constraints: list[str],
    replays: int,
) -> None:
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(linear.start(), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    out, log_file = tmp_path / "ranks", tmp_path / "log"
    training = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "sgd", *constraints]
    what = [str(tmp_path / "m.onnx"), "--strategy", "dp", "--devices", "1", "-o", str(out)]
    assert main(["shard", *what, *training]) == 0
    count = 6 * 4
    data = {"x": np.ones((count, *shape), np.float32), "labels": np.arange(count) % linear.CLASSES}
    np.savez(tmp_path / "data.npz", **data)
    options = ["--data", f"npz:{tmp_path / 'data.npz'}", "--batch-size", "4", "--lr", "1"]
    options += ["--device", "cuda", "--ort", "cuda.enable_cuda_graph=1"]
    done = subprocess.run(
        [sys.executable, "-m", "onnxpar.cli", "train", str(out), *options],
        env={**standin_cuda, "STANDIN_LOG": str(log_file)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    log = Log(log_file.read_text())
    assert sum(line[:2] == ["launch", "sgd_step"] for line in log.lines) >= 1
    assert sum(line[0] == "graph" for line in log.lines) == replays

"""How much communication with NCCL overlap hides, in simulated time (`standin/README.md`)."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import mlp
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.strategy.presets import strategy_for
from onnxpar_runtime.launch import find_mpirun, mpirun_environment

SPEC = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("sgd"))
CLOCK = "2.5e11:2e10"
"""Operations and bytes a second: a step computes for about as long as it communicates."""
LATENCY = 10
"""Microseconds of a call in `standin/nccl.cc`."""


def steps(
    environment: Mapping[str, str],
    directory: Path,
    overlap: str,
    micro_batches: int = 1,
    clock: str = CLOCK,
) -> tuple[list[list[float]], list[float]]:
    """What rank 0 prints: for each step the microseconds of all, computing and communicating; and
    those of the calls in a trace, in the foreground and in the background."""
    worker = Path(__file__).parent / "clock_worker.py"
    command = [find_mpirun(), "--oversubscribe", "-n", "2", sys.executable, str(worker)]
    simulated = {"STANDIN_DEVICES": "2", "STANDIN_CLOCK": clock, "ONNXPAR_TIMEOUT": "60"}
    done = subprocess.run(
        [*command, str(directory), overlap, str(micro_batches)],
        env={**mpirun_environment(environment), **simulated},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found, traced = json.loads(done.stdout)
    return found, traced


@pytest.mark.full
@pytest.mark.parametrize(("level", "share"), [(1, 0.6), (0, 0.7), (3, 0.6)])
def test_what_is_hidden(
    standin_cuda: Mapping[str, str], tmp_path: Path, level: int, share: float
) -> None:
    """Level 0: of the backward pass, two thirds of computing. Levels 1 and 3: of both passes."""
    ir.save(mlp.build(image=8, hidden=(1024,) * 8), tmp_path / "m.onnx")
    out = tmp_path / "out"
    shard_model(tmp_path / "m.onnx", "dp=2", out, training=SPEC, optimizer_parallel=level)
    every, (exposed, background) = steps(standin_cuda, out, "no")
    (apart, computing, communicating), *others = every
    assert apart == pytest.approx(computing + communicating, rel=1e-3)
    # Time is simulated, so that all steps take the same but for the rounding of its sums.
    for step in others:
        assert step == pytest.approx([apart, computing, communicating], rel=1e-9)
    assert background == 0
    # The events of a call are exact to 1 us, and a step has fewer than 64 calls.
    assert exposed == pytest.approx(sum(step[2] for step in every), abs=64 * len(every))
    every, (exposed, background) = steps(standin_cuda, out, "yes")
    # A trace says what is exposed: the time of a step in which nothing is computed.
    assert exposed == pytest.approx(sum(s[0] - s[1] for s in every), abs=64 * len(every))
    assert 0.6 * sum(s[2] for s in every) < background <= sum(s[2] for s in every)
    for hidden, again, sent in every:
        assert again == pytest.approx(computing, rel=1e-9)
        # Buckets of the two programs differ, so there may be a call more or less.
        assert sent == pytest.approx(communicating, abs=1.01 * LATENCY)
        behind = computing * (2 / 3 if level == 0 else 1)
        assert apart - hidden >= share * min(behind, communicating)


@pytest.mark.full
def test_halves_of_the_batch_hide_the_sums_of_the_forward_pass(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    """Tensor parallel: a whole batch has nothing to compute while its activations are reduced."""
    model = mlp.build(image=8, hidden=(1024,) * 8)
    ir.save(model, tmp_path / "m.onnx")
    strategy = replace(strategy_for("tp=2", None, model, "model"), pair_micro_batches=True)
    out = tmp_path / "out"
    shard_model(tmp_path / "m.onnx", strategy, out, training=SPEC)

    def step(micro_batches: int) -> list[float]:
        (first, second), _ = steps(standin_cuda, out, "yes", micro_batches, "1.5e11:6e8")
        assert first == pytest.approx(second, rel=1e-9)
        return first

    (whole, _, sums), (halves, computing, sent) = step(1), step(2)
    # A half has as many calls and kernels as the batch, so it computes and sends for longer.
    assert sent > sums
    assert halves < 0.9 * whole
    assert computing + sent - halves >= 0.7 * sent

"""The trace of a GPT on a mesh in each of two stages: 16 ranks, as threads of this process."""

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import transformer

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar_format.calls import COLLECTIVE
from onnxpar_format.trace import ACTION, BACKGROUND, CALL, Trace, read_trace
from onnxpar_format.trace_times import PARTS, times
from onnxpar_runtime import Trainer, TrainerGroup
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.tracing.recording import Recording, write_trace
from tests.chrome_trace import complaints

STEPS, MICRO_BATCHES = 3, 2


def test_a_trace_of_sixteen_ranks_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As from another machine: receives run in threads of their own.
    monkeypatch.setattr(Rank, "prompt", lambda rank, peer: False)
    model = transformer.build(transformer.Config(layers=2, loss=True))
    ir.save(model, tmp_path / "gpt.onnx")
    training = TrainingSpec(parse_loss("output:loss"), parse_optimizer("sgd"))
    out, hyper = tmp_path / "out", {"lr": 0.1, "weight_decay": 0.0, "clip_norm": float("inf")}
    shard_model(tmp_path / "gpt.onnx", "dp=2,tp=4,pp=2", out, training=training)
    draw = np.random.default_rng(0)
    batches = [
        {name: draw.integers(0, 100, (2, 5)).astype(np.int64) for name in ("input_ids", "labels")}
        for _ in range(MICRO_BATCHES)
    ]
    file = tmp_path / "t.json"

    def record(trainer: Trainer) -> Trace | None:
        recording = Recording(trainer.rank)
        for _ in range(STEPS):
            trainer.train_step(batches, hyper)
        trace = recording.finish("train", 8)
        write_trace(trainer.rank, file, trace)
        return trace

    with TrainerGroup(out) as group:
        first, *others = group.on_each(record)
    assert first is not None and others == [None] * 15
    assert complaints(json.loads(file.read_text())) == []
    trace = read_trace(file)
    assert len(trace.spans) == len(first.spans) and len(trace.clocks) == 16
    found = times(trace)
    assert found.steps == STEPS - 1 and found.idle is not None and 0 < found.idle < 1
    for number, rank in enumerate(found.ranks):
        assert sum(getattr(rank, part) for part in PARTS) == pytest.approx(rank.step)
        assert min(getattr(rank, part) for part in PARTS) >= 0
        # A forward of each micro-batch in each step, and both halves of its backward (zb-h1).
        own = [s for s in trace.spans if s.rank == number and s.kind == ACTION]
        assert len(own) == STEPS * MICRO_BATCHES * 3
    # What is received beside another call has a track of its own.
    assert set(trace.threads) == {f"messages from rank {r}" for r in range(16)}
    behind = [s for s in trace.spans if s.track == BACKGROUND and s.kind == CALL]
    assert all(span.more["op"] == COLLECTIVE for span in behind)
    # Every member has each collective, and none of them is left out.
    members: dict[tuple[object, ...], set[int]] = {}
    for span in trace.spans:
        if span.kind == CALL and span.more["op"] == COLLECTIVE:
            key = (*span.more["ranks"], "|", span.more["lane"], span.more["place"])
            members.setdefault(key, set()).add(span.rank)
    assert members and all(set(key[: key.index("|")]) == ranks for key, ranks in members.items())

"""Communication in the background: the same bits as without, and on all ranks."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformer

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.stages import partition_training
from tests.runtime.launching import mpirun
from tests.tiers import FULL

SCRIPT = """
import sys
import numpy as np
from onnxpar_runtime import Trainer, guarded, init

rank = init()
def body():
    for way in zip(*[iter(sys.argv[1:])] * 3):
        train(*way)
    return 0
def train(directory, overlap, out):
    with Trainer(directory, rank=rank, device='cpu', overlap=overlap == 'yes') as trainer:
        rng, losses = np.random.default_rng(0), []
        hyper = dict(lr=0.1, momentum=0.9, dampening=0.0, momentum_first=1.0, clip_norm=1.0,
                     weight_decay=0.0)
        for micro_batches in (1, 2, 1):
            tokens = rng.integers(0, 256, (4, 16))
            labels = rng.integers(0, 256, (4, 16))
            batch = {'input_ids': tokens, 'labels': labels}
            # Gradients of two micro-batches are reduced after they have been added up.
            trainer.train_step([batch] * micro_batches, hyper)
            if micro_batches == 2:  # what the step left running is completed first
                losses.append(trainer.evaluate(batch)['loss'])
            hyper['momentum_first'] = 0.0
        names = sorted(trainer.training.states)
        found = {name: trainer.gather(name) for name in names}
        if rank.index == 0:
            np.savez(out, losses=losses, **found)
raise SystemExit(guarded(rank, body))
"""


BACKGROUND = {0: "StartAhead", 3: "Start", 1: "Finish"}
# At level 3 there are a StartAhead and a Start.
LEVELS = list(BACKGROUND) if FULL else [3]


@pytest.mark.parametrize("level", LEVELS)
def test_states_are_equal_with_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """Between ranks that send messages, where reductions start in the backward pass.

    With the optimizer's collectives in buckets and apart, and between ranks that share memory, too.
    """
    model, files, apart = (tmp_path / name for name in ("model.onnx", "files", "apart"))
    ir.save(transformer.build(layers=2 if FULL else 1, max_positions=16), model)
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("momentum"))
    shard_model(model, "dp=2", files, training=spec, optimizer_parallel=level)
    monkeypatch.setattr(partition_training, "group_collectives", lambda program, *_: program)
    shard_model(model, "dp=2", apart, training=spec, optimizer_parallel=level)
    graph = onnx.load(files / "rank0000.training_model.onnx", load_external_data=False).graph
    assert {"StartAhead", BACKGROUND[level]} <= {node.op_type for node in graph.node}
    script = tmp_path / "body.py"
    script.write_text(SCRIPT)
    ways = [(apart, "no", "0"), (files, "yes", "0"), (files, "no", "0"), (files, "yes", "1")]
    for memory in ("0", "1"):
        arguments = [
            str(argument)
            for number, (directory, overlap, how) in enumerate(ways)
            for argument in (directory, overlap, tmp_path / f"{number}.npz")
            if how == memory
        ]
        outcome = mpirun(2, [str(script), *arguments], {"ONNXPAR_SHARED_MEMORY": memory})
        assert outcome.code == 0, outcome.err
    found = [dict(np.load(tmp_path / f"{number}.npz")) for number in range(len(ways))]
    want, *others = found
    for way, got in zip(ways[1:], others, strict=True):
        assert got.keys() == want.keys()
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array, err_msg=f"{name} {way}")

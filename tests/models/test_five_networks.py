"""From PyTorch to training on four ranks, on with two, and back: as in a loop of PyTorch."""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar_format.options import Saving, Settings, TrainingRun
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.training.callbacks import Callback
from onnxpar_runtime.training.run import train_with

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")
zoo = pytest.importorskip("zoo", reason="needs transformers: the extra zoo")

import onnx_ir as ir  # noqa: E402
import zoo_pytorch  # noqa: E402

import onnxpar  # noqa: E402

NETWORKS = ("gpt2", "llama", "vit", "resnet50", "whisper")
SIZES = {"batch": 8, "seq": 12}
STEPS, FIRST, WARMUP, CLIP = 50, 25, 5, 1.0
RATES = {"resnet50": 3e-5}
"""Learning rates other than 1e-3. Fifty norms over few numbers amplify rounding; with a higher rate
PyTorch's own losses in 32 and 64 bits differ (`tools/zoo_table.py`)."""
SPEC = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"))
LOSSES = 1e-4
"""Relative, over 50 steps: rounding, some 1e-6 in a step, grows with training."""
LOGITS = 1e-5
"""Relative to the largest: forward passes of two programs, which add in other orders."""
STATISTICS = 1e-3
"""Relative to the largest of a layer. PyTorch's variance is n / (n - 1) of the population's; with
the wrong one, the smallest layers (8 images of 4×4 in ResNet-50) would be off by 1/127, which is
eight times as much. Fifty norms amplify the rounding of 50 steps to 1.3e-4."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # of PyTorch and transformers about themselves
]


class Losses(Callback):
    """Keeps the losses of steps and of evaluations."""

    def __init__(self) -> None:
        self.steps: dict[int, float] = {}
        self.evaluations: dict[int, float] = {}

    def on_step(self, step: int, record: Any) -> None:
        self.steps[step] = record.loss

    def on_evaluation(self, step: int, result: Any) -> None:
        self.evaluations[step] = result.loss


@pytest.fixture(scope="module", params=NETWORKS)
def case(request: pytest.FixtureRequest) -> tuple[Any, float]:
    """A network and its learning rate."""
    return zoo.example(request.param), RATES.get(request.param, 1e-3)


def run(checkpoints: Path, rate: float, resume: Path | None = None) -> TrainingRun:
    return TrainingRun(
        data="", lr=rate, steps=STEPS, schedule="cosine", warmup=WARMUP, eval_every=FIRST,
        settings=Settings(clip_norm=CLIP, weight_decay=zoo_pytorch.DECAY, eps=zoo_pytorch.EPSILON),
        checkpoints=Saving(checkpoints, every=FIRST), print_every=0, resume=resume,
    )  # fmt: skip


def train(
    directory: Path, wanted: TrainingRun, batches: Any, held_out: Any, after: Any = None
) -> Losses:
    losses = Losses()

    def body(member: Any) -> None:
        seen = [losses] if member.rank.index == 0 else []
        train_with(member, wanted, seen, data=batches, eval_data=held_out)

    with TrainerGroup(directory) as group:
        group.on_each(body)
        if after is not None:
            after(group)
    return losses


def in_pytorch(module: Any, made: Any, rate: float, batches: Any, held_out: Any) -> Losses:
    """The same with PyTorch's own optimizer and schedule."""
    used = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in used if p.ndim > 1], "weight_decay": zoo_pytorch.DECAY},
        {"params": [p for p in used if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, rate, eps=zoo_pytorch.EPSILON)

    def factor(step: int) -> float:
        if step < WARMUP:
            return step / WARMUP
        return (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    found = Losses()
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = loss_of(module.train(), made, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(used, CLIP)
        optimizer.step()
        schedule.step()
        found.steps[step] = loss.item()
        if step % FIRST == 0:
            with torch.no_grad():
                parts = [loss_of(module.eval(), made, b).item() for b in held_out]
            found.evaluations[step] = float(np.mean(parts))
    return found


def logits_of(module: Any, made: Any, batch: Mapping[str, Any]) -> Any:
    feeds = {n: torch.tensor(a) for n, a in batch.items() if n != zoo_pytorch.LABELS}
    return zoo_pytorch._named(module(**feeds), made.outputs)[0]


def loss_of(module: Any, made: Any, batch: Mapping[str, Any]) -> Any:
    labels = torch.tensor(batch[zoo_pytorch.LABELS]).flatten()
    found = logits_of(module, made, batch).flatten(0, -2)
    return torch.nn.functional.cross_entropy(found, labels)


def apart(have: Mapping[int, float], want: Mapping[int, float]) -> float:
    assert have.keys() <= want.keys() and have
    return max(abs(have[step] / want[step] - 1) for step in have)


def test_a_module_trains_on_four_ranks_then_two_as_in_pytorch(
    case: tuple[Any, float], tmp_path: Path
) -> None:
    made, rate = case
    module = copy.deepcopy(made.module).train()
    rng = np.random.default_rng(0)
    batches = [zoo_pytorch.random_batch(made, SIZES, rng) for _ in range(STEPS)]
    held_out = [zoo_pytorch.random_batch(made, SIZES, rng) for _ in range(2)]
    model = onnxpar.from_torch(
        module, kwargs=dict(made.inputs), dynamic_shapes=made.dims, outputs=made.outputs
    )
    ir.save(model, tmp_path / "net.onnx")
    for name, strategy in (("four", "dp=2,tp=2"), ("two", "tp=2")):
        shard_model(tmp_path / "net.onnx", strategy, tmp_path / name, training=SPEC)
    want = in_pytorch(module, made, rate, batches, held_out)
    four = train(tmp_path / "four", run(tmp_path / "ck", rate), batches, held_out)
    evaluated: dict[str, Any] = {}

    def look(group: Any) -> None:
        evaluated.update(group.evaluate(held_out[0], outputs=True)["outputs"])

    resumed = run(tmp_path / "more", rate, tmp_path / "ck" / f"step-{FIRST:08d}")
    two = train(tmp_path / "two", resumed, batches, held_out, look)
    assert min(two.steps) == FIRST + 1 and max(two.steps) == STEPS
    figures = {
        "loss on 4": apart(four.steps, want.steps),
        "loss on 2": apart(two.steps, want.steps),
        "validation": max(apart(x.evaluations, want.evaluations) for x in (four, two)),
    }
    back = copy.deepcopy(made.module).eval()
    trained = onnxpar.state_dict(tmp_path / "more", back)
    back.load_state_dict(trained, strict=True)
    with torch.no_grad():
        logits = logits_of(back, made, held_out[0]).numpy()
    (ours,) = (v for v in evaluated.values() if v.shape == logits.shape)
    figures["logits"] = float(np.abs(ours - logits).max() / np.abs(logits).max())
    statistics = [n for n in trained if n.endswith(("running_mean", "running_var"))]
    state = module.state_dict()
    figures["statistics"] = max(
        (
            float((trained[n] - state[n]).abs().max() / state[n].abs().max().clamp_min(1e-2))
            for n in statistics
        ),
        default=0.0,
    )
    print(json.dumps(figures))
    assert (made.module.__class__.__name__ == "ResNetForImageClassification") == bool(statistics)
    assert max(figures["loss on 4"], figures["loss on 2"], figures["validation"]) < LOSSES, figures
    assert figures["logits"] < LOGITS and figures["statistics"] < STATISTICS, figures

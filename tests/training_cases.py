"""Models sharded for training, and batches for them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.strategy import Strategy
from onnxpar_format.options import Saving, Settings, TrainingRun
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.run import train_with

Array = NDArray[Any]
CROSS_ENTROPY = "softmax_cross_entropy"
MLP_STRATEGY = Path(__file__).parents[1] / "models" / "mlp.strategy.yaml"


def shard(
    out: Path,
    model: ir.Model,
    strategy: str | Path | Strategy,
    *,
    loss: str = CROSS_ENTROPY,
    optimizer: str = "sgd",
    ignore_index: int | None = None,
    devices: int | None = None,
    freeze: tuple[str, ...] = (),
    trainable: tuple[str, ...] = (),
    compute: str | None = None,
) -> Path:
    """Writes a model beside `out` and the directory that trains it to `out`; returns `out`."""
    path = out.with_suffix(".onnx")
    ir.save(model, path)
    spec = TrainingSpec(
        parse_loss(loss, ignore_index=ignore_index),
        parse_optimizer(optimizer),
        freeze=freeze,
        trainable=trainable,
        compute=compute,
    )
    shard_model(path, strategy, out, devices=devices, training=spec)
    return out


def batch_of(directory: Path, rng: np.random.Generator, **symbols: int) -> dict[str, Array]:
    """Returns random inputs and labels: floats are normal, integers below 10."""
    feeds: dict[str, Array] = {}
    for spec in Manifest.load(directory).program("training_model").inputs:
        shape = [symbols[n] if isinstance(n, str) else n for n in spec.shape]
        if spec.dtype == "int64":
            feeds[spec.name] = rng.integers(0, 10, shape)
        else:
            feeds[spec.name] = rng.standard_normal(shape).astype(spec.dtype)
    return feeds


def hyper(optimizer: str, step: int, lr: float = 1e-3, **settings: Any) -> Mapping[str, float]:
    """Returns an optimizer's scalars at a step, from 1."""
    return hyperparameters(optimizer, Settings(**settings)).at(step, lr)


@contextmanager
def after_training(
    directory: Path, batch: Mapping[str, Array], lr: float, epochs: int = 1
) -> Iterator[TrainerGroup]:
    """Trains on a batch in steps of 4 samples, with checkpoints in `ck` beside the directory."""
    folder = directory.parent
    np.savez(folder / "a.npz", **batch)
    wanted = TrainingRun(
        f"npz:{folder / 'a.npz'}", lr=lr, batch_size=4, epochs=epochs, print_every=0,
        checkpoints=Saving(folder / "ck"),
    )  # fmt: skip
    with TrainerGroup(directory) as group:
        group.on_each(lambda member: train_with(member, wanted))
        yield group

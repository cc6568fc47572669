"""A run that is resumed goes on as if nothing had been: on the same mesh bit for bit."""

import errno
import fcntl
import json
import os
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import pytest
import transformer

from onnxpar.strategy import Strategy
from onnxpar_format.checkpoint import Progress
from onnxpar_format.options import Saving, Settings, TrainingRun
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.checkpoint import writer
from onnxpar_runtime.checkpoint.folder import complete_steps, owned, partial_name, step_name
from onnxpar_runtime.errors import CheckpointError, OnnxparRuntimeError
from onnxpar_runtime.training.checkpoints import load_checkpoint, save_checkpoint
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.run import train_with
from onnxpar_runtime.training.trainer import Trainer
from tests.runtime.hand_trained import batch_of, regression
from tests.tiers import FULL
from tests.training_cases import batch_of as random_batch
from tests.training_cases import shard


def train(directory: Path, wanted: TrainingRun) -> list[float]:
    """Trains with all ranks in this process; returns the losses."""
    log = directory.parent / "log.jsonl"
    with TrainerGroup(directory, seed=wanted.seed) as group:
        given = replace(wanted, log=log, print_every=0)
        group.on_each(lambda member: train_with(member, given))
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def linear(folder: Path, count: int = 11) -> TrainingRun:
    """A run on `count` samples: three epochs of three steps of up to two micro-batches."""
    np.savez(folder / "a.npz", **batch_of(count, 1))
    settings = Settings(momentum=0.5, clip_norm=1.0)
    return TrainingRun(
        f"npz:{folder / 'a.npz'}", lr=0.1, batch_size=4, epochs=3, seed=3, accumulate=2,
        schedule="cosine", warmup=2, settings=settings,
    )  # fmt: skip


class Stop(Exception):
    """The end of a run that comes without warning."""


def interrupted(
    directory: Path, wanted: TrainingRun, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains until so many steps are done and the last checkpoint is there, and ends as a kill."""
    step, folder, every = Trainer.train_step, *astuple(wanted.checkpoints)[:2]

    def stops(self: Trainer, *args: Any, **more: Any) -> Any:
        if self.steps == after:
            while complete_steps(folder)[-1:] != [after - after % every]:
                time.sleep(0.01)
            raise Stop
        return step(self, *args, **more)

    with monkeypatch.context() as patch, pytest.raises(OnnxparRuntimeError, match="Stop"):
        patch.setattr(Trainer, "train_step", stops)
        train(directory, wanted)


@pytest.mark.parametrize("after", [2, 3, 5, 7])
def test_inside_an_epoch_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    directory, wanted = regression(tmp_path / "a"), linear(tmp_path)
    losses = train(directory, wanted)
    assert len(losses) == 9
    saving = replace(wanted, checkpoints=Saving(tmp_path / "ck", every=1))
    interrupted(directory, saving, after, monkeypatch)
    # An older one may still be there: it is removed after the newer one has its name.
    assert complete_steps(tmp_path / "ck")[-2:] == [after - 1, after]
    assert train(directory, replace(saving, resume=tmp_path / "ck")) == losses
    assert complete_steps(tmp_path / "ck") == [8, 9]


def test_a_run_that_is_done_writes_what_it_was_asked_to(tmp_path: Path) -> None:
    directory, wanted = regression(tmp_path / "a"), linear(tmp_path)
    train(directory, replace(wanted, checkpoints=Saving(tmp_path / "ck"), save=tmp_path / "w"))
    train(directory, replace(wanted, resume=tmp_path / "ck", save=tmp_path / "again"))
    assert (tmp_path / "w").read_bytes() == (tmp_path / "again").read_bytes()


@pytest.mark.parametrize("ranks", [3, 5])
def test_on_another_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    directory = regression(tmp_path / "a")
    wanted = replace(linear(tmp_path, count=12), schedule="constant")
    losses = train(directory, wanted)
    train(directory, replace(wanted, steps=4, checkpoints=Saving(tmp_path / "ck")))
    (tmp_path / "log.jsonl").unlink()
    other = regression(tmp_path / "b", ranks=ranks)
    rest = train(other, replace(wanted, resume=tmp_path / "ck"))
    # float64 sums in another order.
    np.testing.assert_allclose(rest, losses[4:], rtol=1e-11)


GPT = {"layers": 1, "d_model": 32, "heads": 4, "vocab": 40, "max_positions": 16}
SHARED = {"level": 3, "threshold": 0}
MESHES: dict[str, str | Strategy] = {
    "dp=2,tp=2": "dp=2,tp=2",
    "dp=3, level 3": Strategy.from_dict({"mesh": {"dp": 3}, "optimizer_parallel": SHARED}),
    "tp=3": "tp=3",
    "pp=2,dp=2": Strategy.from_dict(
        {"mesh": {"dp": 2}, "pipeline": {"stages": 2, "micro_batches": 2}}
    ),
    "dp=2,tp=2, level 3": Strategy.from_dict(
        {"mesh": {"dp": 2, "tp": 2}, "optimizer_parallel": SHARED}
    ),
    "tp=2": "tp=2",
}

if not FULL:
    MESHES = {name: MESHES[name] for name in ("dp=2,tp=2", "dp=3, level 3", "pp=2,dp=2")}


def test_dropout_moments_and_uneven_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer.build(**GPT, fused_qkv=True, tied_head=True, dropout=0.2, training=True)
    directories = {
        mesh: shard(tmp_path / mesh.replace(",", "_"), model, strategy, optimizer="adamw")
        for mesh, strategy in MESHES.items()
    }
    rng = np.random.default_rng(5)
    data = random_batch(directories["dp=2,tp=2"], rng, batch=10, seq=7)
    np.savez(tmp_path / "a.npz", **data)
    wanted = TrainingRun(
        f"npz:{tmp_path / 'a.npz'}", lr=1e-2, batch_size=5, epochs=4, seed=3, accumulate=2
    )
    first = directories["dp=2,tp=2"]
    losses = train(first, wanted)
    assert len(losses) == 8
    saving = replace(wanted, checkpoints=Saving(tmp_path / "ck", every=3, keep=9))
    interrupted(first, saving, 5, monkeypatch)
    assert train(first, replace(saving, resume=tmp_path / "ck")) == losses
    # From mesh to mesh, a step or two on each.
    for number, mesh in enumerate([*MESHES][1:], 1):
        source = tmp_path / "ck" / step_name(3) if number == 1 else tmp_path / f"ck{number - 1}"
        rest = train(
            directories[mesh],
            replace(wanted, steps=3 + number, resume=source,
                    checkpoints=Saving(tmp_path / f"ck{number}")),
        )  # fmt: skip
        # AdamW divides rounding in a gradient by its size; lr 1e-2 keeps that below this.
        np.testing.assert_allclose(rest, losses[: 3 + number], rtol=1e-4)


def test_what_does_not_fit_is_reported_on_all_ranks(tmp_path: Path) -> None:
    directory, wanted = regression(tmp_path / "a"), linear(tmp_path)
    train(directory, replace(wanted, checkpoints=Saving(tmp_path / "ck"), steps=2, warmup=0))
    other = shard(tmp_path / "mlp", mlp.build(hidden=(8, 8)), "dp=2")
    np.savez(tmp_path / "b.npz", **random_batch(other, np.random.default_rng(0), batch=8))
    mine = TrainingRun(f"npz:{tmp_path / 'b.npz'}", lr=0.1, batch_size=4)
    cases: Sequence[tuple[Path, TrainingRun, str]] = [
        (other, replace(mine, resume=tmp_path / "ck"),
         "expected the optimizer sgd, got momentum; expected parameter .* got none"),
        (directory, replace(wanted, seed=4, resume=tmp_path / "ck"),
         "--seed: expected 3, as when"),
        (directory, replace(wanted, batch_size=2, resume=tmp_path / "ck"),
         "--batch-size: expected 4, as when it was written, got 2"),
        (directory, replace(wanted, resume=tmp_path / "nowhere"), "no such checkpoint or folder"),
        (directory, replace(wanted, resume=tmp_path / "a"), "has no complete checkpoint"),
        (directory, replace(wanted, checkpoints=Saving(tmp_path / "ck")),
         "has checkpoints up to step 2, but this run begins at step 0"),
        (directory, replace(wanted, resume=tmp_path / "ck", parameters=tmp_path / "w"),
         "--resume and --parameters: use only one, because a checkpoint contains the parameters"),
    ]  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    for trained, run, message in cases:
        with pytest.raises(OnnxparRuntimeError, match=message):
            train(trained, run)
    assert sorted(tmp_path.rglob("*")) == before
    file = tmp_path / "ck" / step_name(2) / "rank0001.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        OnnxparRuntimeError, match=r"rank0001.safetensors: its content has changed: expected SHA-"
    ):
        train(directory, replace(wanted, resume=tmp_path / "ck"))


def test_another_learning_rate_is_reported_and_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, wanted = regression(tmp_path / "a"), linear(tmp_path)
    train(directory, replace(wanted, checkpoints=Saving(tmp_path / "ck"), steps=4))
    capsys.readouterr()
    train(directory, replace(wanted, resume=tmp_path / "ck", lr=0.2))
    printed = capsys.readouterr().out
    assert (
        f"resumed from {tmp_path / 'ck' / step_name(4)}: 4 steps are done, epoch 2, step 1"
        in printed
    )
    assert "notice: lr is 0.2, but the checkpoint was written with 0.1" in printed
    assert "notice: total_steps is 9, but the checkpoint was written with 4" in printed


def test_a_full_disk_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, wanted = regression(tmp_path / "a"), linear(tmp_path)
    saving = replace(wanted, checkpoints=Saving(tmp_path / "ck", every=2))
    write = writer.write_file

    def full(path: Path, pieces: Any) -> Any:
        if "step-00000004" in str(path) and path.name == "rank0001.safetensors":
            raise CheckpointError(f"{path}: cannot be written: No space left on device")
        return write(path, pieces)

    monkeypatch.setattr(writer, "write_file", full)
    with pytest.raises(OnnxparRuntimeError, match=r"rank0001.*No space left on device"):
        train(directory, saving)
    # The one before is still there, and the folder can be used again.
    monkeypatch.setattr(writer, "write_file", write)
    assert complete_steps(tmp_path / "ck") == [2]
    (tmp_path / "ck" / partial_name(6)).mkdir(exist_ok=True)
    train(directory, replace(saving, resume=tmp_path / "ck"))
    assert sorted(p.name for p in (tmp_path / "ck").iterdir()) == [
        ".lock", step_name(8), step_name(9)
    ]  # fmt: skip


def test_links_with_the_names_of_incomplete_checkpoints_are_not_followed(tmp_path: Path) -> None:
    wanted = replace(linear(tmp_path), checkpoints=Saving(tmp_path / "ck", every=2))
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / partial_name(2)).symlink_to(victim)
    with pytest.raises(OnnxparRuntimeError, match=r"step-00000002.partial: expected no such file"):
        train(regression(tmp_path / "a"), wanted)
    (tmp_path / "ck" / ".lock").unlink()
    (tmp_path / "ck" / ".lock").symlink_to(victim / "made")
    with pytest.raises(CheckpointError, match="Too many levels of symbolic links"):
        owned(tmp_path / "ck").__enter__()
    assert not list(victim.iterdir())


def test_a_folder_that_cannot_be_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CheckpointError, match=r"can be locked.*, got: No locks available"):
        owned(tmp_path / "ck").__enter__()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    wanted = replace(linear(tmp_path), checkpoints=Saving(tmp_path / "ck"))
    with (
        owned(tmp_path / "ck"),
        pytest.raises(OnnxparRuntimeError, match="another run is writing checkpoints there"),
    ):
        train(regression(tmp_path / "a"), wanted)


def test_a_loop_of_ones_own_writes_and_loads_checkpoints(tmp_path: Path) -> None:
    two, three = regression(tmp_path / "two"), regression(tmp_path / "three", 3)
    optimizer = hyperparameters("momentum", Settings(momentum=0.5))
    folder = tmp_path / "ck"

    def steps(group: TrainerGroup, first: int, last: int) -> list[float]:
        return [
            group.train_step([batch_of(4, t)], optimizer.at(t, 0.1)).loss
            for t in range(first, last)
        ]

    with TrainerGroup(two, seed=5) as group:
        steps(group, 1, 4)
        given = Progress(epoch=2, epoch_step=1)
        written = group.on_each(lambda member: save_checkpoint(member, folder, given))
        assert written == [folder / step_name(3)] * 2
        losses = steps(group, 4, 6)
    with TrainerGroup(two, seed=5) as group:
        (found, _) = group.on_each(lambda member: load_checkpoint(member, folder))
        assert (found.step, found.seed, found.epoch, found.epoch_step) == (3, 5, 2, 1)
        assert steps(group, found.step + 1, 6) == losses
    with TrainerGroup(three) as group:
        (found, *_) = group.on_each(lambda member: load_checkpoint(member, folder / step_name(3)))
        # Sums of at most four terms each, in another order: a few units in the last place.
        np.testing.assert_allclose(steps(group, found.step + 1, 6), losses, rtol=1e-6)
        group.reset()
        with pytest.raises(OnnxparRuntimeError, match="has checkpoints up to step 3"):
            group.on_each(lambda member: save_checkpoint(member, folder))

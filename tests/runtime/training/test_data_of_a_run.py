"""Runs on token files and loaders: resumed inside an epoch, evaluated when and on what is asked."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformer

from onnxpar_format.checkpoint import read_checkpoint
from onnxpar_format.options import Saving, TrainingRun
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.checkpoint.folder import step_name
from onnxpar_runtime.errors import CheckpointError, LaunchError
from onnxpar_runtime.memory import peak_resident
from onnxpar_runtime.training.permutation import permutation
from onnxpar_runtime.training.run import train_with
from tests.training_cases import shard

CONFIG = transformer.Config(layers=1, d_model=16, heads=2, vocab=64, max_positions=8)
SEQ = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT for two data ranks."""
    return shard(tmp_path_factory.mktemp("gpt") / "d", transformer.build(CONFIG), "dp=2")


@pytest.fixture
def tokens(tmp_path: Path) -> Any:
    """22 windows of tokens, in `t.bin`."""
    found = np.random.default_rng(0).integers(0, 64, 22 * SEQ + 1).astype(np.uint16)
    found.tofile(tmp_path / "t.bin")
    return found


def run(folder: Path, **options: Any) -> TrainingRun:
    return TrainingRun(
        f"tokens:{folder / 't.bin'},seq={SEQ}", lr=0.1, batch_size=4, seed=3,
        log=folder / "log.jsonl", **{"print_every": 0, **options},
    )  # fmt: skip


def train(directory: Path, wanted: TrainingRun, **data: Any) -> list[dict[str, Any]]:
    """Trains with both ranks in this process; returns the log."""
    with TrainerGroup(directory, seed=wanted.seed) as group:
        group.on_each(lambda member: train_with(member, wanted, **data))
    assert wanted.log is not None
    return [json.loads(line) for line in wanted.log.read_text().splitlines()]


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in log if "loss" in line]


def test_a_token_file_equals_the_same_windows_as_arrays(
    tmp_path: Path, directory: Path, tokens: Any
) -> None:
    wanted = run(tmp_path, epochs=2)
    got = losses(train(directory, wanted))
    assert len(got) == 2 * 6
    windows = tokens[:-1].reshape(22, SEQ), tokens[1:].reshape(22, SEQ)
    np.savez(tmp_path / "a.npz", **dict(zip(("input_ids", "labels"), windows, strict=True)))
    arrays = replace(wanted, data=f"npz:{tmp_path / 'a.npz'}")
    assert losses(train(directory, arrays)) == got
    # Resumed in the middle of the second epoch, it takes the same windows.
    ck = tmp_path / "ck"
    train(directory, replace(wanted, steps=8, checkpoints=Saving(ck)))
    assert losses(train(directory, replace(wanted, resume=ck)))[-4:] == got[-4:]


def test_a_sparse_file_of_10_gb_starts_at_once(tmp_path: Path) -> None:
    config = replace(CONFIG, max_positions=1024)
    directory = shard(tmp_path / "d", transformer.build(config), "dp=2")
    with (tmp_path / "t.bin").open("wb") as stream:
        stream.truncate(10**10)
    wanted = replace(run(tmp_path, steps=2), data=f"tokens:{tmp_path / 't.bin'},seq=1024")
    before = peak_resident()
    lines = train(directory, wanted)
    # Reading 10 GB would take this much memory, and more than ten seconds.
    assert peak_resident() - before < 2 * 10**9
    assert lines[0]["input_s"] < 10
    # Every token is 0, which the model learns.
    assert lines[1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize(
    ("options", "steps", "samples"),
    [
        ({"validation": 0.2}, [5, 10], 4),
        ({"validation": 0.2, "eval_every": 4}, [4, 8, 10], 4),
        (
            {"evaluate": True, "eval_batch_size": 4, "eval_steps": 2, "eval_every": 5},
            [5, 10, 12],
            8,
        ),
        ({"evaluate": True, "eval_batch_size": 8}, [6, 12], 22),
    ],
)
def test_when_and_on_what_is_evaluated(
    tmp_path: Path,
    directory: Path,
    tokens: Any,
    options: dict[str, Any],
    steps: list[int],
    samples: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = train(directory, run(tmp_path, epochs=2, **options))
    assert [line["run_step"] for line in log if "evaluation_loss" in line] == steps
    printed = capsys.readouterr().out
    assert printed.count(f"evaluated on {samples} samples") == len(steps)
    held_out = "notice: 4 of 22 samples are held out for validation, chosen by --seed 3"
    assert (held_out in printed) == ("validation" in options)
    assert ("after 4 steps, evaluated on" in printed) == (options.get("eval_every") == 4)


def test_the_held_out_samples_stay_held_out(tmp_path: Path, directory: Path, tokens: Any) -> None:
    wanted = run(tmp_path, epochs=2, validation=0.2)
    ck = tmp_path / "ck"
    log = train(directory, wanted)
    train(directory, replace(wanted, steps=7, checkpoints=Saving(ck)))
    assert train(directory, replace(wanted, resume=ck))[-1] == pytest.approx(log[-1])
    with pytest.raises(CheckpointError, match=r"--validation: expected 0.2, .* got 0.25"):
        train(directory, replace(wanted, resume=ck, validation=0.25))


def test_a_checkpoint_from_before_there_was_validation(
    tmp_path: Path, directory: Path, tokens: Any
) -> None:
    wanted = run(tmp_path, epochs=2)
    train(directory, replace(wanted, steps=7, checkpoints=Saving(tmp_path / "ck")))
    ck = tmp_path / "ck" / step_name(7)
    contents = read_checkpoint(ck)
    old = {key: value for key, value in contents.run.items() if key != "validation"}
    (ck / "checkpoint.json").write_text(replace(contents, run=old).text())
    train(directory, replace(wanted, steps=8, resume=ck))
    with pytest.raises(CheckpointError, match=r"--validation: expected none, .* got 0.2;"):
        train(directory, replace(wanted, steps=8, resume=ck, validation=0.2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_every": 2}, "--eval-every: expected --eval, --eval-data or --validation as well"),
        ({"eval_steps": 2}, "--eval-steps: expected --eval"),
        ({"patience": 2}, "--patience: expected --eval"),
        ({"checkpoints": Saving(Path("ck"), keep_best=True)}, "--keep-best: expected --eval"),
        ({"checkpoints": Saving(keep_best=True)}, "--keep-best: expected --checkpoint FOLDER"),
        ({"validation": 0.2, "evaluate": True}, "neither --eval nor --eval-data, got"),
        ({"validation": 0.2, "eval_data": "npz:none"}, "neither --eval nor --eval-data, got"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, directory: Path, tokens: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        train(directory, run(tmp_path, **options))


def test_a_run_ends_when_evaluations_get_no_better_and_keeps_the_best(
    tmp_path: Path, directory: Path, tokens: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # On tokens without any pattern, what is learned of some makes others worse.
    wanted = replace(run(tmp_path, epochs=6, validation=0.3, eval_every=3), lr=1.0)
    every = [line for line in train(directory, wanted) if "evaluation_loss" in line]
    steps, found = ([line[key] for line in every] for key in ("run_step", "evaluation_loss"))
    # The first place at which two evaluations are not below the best one before them.
    end = next(i for i in range(2, len(found)) if min(found[i - 1 : i + 1]) >= min(found[: i - 1]))
    best = int(np.argmin(found[:end]))
    assert 0 < end < len(found) - 2, found
    capsys.readouterr()
    folder = tmp_path / "ck"
    stopping = replace(
        wanted, patience=2, checkpoints=Saving(folder, every=1000, keep=1, keep_best=True)
    )
    log = train(directory, stopping)
    printed = capsys.readouterr().out
    assert f"stopped after step {steps[end]}: the best loss is {found[best]:.7g}, " in printed
    assert f"the best checkpoint is {folder / step_name(steps[best])}" in printed
    assert [line["run_step"] for line in log if "loss" in line] == list(range(1, steps[end] + 1))
    names = [step_name(step) for step in (steps[best], steps[end])]
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == names
    # A run that was resumed in between ends in the same place, with the same best checkpoint.
    again = tmp_path / "again"
    halves = replace(stopping, checkpoints=replace(stopping.checkpoints, checkpoint=again))
    train(directory, replace(halves, steps=steps[end - 1]))
    log = train(directory, replace(halves, resume=again))
    assert log[-1]["run_step"] == steps[end]
    assert sorted(p.name for p in again.iterdir() if p.is_dir()) == names


def test_a_loader_of_pytorch(
    tmp_path: Path, directory: Path, tokens: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    ids, labels = (torch.tensor(t.astype(np.int64)) for t in (tokens[:-1], tokens[1:]))
    data = torch.utils.data.TensorDataset(ids.view(22, SEQ), labels.view(22, SEQ))

    class Shuffled(torch.utils.data.Sampler):  # type: ignore[misc, name-defined]
        """The order of onnxpar's own samples."""

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            yield from permutation(22, 3, self.epoch + 1)(np.arange(22)).tolist()

        def __len__(self) -> int:
            return 22

    def loaders() -> dict[str, Any]:
        return {
            "data": torch.utils.data.DataLoader(data, batch_size=4, sampler=Shuffled()),
            "eval_data": torch.utils.data.DataLoader(data, batch_size=8),
        }

    wanted = run(tmp_path, epochs=2, evaluate=True)
    expected = train(directory, wanted)
    capsys.readouterr()
    ck = tmp_path / "ck"
    with TrainerGroup(directory, seed=3) as group:
        given = replace(wanted, checkpoints=Saving(ck), steps=8)
        # Each rank iterates over a loader of its own.
        group.on_each(lambda member: train_with(member, given, **loaders()))
    with TrainerGroup(directory, seed=3) as group:
        group.on_each(lambda member: train_with(member, replace(wanted, resume=ck), **loaders()))
    printed = capsys.readouterr().out
    assert "notice" not in printed
    assert printed.count("evaluated on 22 samples") == 3
    assert wanted.log is not None
    got = [json.loads(line) for line in wanted.log.read_text().splitlines()]
    assert losses(got) == losses(expected)

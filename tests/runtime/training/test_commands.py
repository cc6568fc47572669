"""`train` and `eval` on several ranks; other tests of the commands are in tests/cli."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from onnxpar_format.options import Saving, Settings, TrainingRun
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.errors import InputError, OnnxparRuntimeError
from onnxpar_runtime.tensor_file import Entry
from onnxpar_runtime.training import run
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.permutation import permutation
from tests.runtime.hand_trained import Reference, batch_of, regression, start


def test_parameters_are_saved_as_whole_arrays(tmp_path: Path) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        group.on_each(lambda member: run.save(member, tmp_path / "w"))
    np.testing.assert_array_equal(load_file(tmp_path / "w")["w"], start())


def test_a_trainer_that_is_there(tmp_path: Path) -> None:
    reference, everything = Reference(), batch_of(9, 1)
    np.savez(tmp_path / "a.npz", **everything)
    settings = Settings(momentum=0.5, clip_norm=1.0)
    wanted = TrainingRun(
        f"npz:{tmp_path / 'a.npz'}", lr=0.1, batch_size=4, epochs=2, seed=3, settings=settings,
        save=tmp_path / "w", print_every=0,
    )  # fmt: skip
    with TrainerGroup(regression(tmp_path / "a")) as group:
        done = group.on_each(lambda member: run.train_with(member, wanted))[0]
        # Continue from the saved parameters, with the momentum so far.
        more = replace(wanted, steps=1, parameters=tmp_path / "w", save=None)
        again = group.on_each(lambda member: run.train_with(member, more))[0]
    hyper = hyperparameters("momentum", settings)
    for step in range(1, 7):
        epoch, begin = (step + 2) // 3, 4 * ((step - 1) % 3)
        rows = permutation(9, 3, epoch)(np.arange(9))[begin : begin + 4]
        batch = {name: array[rows] for name, array in everything.items()}
        loss, _ = reference.step(batch, hyper.at(step, 0.1))
    assert done.steps == 6
    # float64 sums in another order.
    np.testing.assert_allclose(done.loss, loss, rtol=1e-11)
    np.testing.assert_allclose(load_file(tmp_path / "w")["w"], reference.w, rtol=1e-11)
    rows = permutation(9, 3, 1)(np.arange(4))
    loss, _ = reference.gradient({name: array[rows] for name, array in everything.items()})
    np.testing.assert_allclose(again.loss, loss, rtol=1e-11)


def test_ranks_with_other_options_do_not_train(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **batch_of(9, 1))
    wanted = TrainingRun(f"npz:{tmp_path / 'a.npz'}", lr=0.1, batch_size=4, print_every=0)
    others = (
        (replace(wanted, lr=0.5), "--lr: expected the same value on all ranks"),
        (replace(wanted, settings=Settings(clip_norm=1.0)), "--settings: expected the same"),
    )
    with TrainerGroup(regression(tmp_path / "a")) as group:
        for other, message in others:
            with pytest.raises(OnnxparRuntimeError, match=message):
                group.on_each(
                    lambda member, other=other: run.train_with(
                        member, other if member.rank.index else wanted
                    )
                )
        with pytest.raises(OnnxparRuntimeError, match="--resume: expected the same value on all"):
            group.on_each(
                lambda member: run.train_with(
                    member, replace(wanted, resume=None if member.rank.index else tmp_path)
                )
            )
        # What only rank 0 does may differ.
        quiet = replace(wanted, print_every=5, log=tmp_path / "log")
        group.on_each(lambda member: run.train_with(member, wanted if member.rank.index else quiet))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": -1}, "--seed: expected a number >= 0, got -1"),
        ({"patience": -1}, "--patience: expected a number >= 1, got -1"),
        ({"checkpoints": Saving(Path("ck"), every=0)}, "--every: expected a number >= 1, got 0"),
    ],
)
def test_numbers_that_the_command_refuses(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **batch_of(9, 1))
    wanted = TrainingRun(f"npz:{tmp_path / 'a.npz'}", lr=0.1, batch_size=4, print_every=0)
    with (
        TrainerGroup(regression(tmp_path / "a")) as group,
        pytest.raises(OnnxparRuntimeError, match=message),
    ):
        group.on_each(lambda member: run.train_with(member, replace(wanted, **changed)))


def test_ranks_with_other_batches_do_not_train(tmp_path: Path) -> None:
    """As those of a loader that shuffles with a seed of its own on each rank."""
    wanted = TrainingRun("", lr=0.1, steps=3, print_every=0)
    with TrainerGroup(regression(tmp_path / "a")) as group:
        for differs in (0, 1):
            batches = [[batch_of(4, 1), batch_of(4, 2 + differs * rank)] for rank in range(2)]

            def train(member: Any, batches: Any = batches) -> None:
                run.train_with(member, wanted, data=batches[member.rank.index])

            if not differs:
                group.on_each(train)
                continue
            with pytest.raises(InputError, match=r"step 2: expected the same batch on all ranks"):
                group.on_each(train)


def test_a_trainer_that_is_there_evaluates_on_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, everything, held_out = Reference(), batch_of(8, 1), batch_of(5, 2)
    for name, arrays in (("a", everything), ("b", held_out)):
        np.savez(tmp_path / f"{name}.npz", **arrays)
    wanted = TrainingRun(
        f"npz:{tmp_path / 'a.npz'}", lr=0.1, batch_size=8, print_every=0,
        eval_data=f"npz:{tmp_path / 'b.npz'}",
    )  # fmt: skip
    with TrainerGroup(regression(tmp_path / "a")) as group:
        group.on_each(lambda member: run.train_with(member, wanted))
        narrower = replace(wanted, eval_data=f"npz:{tmp_path / 'c.npz'}")
        np.savez(tmp_path / "c.npz", **{name: array[:, :1] for name, array in held_out.items()})
        with pytest.raises(InputError, match=r"--eval-data npz:.*c\.npz: input 'x', dim 1: exp"):
            group.on_each(lambda member: run.train_with(member, narrower))
    rows = permutation(8, 0, 1)(np.arange(8))
    hyper = hyperparameters("momentum", Settings()).at(1, 0.1)
    reference.step({name: array[rows] for name, array in everything.items()}, hyper)
    loss, _ = reference.gradient(held_out)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "evaluated" in line]
    assert line == f"epoch: 1 evaluated on 5 samples: loss is {loss:.7g}"


def test_all_ranks_hear_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []

    def full(path: Any, entries: Sequence[Entry], arrays: Iterable[Any]) -> None:
        raise InputError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(run, "write_tensors", full)
    with TrainerGroup(regression(tmp_path / "a")) as group:
        for member in group.members:
            gather = member.gather
            monkeypatch.setattr(
                member, "gather", lambda name, gather=gather: gathered.append(name) or gather(name)
            )
        with pytest.raises(OnnxparRuntimeError, match="No space left on device"):
            group.on_each(lambda member: run.save(member, tmp_path / "w"))
    # The rank that could not write still received the shards of the other rank.
    assert gathered == ["w", "w"]

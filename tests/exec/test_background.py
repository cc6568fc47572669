"""Trainers whose communication runs in the background: the same bits as without, in any order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import pytest
import transformer

from onnxpar.strategy import Strategy
from onnxpar.strategy.presets import strategy_for
from onnxpar_runtime import Trainer
from onnxpar_runtime.group import Ranks
from tests.tiers import covering
from tests.training_cases import batch_of, hyper, shard

Call = Callable[[Trainer, dict[str, Any]], object]
HYPER = hyper("sgd", 1, lr=0.1)


def step(trainer: Trainer, batch: dict[str, Any]) -> object:
    """A step of two micro-batches."""
    return trainer.train_step([batch, batch], HYPER)


def update(trainer: Trainer, batch: dict[str, Any]) -> object:
    """An update with the gradients of the last step."""
    return trainer.step(HYPER)


def more(trainer: Trainer, batch: dict[str, Any]) -> object:
    """A micro-batch whose gradients are added to those of the last step."""
    return trainer.forward_backward(batch, accumulate=True)


def read(trainer: Trainer, batch: dict[str, Any]) -> object:
    """The gradients."""
    names = [n for n, s in trainer.training.states.items() if s.kind == "gradient"]
    return [trainer.gather(name) for name in sorted(names)]


@pytest.mark.parametrize(
    ("level", "calls"), covering([0, 1, 2], [(step, update, step), (step, more, read, update)])
)
def test_gradients_of_a_step_are_used_again(
    tmp_path: Path, level: int, calls: tuple[Call, ...]
) -> None:
    """A reduction that was started ahead replaces a gradient by its sum, which counts once."""
    model = transformer.build(layers=1, d_model=32, heads=4, vocab=40, max_positions=16)
    strategy: Strategy = strategy_for("dp=2", None, model, "model").at_level(level)
    directory = shard(tmp_path / "out", model, strategy)
    batch = batch_of(directory, np.random.default_rng(0), batch=4, seq=8)

    def found(overlap: bool) -> list[Any]:
        with Ranks(directory, Trainer, overlap=overlap) as ranks:

            def act(trainer: Trainer) -> list[Any]:
                results = [call(trainer, batch) for call in calls]
                return [results, trainer.parameters()]

            return ranks.on_each(act)

    got, want = found(True), found(False)
    for (results, parameters), (expected, others) in zip(got, want, strict=True):
        # The sum over ranks is rounded before a later micro-batch is added, and not after.
        assert_close(results, expected)
        for name, array in others.items():
            assert_close(parameters[name], array)


def assert_close(got: Any, want: Any) -> None:
    """Numbers of a step are below 10 and in single precision, so they have errors below 1e-5."""
    if want is None or isinstance(want, str | bool):
        assert got == want
    elif isinstance(want, list | tuple):
        for one, other in zip(got, want, strict=True):
            assert_close(one, other)
    elif hasattr(want, "grad_norm"):
        assert_close([got.loss, got.grad_norm], [want.loss, want.grad_norm])
    else:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_checkpoint_has_the_parameters_of_its_step(tmp_path: Path, level: int) -> None:
    """It copies states as soon as a step returns, when large gathers still run."""
    model = mlp.build(image=8, hidden=(2048, 2048, 2048))
    directory = shard(
        tmp_path / "out", model, strategy_for("dp=2", None, model, "model").at_level(level)
    )
    batch = batch_of(directory, np.random.default_rng(0), batch=2)
    with Ranks(directory, Trainer) as ranks:

        def act(trainer: Trainer) -> None:
            states = trainer.states
            names = states.of_kind("parameter").values()
            copies = {name: states.memory(name) for name in names}
            for _ in range(3):
                trainer.train_step([batch], HYPER)
                for name, array in copies.items():
                    states.copy_to(name, array)
                states.finish_copies()
                for name, array in copies.items():
                    np.testing.assert_array_equal(array, trainer.state(name), err_msg=name)

        ranks.on_each(act)

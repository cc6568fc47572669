"""Two micro-batches that take turns in one program change no result."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import transformer

from onnxpar.core.errors import StrategyError
from onnxpar.strategy import Strategy
from onnxpar.strategy.presets import strategy_for
from onnxpar.strategy.recompute_entry import AGAIN, parse_recompute
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime import Trainer
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.verify.compare import verify
from tests.exec.test_batch_norm_training import model as normalised
from tests.training_cases import batch_of, hyper, shard

GPT = {"layers": 2, "d_model": 16, "heads": 4, "vocab": 20, "max_positions": 8}


@dataclass(frozen=True)
class Example:
    """A model, and how it is trained.

    Attributes:
        build: Builds the model.
        strategy: A preset.
        level: The level of optimizer parallel.
        recompute: What is recomputed.
        sizes: For each step the sizes of symbols in its micro-batches.
        options: Further arguments of `shard`.
    """

    build: Callable[[], ir.Model]
    strategy: str
    sizes: tuple[tuple[dict[str, int], ...], ...]
    level: int = 0
    recompute: tuple[str, ...] = ()
    ignore_index: int | None = None

    def paired(self, pair: bool) -> Strategy:
        """The strategy, with or without pairs."""
        found = strategy_for(self.strategy, None, self.build(), "model")
        # Without the threshold, parameters as small as these are sharded, too.
        parallel = replace(found.optimizer_parallel, level=self.level, threshold=0)
        found = replace(found, optimizer_parallel=parallel)
        if self.recompute:
            found = replace(found, recompute=parse_recompute(self.recompute, AGAIN))
        return replace(found, pair_micro_batches=pair)


def rows(*batches: int, **others: int) -> tuple[dict[str, int], ...]:
    """Sizes of micro-batches that differ in the batch alone."""
    return tuple({"batch": batch, **others} for batch in batches)


EXAMPLES = {
    # A pair and one alone; two that are no pair, since their sizes differ.
    "dropout, dp and tp": Example(
        lambda: transformer.build(**GPT, dropout=0.2, training=True),
        "dp=2,tp=2",
        (rows(4, 4, 2, seq=8), rows(3, 5, seq=5)),
        ignore_index=3,
    ),
    "level 3, recomputed": Example(
        lambda: transformer.build(**GPT),
        "dp=2",
        (rows(4, 4, seq=8), rows(5, 5, seq=3)),
        level=3,
        recompute=("layers",),
    ),
    "running statistics": Example(normalised, "dp=2,tp=2", (({"n": 7}, {"n": 7}), ({"n": 4},))),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_pairs_change_no_bit(name: str, tmp_path: Path) -> None:
    """A gradient is the sum of two, in either order, and a third one is added to it."""
    example = EXAMPLES[name]

    def trained(pair: bool) -> list[Any]:
        directory = shard(
            tmp_path / f"pair_{pair}",
            example.build(),
            example.paired(pair),
            ignore_index=example.ignore_index,
            optimizer="adamw",
        )
        rng = np.random.default_rng(1)
        steps = [[batch_of(directory, rng, **s) for s in step] for step in example.sizes]
        with Ranks(directory, Trainer) as ranks:

            def run(trainer: Trainer) -> list[Any]:
                losses = [
                    trainer.train_step(batches, hyper("adamw", number)).loss
                    for number, batches in enumerate(steps, 1)
                ]
                assert (trainer._opened.runner._programs.loaded("paired_model") is None) != pair
                return [losses, trainer.parameters() | trainer.statistics()]

            return ranks.on_each(run)

    for (losses, states), (others, same) in zip(trained(True), trained(False), strict=True):
        # The program adds up both losses in float32, the runtime in float64.
        assert losses == pytest.approx(others, rel=2**-23)
        for state, array in same.items():
            np.testing.assert_array_equal(states[state], array, err_msg=state)


def test_verify_runs_pairs(tmp_path: Path) -> None:
    """Losses, gradients, parameters and sent bytes are those of the undivided program."""
    model = transformer.build(**GPT)
    strategy = replace(strategy_for("tp=2", None, model, "model"), pair_micro_batches=True)
    directory = shard(tmp_path / "out", model, strategy)
    one = shard(tmp_path / "one", transformer.build(**GPT), "dp=1")
    (case,) = verify(directory, str(one), [{"batch": 3, "seq": 5}], options=VerifyOptions(steps=2))
    assert case.ok, case.problems


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pipeline": {"stages": 2}}, "expected no 'pipeline'"),
        ({"symbols": {"seq": {"per_rank": True}}}, "the per-rank symbol 'seq'"),
    ],
)
def test_what_cannot_take_turns(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Stages work on several micro-batches already; sizes decide on each rank what is a pair."""
    with pytest.raises(StrategyError, match=message):
        strategy = Strategy.from_dict({"mesh": {"dp": 2}, "pair_micro_batches": True, **more})
        shard(tmp_path / "out", transformer.build(**GPT), strategy)

"""Two micro-batches that take turns in one program change no result."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx_ir as ir
import pytest
import transformer

from onnxpar.core.errors import StrategyError
from onnxpar.schedule import background
from onnxpar.strategy import Strategy
from onnxpar.strategy.presets import strategy_for
from onnxpar.strategy.recompute_entry import AGAIN, parse_recompute
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime import Trainer
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.verify.compare import verify
from tests.exec.test_batch_norm_training import model as normalised
from tests.tiers import FULL
from tests.training_cases import batch_of, hyper, shard

GPT = {"layers": 2 if FULL else 1, "d_model": 16, "heads": 4, "vocab": 20, "max_positions": 8}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in the background always pays: these models are small."""
    monkeypatch.setattr(background, "pays", lambda *_: True)


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


HALF = ir.DataType.FLOAT16


def collectives(directory: Path, program: str) -> set[tuple[str, ir.DataType | None]]:
    """The operators of onnxpar in a program of rank 0, and the types of their first operands."""
    graph = ir.load(directory / f"rank0000.{program}.onnx").graph
    found = (node for node in graph if node.domain == "onnxpar")
    return {(n.op_type, n.inputs[0].dtype) for n in found if n.inputs and n.inputs[0] is not None}


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


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.full) if n == "level 3, recomputed" else n
        for n in EXAMPLES
    ],
)
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


def whole_numbers() -> ir.Model:
    """A network [rows, 4] -> [rows, 4] -> [rows, 64] -> [rows, 2] with weights -1, 0 and 1.

    The last layer reads only 4 of its 64 inputs, the others have weights 0.
    """
    model = mlp.build(image=2, hidden=(4, 64), classes=2)
    rng = np.random.default_rng(2)
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        drawn = rng.integers(-1, 2, value.const_value.shape.numpy()).astype(np.float32)
        drawn[4:] = 0
        value.const_value = ir.tensor(drawn, name=value.name)
    return model


@pytest.mark.usefixtures("eager")
def test_pairs_in_float16_differ_by_rounding_alone(tmp_path: Path) -> None:
    """Where float16 holds every number exactly, results are equal bit for bit.

    On the CPU, onnxruntime computes a collective between two products in float32, but its Start and
    Wait in float16 (docs/design/0031). Here, neither rounds. Inputs have magnitudes of at most 1,
    so the three layers have at most 4, 4 * 4 and 4 * 16, and the cotangents of the last 64 times
    their factor, 2 / (2 rows * 2 columns) / 2 micro-batches, which is 1 at a loss scale of 4. Those
    of the other layers have at most 2 * 64 and 4 * 128, and the gradients, which are sums over 2
    rows, at most 2 * 1 * 512, 2 * 4 * 128 and 2 * 16 * 64 = 2^11. Float16 has all whole numbers up
    to 2^11.
    """

    def trained(pair: bool) -> list[dict[str, Any]]:
        example = Example(whole_numbers, "tp=2", ())
        directory = tmp_path / f"pair_{pair}"
        shard(directory, whole_numbers(), example.paired(pair), loss="mse", compute="float16")
        program = "paired_model" if pair else "training_model"
        assert ("Start" if pair else "AllReduce", HALF) in collectives(directory, program)
        rng = np.random.default_rng(1)
        batches = [
            {
                "x": rng.integers(-1, 2, (2, 1, 2, 2)).astype(np.float32),
                "labels": np.zeros((2, 2), np.float32),
            }
            for _ in range(2)
        ]
        with Ranks(directory, Trainer, loss_scale="4") as ranks:

            def run(trainer: Trainer) -> dict[str, Any]:
                before = trainer.parameters()
                loss = trainer.train_step(batches, hyper("sgd", 1, 2**-6)).loss
                after = trainer.parameters()
                assert all((after[name] != array).any() for name, array in before.items())
                return {"loss": loss, **after}

            return ranks.on_each(run)

    for paired, alone in zip(trained(True), trained(False), strict=True):
        for name, array in alone.items():
            np.testing.assert_array_equal(paired[name], array, err_msg=name)


@pytest.mark.parametrize("compute", [None, pytest.param("float16", marks=pytest.mark.full)])
def test_verify_runs_pairs(compute: str | None, tmp_path: Path) -> None:
    """Losses, gradients, parameters and sent bytes are those of the undivided program."""
    model = transformer.build(**GPT)
    strategy = replace(strategy_for("tp=2", None, model, "model"), pair_micro_batches=True)
    directory = shard(tmp_path / "out", model, strategy, compute=compute)
    one = shard(tmp_path / "one", transformer.build(**GPT), "dp=1", compute=compute)
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

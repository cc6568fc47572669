"""Whether two halves of the batch take turns is decided by the price of a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlp
import onnx_ir as ir
import pytest

from onnxpar.api.plan_strategy import FoundStrategy, plan_strategy
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import ShardingError, StrategyError
from onnxpar.cost.live_memory import Made, MemoryStep, live_bytes
from onnxpar.cost.timeline import Transfer, elapsed
from onnxpar.cost.turns import Events, PairedSteps, Turns
from onnxpar.partition.program_memory import program_memory, total_bytes
from onnxpar.schedule.pair_micro_batches import PAIRED
from onnxpar.strategy import Strategy
from onnxpar.strategy.schema import SearchEntry

SPEC = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("sgd"))


def test_places_of_two_micro_batches() -> None:
    """Nodes 0 1 | 2 | 3 4, with the second micro-batch behind the first in each part."""
    turns = Turns((2, 3), 5)
    assert [turns.place(place, False) for place in range(5)] == [0, 1, 4, 6, 7]
    assert [turns.place(place, True) for place in range(5)] == [2, 3, 5, 8, 9]
    assert turns.place(5, False) == turns.place(5, True) == 10
    assert [turns.behind(place, True) for place in range(6)] == [0, 3, 4, 6, 9, 10]
    assert turns.computing([1, 2, 3, 4, 5]) == [1, 2, 1, 2, 3, 3, 4, 5, 4, 5]


def test_one_computes_while_the_other_communicates() -> None:
    """Two nodes of 4 s and, between them, a sum of 3 s: 11 s for one micro-batch, 16 s for both."""
    turns = Turns((1,), 2)
    one = [Transfer(3, 1, 1, overlaps=True)]
    both = [
        Transfer(3, turns.behind(1, second), turns.place(1, second), overlaps=True)
        for second in (False, True)
    ]
    assert elapsed([4, 4], one) == 11
    # The sum of the first is hidden by the second, and that of the second by the first.
    assert elapsed(turns.computing([4, 4]), both) == 16


def test_what_micro_batches_share_takes_its_time_once() -> None:
    """A node of 2 s, its result's reshard of 3 s, and a node of 4 s that depends on the batch."""
    reshard = Transfer(3, 1, 1, overlaps=False, shared=True)
    both = Events([2, 4], [reshard], [], [], [], [], {0}).in_turns()
    assert both.elapsed() == 2 + 3 + 4 + 4


def test_memory_of_two_micro_batches() -> None:
    """x = f(w) is there once; y, the result of a sum that is sent, while the other computes."""
    paired = PairedSteps(
        [
            MemoryStep("f", ("w",), (Made("x", 10),)),
            MemoryStep("g", ("x",), (Made("p", 4),)),
            MemoryStep("p brought", ("p",), (Made("y", 4, over=("p",)),)),
            MemoryStep("h", ("x", "y"), (Made("out", 1),)),
        ],
        [0, 1, 2, 2],
        {0: False},
        {2},
    )
    steps = tuple(paired.in_turns(Turns((2,), 3), {"out"}))
    names = ["f", "g", "p brought", "g", "p brought", "wait", "h", "wait", "h", "sum"]
    assert [step.name for step in steps] == names
    # x; p and y of the first, then of both; one of each is gone when the second one waits.
    assert live_bytes(steps, {"out"}) == [10, 14, 18, 22, 26, 26, 23, 19, 16, 2]


def planned(folder: Path, overlaps: bool = True, batch: int = 512, **more: Any) -> FoundStrategy:
    """The plan of an MLP whose products are given, with tp=2.

    Args:
        folder: Where the model and the machine are written.
        overlaps: Whether the machine's link overlaps.
        batch: The rows of a step.
        more: Other keys of the strategy, the `memory` of the search, and `micro_batches`.
    """
    machine = folder / "machine.yaml"
    machine.write_text(
        "{name: slow link, flops: {float32: 1.0e+11}, bandwidth: 1.0e+11, memory: 1GiB, overhead: "
        "1.0e-5, links: [{bandwidth: 1.0e+9, latency: 1.0e-5, overlaps: "
        f"{str(overlaps).lower()}}}]}}"
    )
    ir.save(mlp.build(image=8, hidden=(512,) * 4), folder / "m.onnx")
    memory, micro_batches = more.pop("memory", None), more.pop("micro_batches", None)
    entry = {"machine": str(machine), "sizes": {"batch": batch}, "memory": memory}
    columns, rows = {"in": [[None, None], [None, "tp"]]}, {"in": [[None, "tp"], ["tp", None]]}
    nodes = {f"/fc{layer}/MatMul": columns if layer % 2 else rows for layer in range(1, 5)}
    strategy = Strategy.from_dict(
        {"mesh": {"tp": 2}, "nodes": nodes, "rest": "search", "search": entry, **more}
    )
    return plan_strategy(
        folder / "m.onnx", strategy, training=SPEC, stages=[1], micro_batches=micro_batches
    )


@pytest.mark.parametrize(
    ("overlaps", "batch", "more", "pairs"),
    [
        (True, 512, {}, True),
        # A processor moves the data: halves would only start more operators.
        (False, 512, {}, None),
        # An odd batch has no halves.
        (True, 511, {}, None),
        # Small halves take as long as the batch to read the weights and to start operators.
        (True, 2, {}, None),
        # A step may have several micro-batches already, but they must be equal.
        (True, 1024, {"micro_batches": 4}, True),
        (True, 1026, {"micro_batches": 4}, None),
        # The user decides.
        (True, 512, {"pair_micro_batches": False}, False),
        (False, 2, {"pair_micro_batches": True}, True),
    ],
)
def test_the_price_decides(
    overlaps: bool, batch: int, more: dict[str, Any], pairs: bool | None, tmp_path: Path
) -> None:
    found = planned(tmp_path, overlaps, batch, **more)
    assert found.data.get("pair_micro_batches") is pairs
    assert (found.in_turns is not None) == (pairs is True)
    if found.in_turns is not None:
        user = "pair_micro_batches" in more
        assert (found.in_turns.seconds < found.ways[0].seconds) != user
        which = "Each two micro-batches" if "micro_batches" in more else "Two halves of the batch"
        assert f"{which} take turns" in found.reason()


def test_pairs_of_a_step(tmp_path: Path) -> None:
    """Each further pair takes the same time; the last one of an odd number runs alone."""
    each = []
    for count in (2, 3, 4, 5, 6):
        found = planned(tmp_path, batch=256 * count, micro_batches=count, pair_micro_batches=True)
        assert found.in_turns is not None
        each.append(found.in_turns.seconds)
    two, three, four, five, six = each
    assert six - four == pytest.approx(four - two)
    assert five - three == pytest.approx(four - two)
    assert two < three < four
    # One that runs alone has nothing to compute while its sums are on their way.
    assert three - two > four - three


def test_pairs_must_fit(tmp_path: Path) -> None:
    """A pair has the values of two micro-batches at a time."""
    sizes = {"batch": 1024, "micro_batches": 4}
    free = planned(tmp_path, **sizes)
    assert free.in_turns is not None
    whole, pair = free.ways[0].peak, free.in_turns.peak
    assert whole < pair
    assert planned(tmp_path, memory=pair, **sizes).in_turns == free.in_turns
    found = planned(tmp_path, memory=pair - 1, **sizes)
    assert found.in_turns is None and "pair_micro_batches" not in found.data
    # If there must be pairs, other plans are tried, too.
    within = planned(tmp_path, memory=pair - 1, pair_micro_batches=True, **sizes)
    assert within.in_turns is not None
    assert within.in_turns.peak < pair
    with pytest.raises(ShardingError, match=r"no plan fits into .* whose micro-batches take turns"):
        planned(tmp_path, memory=pair * 9 // 10, pair_micro_batches=True, **sizes)


def test_pairs_need_a_batch_of_two(tmp_path: Path) -> None:
    for batch in (1, 511):
        with pytest.raises(StrategyError, match=f"2 micro-batches of one size, got batch: {batch}"):
            planned(tmp_path, batch=batch, pair_micro_batches=True)


def test_pairs_are_not_told_to_have_stages(tmp_path: Path) -> None:
    ir.save(mlp.build(image=8), tmp_path / "m.onnx")
    strategy = Strategy.from_dict(
        {"pair_micro_batches": True, "rest": "search", "search": {"memory": 100}}, devices=2
    )
    with pytest.raises(ShardingError, match="no plan fits") as error:
        plan_strategy(tmp_path / "m.onnx", strategy, training=SPEC)
    assert "stages" not in str(error.value)


def test_the_memory_of_a_pair_is_that_of_its_program(tmp_path: Path) -> None:
    """Predicted from the plan, and from the partitioned program."""
    found = planned(tmp_path, batch=1024, micro_batches=4)
    assert found.in_turns is not None
    entry = SearchEntry(machine=str(tmp_path / "machine.yaml"), sizes={"batch": 256})
    strategy = replace(Strategy.from_dict(found.data), search=entry)
    summary = shard_model(tmp_path / "m.onnx", strategy, tmp_path / "out", training=SPEC)
    assert summary.training is not None
    made = {program.program: program for program in summary.training.programs}
    run = [program_memory(made[n], entry.sizes) for n in (PAIRED, "optimizer_model")]
    # Four micro-batches are two pairs, whose gradients are added up.
    assert found.in_turns.peak == pytest.approx(total_bytes(run, several=True), rel=0.1)


def test_a_parameter_is_resharded_once_for_a_pair(tmp_path: Path) -> None:
    """Where nothing overlaps, a pair takes as long as two, except for what both share."""

    def shared(parameters: dict[str, Any], **more: Any) -> float:
        sizes = {"micro_batches": 2, "pair_micro_batches": True}
        found = planned(tmp_path, False, parameters=parameters, **sizes, **more)
        assert found.in_turns is not None
        return found.ways[0].seconds - found.in_turns.seconds

    assert shared({}) == pytest.approx(0, abs=1e-9)
    assert shared({}, recompute=["/relu*"]) == pytest.approx(0, abs=1e-9)
    # The rows of the second layer's matrix [512, 512] are sharded where it is read: an all-to-all
    # of 512 KiB, half of them to the other device at 1 GB/s, after 10 us.
    assert shared({"fc2.weight": [None, "tp"]}) == pytest.approx(1e-5 + 2**18 / 1e9, rel=0.2)


def test_stages_exclude_turns(tmp_path: Path) -> None:
    """`shard` refuses a file that has both, so `plan` does not write it."""
    ir.save(mlp.build(image=8), tmp_path / "m.onnx")
    strategy = Strategy.from_dict({"pair_micro_batches": True, "rest": "search"}, devices=2)
    with pytest.raises(StrategyError, match="pair_micro_batches: true and 2 stages"):
        plan_strategy(tmp_path / "m.onnx", strategy, training=SPEC, stages=[1, 2])

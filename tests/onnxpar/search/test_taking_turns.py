"""Whether two halves of the batch take turns is decided by the price of a step."""

from pathlib import Path
from typing import Any

import mlp
import onnx_ir as ir
import pytest

from onnxpar.api.plan_strategy import plan_strategy
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import StrategyError
from onnxpar.cost.timeline import Transfer, Turns, elapsed
from onnxpar.strategy import Strategy

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
        # The user decides.
        (True, 512, {"pair_micro_batches": False}, False),
        (False, 2, {"pair_micro_batches": True}, True),
    ],
)
def test_the_price_decides(
    overlaps: bool, batch: int, more: dict[str, Any], pairs: bool | None, tmp_path: Path
) -> None:
    machine = tmp_path / "machine.yaml"
    machine.write_text(
        "{name: slow link, flops: {float32: 1.0e+11}, bandwidth: 1.0e+11, memory: 1GiB, overhead: "
        "1.0e-5, links: [{bandwidth: 1.0e+9, latency: 1.0e-5, overlaps: "
        f"{str(overlaps).lower()}}}]}}"
    )
    ir.save(mlp.build(image=8, hidden=(512,) * 4), tmp_path / "m.onnx")
    entry = {"machine": str(machine), "sizes": {"batch": batch}}
    columns, rows = {"in": [[None, None], [None, "tp"]]}, {"in": [[None, "tp"], ["tp", None]]}
    nodes = {f"/fc{layer}/MatMul": columns if layer % 2 else rows for layer in range(1, 5)}
    strategy = Strategy.from_dict(
        {"mesh": {"tp": 2}, "nodes": nodes, "rest": "search", "search": entry, **more}
    )
    found = plan_strategy(tmp_path / "m.onnx", strategy, training=SPEC, stages=[1])
    assert found.data.get("pair_micro_batches") is pairs
    assert (found.in_turns is not None) == (pairs is True)
    if found.in_turns is not None:
        assert (found.in_turns < found.ways[0].seconds) == (more == {})
        assert "Two halves of the batch take turns" in found.reason()


def test_stages_exclude_turns(tmp_path: Path) -> None:
    """`shard` refuses a file that has both, so `plan` does not write it."""
    ir.save(mlp.build(image=8), tmp_path / "m.onnx")
    strategy = Strategy.from_dict({"pair_micro_batches": True, "rest": "search"}, devices=2)
    with pytest.raises(StrategyError, match="pair_micro_batches: true and 2 stages"):
        plan_strategy(tmp_path / "m.onnx", strategy, training=SPEC, stages=[1, 2])

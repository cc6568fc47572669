"""Pipelines beside one device: schedules, meshes, optimizer levels, recomputation; 3 AdamW steps.

`ONNXPAR_FULL` runs all cells.
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformer

from onnxpar.strategy import Strategy
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.compare import verify
from tests.tiers import FULL
from tests.training_cases import shard

HEADS = ("untied", "tied")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "pp=2": (2, {}),
    "pp=4": (4, {}),
    "pp=2,tp=2": (2, {"tp": 2}),
    "pp=2,dp=2": (2, {"dp": 2}),
    "pp=2,dp=2,tp=2": (2, {"dp": 2, "tp": 2}),
}
LEVELS = (0, 1, 2, 3)
RECOMPUTED: dict[str, list[str]] = {"kept": [], "recomputed": ["/layer*"]}
Cell = tuple[str, str, str, int, str]
CELLS: list[Cell] = [*product(HEADS, SCHEDULES, MESHES, LEVELS, RECOMPUTED)]
# Neither two data ranks nor two pieces of the vocabulary divide these.
SYMBOLS = {"batch": 5, "seq": 7}
VOCAB = 41


# What is hardest, with recomputation and without. 1F1B and all three axes together are verified by
# `test_transfers.py` and `test_twins.py`.
HARDEST: list[Cell] = [
    ("tied", "interleaved", "pp=2,dp=2", 3, "recomputed"),
    ("tied", "zb-h1", "pp=2,tp=2", 3, "kept"),
]


def strategy_of(schedule: str, mesh: str, level: int, recompute: str) -> Strategy:
    stages, axes = MESHES[mesh]
    pipeline: dict[str, Any] = {"stages": stages, "schedule": schedule}
    if schedule == "interleaved":
        pipeline["chunks"] = 2
    where: dict[str, Any] = {"mesh": axes} if axes else {"devices": stages}
    where["optimizer_parallel"] = {"level": level, "threshold": 0}
    if RECOMPUTED[recompute]:
        where["recompute"] = RECOMPUTED[recompute]
    return Strategy.from_dict({**where, "pipeline": pipeline})


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The undivided training of a model, sharded once."""
    folder = tmp_path_factory.mktemp("one")
    return cache(
        lambda head: shard(folder / head, model_of(head), "dp", devices=1, optimizer="adamw")
    )


def model_of(head: str) -> Any:
    return transformer.build(
        layers=4 if FULL else 2,
        d_model=16,
        heads=4,
        vocab=VOCAB,
        max_positions=16,
        tied_head=head == "tied",
    )


@pytest.mark.parametrize("cell", CELLS if FULL else HARDEST, ids=lambda c: "; ".join(map(str, c)))
def test_equals_one_device(tmp_path: Path, one_device: Callable[[str], Path], cell: Cell) -> None:
    """Evaluation, losses, gradients and parameters; the second step has a micro-batch more."""
    head, schedule, mesh, level, recompute = cell
    strategy = strategy_of(schedule, mesh, level, recompute)
    out = shard(tmp_path / "a", model_of(head), strategy, optimizer="adamw")
    (case,) = verify(out, one_device(head), [SYMBOLS], options=VerifyOptions(steps=3))
    assert case.problems == ()
    assert case.ok and case.bytes_counted == case.bytes_expected
    pipeline = Manifest.load(out).pipeline
    assert pipeline is not None and pipeline.schedule == schedule

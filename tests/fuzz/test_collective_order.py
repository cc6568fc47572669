"""One order of collectives on all ranks, and the same bits, whatever runs in the background.

Random programs under random strategies, with and without `run_in_background`; and directories that
train by random strategies, some with two micro-batches that take turns. As in
`test_training_programs.py` a case is one seed, `ONNXPAR_FUZZ_SEED` shifts the seeds and
`ONNXPAR_FULL` runs many more; `case(seed)` repeats a failure.
"""

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformer

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.machine import NETWORKED
from onnxpar.cost.cost_model import CostModel
from onnxpar.emit.rank_graph import fill, template
from onnxpar.emit.weight_layout import layout
from onnxpar.graph.builder import DOMAIN
from onnxpar.schedule import background
from onnxpar.strategy.presets import strategy_for
from onnxpar_runtime.manifest import Manifest
from tests.fuzz.test_training_programs import by_seed, training_program, weights
from tests.lockstep import run_model
from tests.random_programs import feeds, taken
from tests.tiers import FULL

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
CASES, BATCHES = (400, 4) if FULL else (4, 1)
DIRECTORIES = 40 if FULL else 1
COMMUNICATES = (
    "AllReduce",
    "AllGather",
    "ReduceScatter",
    "AllToAll",
    "Permute",
    "Bucket",
    "Start",
    "StartAhead",
    "FinishLater",
)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in the background always pays: random programs are small."""
    monkeypatch.setattr(background, "pays", lambda *_: True)


def calls(graph: onnx.GraphProto) -> list[tuple[object, ...]]:
    """What a rank calls, in order; fails if onnxruntime could choose another order.

    It runs nodes in any order in which operands come first, so each call must need the one before,
    directly or by way of other nodes.
    """
    newest: dict[str, int] = {}
    found: list[tuple[object, ...]] = []
    for node in graph.node:
        before = max((newest.get(name, -1) for name in node.input), default=-1)
        if node.domain == DOMAIN and node.op_type in COMMUNICATES:
            assert before == len(found) - 1, f"{node.name} does not need the call before it"
            before = len(found)
            # Groups and axes differ from rank to rank only in which of the peers they name.
            found.append((node.name, node.op_type, len(node.input)))
        newest |= dict.fromkeys(node.output, before)
    return found


def case(seed: int) -> bool:
    """Runs a case; whether something runs in the background."""
    found = training_program(seed)
    if found is None:
        return False
    sizes, proto, analysed, done = found
    plain, parted = by_seed(analysed, done, seed), by_seed(analysed, done, seed)
    if plain is None or parted is None:
        return False
    symbols = sizes.draw()
    cost = CostModel(NETWORKED, parted.plan.mesh, parted.builder.table, symbols)
    background.run_in_background(parted, cost)
    started = sum(node.op_type == "Start" for node in parted.builder.nodes)
    waits = sum(node.op_type == "Wait" for node in parted.builder.nodes)
    assert started == waits
    if not started:
        return False
    mesh = parted.plan.mesh
    held = {parameter.name: (parted.stage,) for parameter in parted.parameters}
    written = template(parted, layout(parted.parameters, mesh, held))
    first, *others = (calls(fill(written, rank).graph) for rank in range(mesh.size))
    assert all(other == first for other in others)
    data = feeds(proto, symbols, seed) | weights(analysed, symbols, seed)
    want = run_model(plain, data, symbols, reference=True)
    got = run_model(parted, data, symbols, reference=True)
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=f"{name!r} at {symbols}")
    return True


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("batch", range(BATCHES))
def test_programs(batch: int) -> None:
    count = CASES // BATCHES
    found = taken(case, range(SEED + batch * count, SEED + (batch + 1) * count))
    assert found, "in some random programs something runs in the background"


def drawn(seed: int, folder: Path) -> Path:
    """A directory that trains a random small transformer by a random strategy."""
    draw = random.Random(f"order {seed}")
    path = folder / "model.onnx"
    fused, tied = draw.random() < 0.5, draw.random() < 0.5
    model = transformer.build(
        layers=draw.choice([2, 4]), max_positions=16, fused_qkv=fused, tied_head=tied
    )
    ir.save(model, path)
    preset = draw.choice(["dp=2", "dp=4", "tp=2", "dp=2,tp=2", "pp=2,dp=2", "pp=2,dp=2,tp=2"])
    optimizer = draw.choice(["sgd", "momentum", "adamw"])
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer(optimizer))
    level = draw.randrange(2 if "pp" in preset else 4)
    pair = "pp" not in preset and draw.random() < 0.5
    strategy = replace(strategy_for(preset, None, model, "model"), pair_micro_batches=pair)
    shard_model(path, strategy, folder / "out", training=spec, optimizer_parallel=level)
    return folder / "out"


@pytest.mark.parametrize("seed", range(SEED, SEED + DIRECTORIES))
def test_directories(tmp_path: Path, seed: int) -> None:
    manifest = Manifest.load(drawn(seed, tmp_path))
    most = 0
    for entry in manifest.programs.values():
        # In a pipeline the ranks of one stage have a program, or its parts stand in its place.
        paths = [manifest.directory / name for name in entry.files if name]
        ranks = [onnx.load(path, load_external_data=False).graph for path in paths]
        if not ranks:
            continue
        first, *others = map(calls, ranks)
        assert all(other == first for other in others)
        listed = [name for name, op_type, _ in first if op_type != "StartAhead"]
        # The tensors of a bucket have entries of their own, with one node.
        assert list(dict.fromkeys(c.node for c in entry.collectives)) == listed
        most = max(most, len(first))
    assert most > 1

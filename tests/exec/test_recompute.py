"""Recomputation changes no bit of training, and lowers the peak of what a rank holds."""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformer
from numpy.typing import NDArray

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import StrategyError
from onnxpar.core.symbols import NO_CONSTRAINTS
from onnxpar.facts.layers import find_layers
from onnxpar.frontend.load import normalise
from onnxpar.graph.metadata_keys import RECOMPUTED_FROM
from onnxpar.graph.shapes import shapes
from onnxpar.partition.program_memory import program_memory, total_bytes
from onnxpar.strategy import Strategy
from onnxpar.strategy.recompute_entry import parse_recompute
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.training.trainer import Trainer
from tests.tiers import FULL
from tests.training_cases import batch_of, hyper, shard

Array = NDArray[Any]
GPT = {
    "layers": 3 if FULL else 2,
    "d_model": 16,
    "heads": 2,
    "vocab": 20,
    "max_positions": 8,
    "dropout": 0.2,
}


def gpt(**fields: Any) -> Any:
    return transformer.build(**{**GPT, "training": True, **fields})


def strategy(mesh: Mapping[str, int], wanted: Any = None) -> Strategy:
    data: dict[str, Any] = {"mesh": dict(mesh), "parameter_axes": [a for a in mesh if a == "tp"]}
    return Strategy.from_dict(data if wanted is None else {**data, "recompute": wanted})


def trained(directory: Path, **symbols: int) -> tuple[list[float], dict[str, Array]]:
    """Losses of three steps, of two micro-batches each, and all states afterwards."""
    rng = np.random.default_rng(4)
    batches = [batch_of(directory, rng, **symbols) for _ in range(2)]
    with TrainerGroup(directory, seed=7) as group:
        losses = [group.train_step(batches, hyper("adamw", t, 1e-2)).loss for t in (1, 2, 3)]
        return losses, {name: group.gather(name) for name in group.manifest.trained().states}


def nodes_of(directory: Path, rank: int = 0) -> list[onnx.NodeProto]:
    name = json.loads((directory / "manifest.json").read_text())
    file = name["programs"]["training_model"]["files"][rank]
    return list(onnx.load(directory / file, load_external_data=False).graph.node)


def again(node: onnx.NodeProto) -> bool:
    return any(entry.key == RECOMPUTED_FROM for entry in node.metadata_props)


MESHES = ({"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2})
WANTED = (
    {"layers": 1},
    {"layers": 1, "communication": "keep"},
    {"layers": 2},
    ["*/mlp/*", "*/attn/Softmax"],
)
CELLS = list(product(MESHES, WANTED))
QUICK = [CELLS[i] for i in (3, 4)]


@pytest.mark.parametrize(("mesh", "wanted"), CELLS if FULL else QUICK, ids=str)
def test_a_transformer_trains_to_the_same_bits(
    tmp_path: Path, mesh: dict[str, int], wanted: Any
) -> None:
    # One position less than is even, and a batch of uneven size.
    plain = shard(tmp_path / "a", gpt(), strategy(mesh), optimizer="adamw")
    clever = shard(tmp_path / "b", gpt(), strategy(mesh, wanted), optimizer="adamw")
    assert any(map(again, nodes_of(clever))) and not any(map(again, nodes_of(plain)))
    losses, states = trained(plain, batch=5, seq=7)
    got, others = trained(clever, batch=5, seq=7)
    assert got == losses
    for name, array in states.items():
        np.testing.assert_array_equal(others[name], array, err_msg=name)


@pytest.mark.parametrize(
    "mesh", [{"dp": 2}, {"dp": 2, "tp": 2}] if FULL else [{"dp": 2, "tp": 2}], ids=str
)
def test_a_classifier_trains_to_the_same_bits(tmp_path: Path, mesh: dict[str, int]) -> None:
    plain = shard(tmp_path / "a", mlp.build(image=6), strategy(mesh), optimizer="adamw")
    wanted = ["/relu*", "/fc2/MatMul"]
    clever = shard(tmp_path / "b", mlp.build(image=6), strategy(mesh, wanted), optimizer="adamw")
    assert [n.name for n in nodes_of(clever) if again(n)]
    assert trained(plain, batch=5)[0] == trained(clever, batch=5)[0]


def test_communication_is_kept_or_repeated(tmp_path: Path) -> None:
    counts = {}
    for what in ("keep", "recompute", None):
        wanted = None if what is None else {"layers": 1, "communication": what}
        out = shard(tmp_path / str(what), gpt(), strategy({"tp": 2}, wanted))
        counts[what] = sum(node.op_type == "AllReduce" for node in nodes_of(out))
    assert counts["keep"] == counts[None]
    # Of the sums of a layer one is inside; the other makes what the layer hands on.
    assert counts["recompute"] == counts[None] + GPT["layers"]


def peak(directory: Path, *batches: Mapping[str, Array]) -> tuple[int, float]:
    with Ranks(directory, Trainer, measured=True) as ranks:
        results = ranks.on_each(lambda member: member.train_step(batches, hyper("sgd", 1)))
        return max(member.peak_bytes() for member in ranks.members), results[0].loss


@pytest.mark.full
def test_the_peak_falls_with_the_layers(tmp_path: Path) -> None:
    size = {"layers": 6, "d_model": 16, "vocab": 20, "max_positions": 64, "dropout": 0.0}
    found = {}
    for what in (None, {"layers": 1}, {"layers": 2}):
        out = shard(tmp_path / str(len(found)), gpt(**size), strategy({"dp": 1}, what))
        batch = batch_of(out, np.random.default_rng(0), batch=8, seq=64)
        found[str(what)] = peak(out, batch)
    (all_kept, loss), (none, loss1), (half, loss2) = found.values()
    assert loss == loss1 == loss2
    # Activations of six layers against those of one and six borders; weights and their gradients
    # are some 0.1 MB of each.
    assert none < 0.4 * all_kept
    assert none < half < 0.75 * all_kept


SIZES = {"batch": 4, "seq": 32}


def test_a_limit_of_memory_is_held_with_little_recomputed(tmp_path: Path) -> None:
    size = {"layers": 3, "d_model": 16, "vocab": 20, "max_positions": 32, "dropout": 0.0}
    batch: dict[str, Array] = {}
    counts, peaks = [], []
    limits = (450, 400) if FULL else (400,)
    for number, memory in enumerate(("1GiB", *(f"{limit}KiB" for limit in limits))):
        wanted = {"memory": memory, "sizes": SIZES}
        out = shard(tmp_path / str(number), gpt(**size), strategy({"dp": 1}, wanted))
        batch = batch or batch_of(out, np.random.default_rng(0), **SIZES)
        counts.append(sum(map(again, nodes_of(out))))
        peaks.append(peak(out, batch)[0])
    assert counts[0] == 0 and counts == sorted(set(counts))
    assert peaks[0] > 500 * 1024
    for held, limit in zip(peaks[1:], limits, strict=True):
        # What is predicted is near enough; a bit of recomputation frees less than a tenth.
        assert 0.9 * limit * 1024 < held < 1.05 * limit * 1024
    with pytest.raises(StrategyError, match="expected at most 204,800 bytes on a device"):
        wanted = {"memory": "200KiB", "sizes": SIZES}
        shard(tmp_path / "x", gpt(**size), strategy({"dp": 1}, wanted))
    with pytest.raises(StrategyError, match=r"expected at most 3 under 'layers'.* got 4"):
        shard(tmp_path / "x", gpt(**size), strategy({"dp": 1}, {"layers": 4}))
    with pytest.raises(
        StrategyError, match=r"'sizes': expected a symbol .*, got 'bath'; nearest: 'batch'"
    ):
        wanted = {"memory": "200KiB", "sizes": {"bath": 1}}
        shard(tmp_path / "x", gpt(**size), strategy({"dp": 1}, wanted))


def test_sizes_of_a_step_count_by_micro_batch(tmp_path: Path) -> None:
    """Of 16 samples in 4 micro-batches, the limit holds 4 samples at a time."""
    size = {"layers": 2, "d_model": 16, "vocab": 20, "max_positions": 32, "dropout": 0.0}
    data: dict[str, Any] = {"mesh": {"dp": 1}, "recompute": {"memory": "600KiB"}}
    step = {**data, "target": {"sizes": {"batch": 16, "seq": 32}}, "micro_batches": 4}
    one = {**data, "target": {"sizes": {"batch": 4, "seq": 32}}}
    a, b = (
        shard(tmp_path / name, gpt(**size), Strategy.from_dict(entries))
        for name, entries in (("a", step), ("b", one))
    )
    assert nodes_of(a) == nodes_of(b) and not any(map(again, nodes_of(a)))


@pytest.mark.full
@pytest.mark.timeout(400)  # by bisection over programs
def test_a_limit_of_memory_holds_for_the_fullest_stage(tmp_path: Path) -> None:
    """All forwards come first, so that a stage keeps the activations of four micro-batches."""
    size = {"layers": 4, "d_model": 16, "vocab": 20, "max_positions": 32, "dropout": 0.0}
    pipeline = {"stages": 2, "micro_batches": 4, "schedule": "gpipe"}
    peaks, losses = [], []
    for number, memory in enumerate(("1GiB", "1100KiB")):
        wanted = {"memory": memory, "sizes": SIZES}
        data = {"devices": 2, "pipeline": pipeline, "recompute": wanted}
        out = shard(tmp_path / str(number), gpt(**size), Strategy.from_dict(data))
        rng = np.random.default_rng(0)
        held, loss = peak(out, *(batch_of(out, rng, **SIZES) for _ in range(4)))
        peaks.append(held)
        losses.append(loss)
    assert losses[0] == losses[1]
    assert peaks[0] > 1200 * 1024
    assert 0.85 * 1100 * 1024 < peaks[1] < 1.05 * 1100 * 1024
    with pytest.raises(StrategyError, match="expected at most 102,400 bytes on a device"):
        data["recompute"] = {"memory": "100KiB", "sizes": SIZES}
        shard(tmp_path / "x", gpt(**size), Strategy.from_dict(data))


@pytest.mark.full
def test_the_peak_of_twelve_layers_falls_as_predicted(tmp_path: Path) -> None:
    # 1.5 MB of activations a layer, some 0.4 MB of states.
    size = {"layers": 12, "d_model": 16, "heads": 2, "vocab": 20, "max_positions": 64}
    rows = []
    for number, wanted in enumerate((None, {"layers": 1})):
        out = tmp_path / str(number)
        ir.save(gpt(**size, dropout=0.0), out.with_suffix(".onnx"))
        spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("sgd"))
        sharded = shard_model(
            out.with_suffix(".onnx"), strategy({"dp": 1}, wanted), out, training=spec
        )
        assert sharded.training is not None
        sizes = {"batch": 8, "seq": 64}
        programs = [
            p
            for p in sharded.training.programs
            if p.program in ("training_model", "optimizer_model")
        ]
        predicted = total_bytes([program_memory(p, sizes) for p in programs])
        rows.append((predicted, peak(out, batch_of(out, np.random.default_rng(0), **sizes))[0]))
    (predicted, measured), (predicted_again, measured_again) = rows
    assert measured_again < 0.3 * measured
    # One tensor of a layer may be freed a node later than predicted: the feed-forward part's
    # hidden rows, four times d_model wide, are the largest.
    one = 8 * 64 * 4 * 16 * np.dtype(np.float32).itemsize
    assert predicted == pytest.approx(measured, abs=one)
    assert predicted_again == pytest.approx(measured_again, abs=one)


def test_layers_are_found() -> None:
    model = normalise(gpt(layers=5))
    nodes = list(model.graph)
    layers = find_layers(nodes, shapes(model, NO_CONSTRAINTS))
    assert len(layers) == 5
    for number, layer in enumerate(layers):
        names = {(node.name or "").split("/")[1] for node in nodes[layer.start : layer.stop]}
        assert names == {f"layer{number}"}
    single = normalise(gpt(layers=1))
    assert find_layers(list(single.graph), shapes(single, NO_CONSTRAINTS)) == []


def test_what_cannot_be_recomputed_is_refused(tmp_path: Path) -> None:
    def refused(entry: Any, match: str) -> None:
        with pytest.raises(StrategyError, match=match):
            shard(tmp_path / "a", mlp.build(image=6), strategy({"dp": 1}, entry))

    refused(["/relo1*"], "recompute: expected the name or a pattern of a node of the forward")
    refused({"layers": 1}, "expected repeated layers, got none")
    refused({"layers": 0}, "expected a number of at least 1 under 'layers'")
    refused({"layer": 1}, "unknown key 'layer'; nearest: 'layers'")
    refused({"nodes": ["/relu*"], "communication": "no"}, "expected one of .'keep', 'recompute'")
    refused([], "expected 'nodes', 'layers' or 'memory'")
    refused("all", "expected a list of nodes or a mapping")
    refused({"memory": "much"}, "'much'")
    with pytest.raises(StrategyError, match="--recompute: expected layers, layers=K"):
        parse_recompute(["layers=0"], "keep")
    with pytest.raises(StrategyError, match="--recompute-communication: expected one of"):
        parse_recompute(["layers"], "never")
    found = parse_recompute(["layers=2", "/a*", "auto=1KiB"], "keep")
    assert (found.layers, found.nodes, found.memory) == (2, ("/a*",), 1024)

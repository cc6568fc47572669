"""Moments, gradients and parameters split over replicas: training beside one device, and bytes.

`ONNXPAR_FULL` runs all cells.
"""

from collections import Counter
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx
import pytest
import transformer

from onnxpar.api import runtime
from onnxpar.api.plan_strategy import read_workload
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import OptimizerKind
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.strategy import Strategy, resolve
from onnxpar.strategy.machine_file import load_machine
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime import Trainer
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.training.programs import OPTIMIZER, TRAINING
from onnxpar_runtime.verify.compare import verify
from tests.tiers import FULL
from tests.training_cases import CROSS_ENTROPY, batch_of, hyper, shard

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lamb")
MESHES: dict[str, dict[str, int]] = {
    "dp=2": {"dp": 2},
    "dp=4": {"dp": 4},
    "dp=3": {"dp": 3},
    "dp=2,tp=2": {"dp": 2, "tp": 2},
}
SYMBOLS = {"mlp": "batch=7", "transformer": "batch=3,seq=5", "tied head": "batch=3,seq=5"}
CELLS = [*product(SYMBOLS, MESHES, (1, 2, 3), OPTIMIZERS)]
SAMPLE = [
    ("mlp", "dp=2,tp=2", 3, "lamb"),
    ("tied head", "dp=4", 3, "adamw"),
]


def model_of(name: str) -> Any:
    """Dims of 10 and 7, which nothing divides; or a small transformer."""
    if name == "mlp":
        return mlp.build(hidden=(10, 7))
    return transformer.build(
        layers=1, d_model=32, heads=4, vocab=40, max_positions=16, tied_head=name == "tied head"
    )


def strategy_of(mesh: str, level: int, **more: Any) -> Strategy:
    parallel = {"level": level, "threshold": 0, **more}
    return Strategy.from_dict({"mesh": MESHES[mesh], "optimizer_parallel": parallel})


def check(tmp_path: Path, name: str, strategy: Strategy, optimizer: str) -> Manifest:
    ranks = shard(tmp_path / "ranks", model_of(name), strategy, optimizer=optimizer)
    found = runtime.verify(
        ranks,
        tmp_path / "ranks.onnx",
        cases=[SYMBOLS[name]],
        options=runtime.VerifyOptions(steps=3),
    )
    assert [problem for case in found for problem in case.problems] == []
    assert all(case.ok and case.bytes_counted == case.bytes_expected for case in found)
    return Manifest.load(ranks)


@pytest.mark.parametrize("cell", CELLS if FULL else SAMPLE, ids=lambda c: "; ".join(map(str, c)))
def test_equals_one_device(tmp_path: Path, cell: tuple[str, str, int, str]) -> None:
    """Forward, losses, gradients and parameters of three steps, one of them of two parts."""
    name, mesh, level, optimizer = cell
    check(tmp_path, name, strategy_of(mesh, level), optimizer)


STAGES = {"pipeline": {"stages": 2, "micro_batches": 2}}
MIXED = [
    (STAGES, "dp=2", "tied head", 3),
    (STAGES, "dp=2", "tied head", 2),
    (STAGES, "dp=2,tp=2", "transformer", 1),
    ({"recompute": ["/layer*"]}, "dp=2", "transformer", 3),
    ({"recompute": ["/layer*"]}, "dp=2,tp=2", "transformer", 2),
]


@pytest.mark.parametrize(("more", "mesh", "name", "level"), MIXED if FULL else MIXED[:1])
def test_with_stages_and_recomputation(
    tmp_path: Path, more: dict[str, Any], mesh: str, name: str, level: int
) -> None:
    """A table that two stages read is gathered in both, and what is recomputed gathers again."""
    parallel = {"level": level, "threshold": 0}
    content = {"mesh": MESHES[mesh], "optimizer_parallel": parallel, **more}
    check(tmp_path, name, Strategy.from_dict(content), "adamw")


@pytest.mark.parametrize("level", [1, 2, 3] if FULL else [2])
def test_a_group_smaller_than_the_replicas(tmp_path: Path, level: int) -> None:
    """Shards over pairs of neighbours, copies over the two pairs; adds up in both."""
    manifest = check(tmp_path, "mlp", strategy_of("dp=4", level, group=2), "adamw")
    for state in manifest.trained().states.values():
        if state.kind == "moment1":
            assert {atom for dim in state.dims for _, atoms in dim for atom in atoms} == {1}


def test_sixteen_bits_are_gathered(tmp_path: Path) -> None:
    """Float32 shards are rounded before they are gathered, which halves what is sent."""
    sent = {}
    for compute in (None, "float16"):
        strategy = strategy_of("dp=4", 3)
        out = shard(tmp_path / str(compute), model_of("mlp"), strategy, compute=compute)
        one = shard(tmp_path / f"{compute}.1", model_of("mlp"), "dp", devices=1, compute=compute)
        (case,) = verify(out, one, [{"batch": 7}], options=VerifyOptions(steps=3))
        assert case.problems == () and case.bytes_counted == case.bytes_expected
        found = Manifest.load(out).program("training_model").collectives
        sent[compute] = [c.bytes for c in found if c.op == "AllGather"]
    # That of the last layer is kept for the backward pass.
    assert len(sent["float16"]) == 4
    assert sent["float16"] == [int(n) // 2 for n in sent[None]]


def bytes_of(manifest: Manifest, kind: str) -> int:
    """Bytes of the buffers of a kind on a rank."""
    states = manifest.trained().states
    shardings = [s.sharding(manifest.atoms) for s in states.values() if s.kind == kind]
    return sum(4 * prod(sharding.local_shape) for sharding in shardings)


def counts(manifest: Manifest, program: str) -> Counter[str]:
    return Counter(c.op for c in manifest.program(program).collectives)


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"] if FULL else ["dp=4"])
def test_what_a_device_holds_and_sends(tmp_path: Path, mesh: str) -> None:
    """Bytes of states, and collectives, at each level."""
    held: dict[int, Manifest] = {}
    for level in range(4):
        strategy = strategy_of(mesh, level)
        out = shard(tmp_path / str(level), model_of("transformer"), strategy, optimizer="adamw")
        held[level] = Manifest.load(out)
    replicated = {kind: bytes_of(held[0], kind) for kind in ("parameter", "gradient", "moment1")}
    share = 4 if mesh == "dp=4" else 2
    levels = {"moment1": 1, "moment2": 1, "gradient": 2, "micro_gradient": 2, "parameter": 3}
    for (kind, since), level in product(levels.items(), held):
        # Every dim of this model is divisible by four.
        expected = replicated["parameter"] // (share if level >= since else 1)
        assert bytes_of(held[level], kind) == expected, (kind, level)
    tensors = sum(s.kind == "parameter" for s in held[0].trained().states.values())
    reductions = counts(held[0], "optimizer_model")["AllReduce"]
    norms = reductions - tensors
    other = counts(held[0], "training_model")
    assert set(other) == {"AllReduce"}
    # Once a step, and gathered once a step.
    found = counts(held[1], "optimizer_model")
    assert found["ReduceScatter"] == found["AllGather"] == tensors
    assert counts(held[1], "training_model") == other
    # Each gradient is reduced where it is made; of the optimizer's sums the norm's are left.
    for level in (2, 3):
        assert counts(held[level], "training_model")["ReduceScatter"] == tensors
        assert counts(held[level], "training_model")["AllReduce"] == other["AllReduce"]
        assert counts(held[level], "optimizer_model")["AllReduce"] <= norms + 1
        assert counts(held[level], "optimizer_model")["ReduceScatter"] == 0
    assert counts(held[2], "optimizer_model")["AllGather"] == tensors
    assert counts(held[3], "optimizer_model")["AllGather"] == 0
    # Each is gathered in the forward pass, those that the backward pass reads once more there.
    forward = counts(held[3], "eval_model")["AllGather"]
    assert forward == tensors
    assert tensors < counts(held[3], "training_model")["AllGather"] < 2 * tensors


@pytest.mark.parametrize(
    "program", ["training_model", "eval_model"] if FULL else ["training_model"]
)
def test_a_gathered_parameter_is_dropped_after_its_reader(tmp_path: Path, program: str) -> None:
    """One node reads it, which is written right after it; so does what only rearranges it.

    Only the head's table is kept, since the backward pass begins with it.
    """
    strategy = strategy_of("dp=2,tp=2", 3)
    out = shard(tmp_path / "a", model_of("tied head"), strategy, optimizer="adamw")
    names = {s.parameter for s in Manifest.load(out).trained().states.values()}
    path = out / f"rank0000.{program}.onnx"
    nodes = list(onnx.load(path, load_external_data=False).graph.node)
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.input:
            readers.setdefault(name, []).append(index)
    gathers = Counter[str]()
    for index, node in enumerate(nodes):
        texts = {entry.key: entry.value for entry in node.metadata_props}
        if "/AllGather." not in node.name or node.op_type not in ("AllGather", "Start"):
            continue
        # The table is transposed for the head as a shard.
        value = texts["value"].replace("/lm_head/Transpose_output_0", "wte.weight")
        gathers[value] += 1
        reader, *more = readers[node.output[0]]
        if node.op_type == "Start":
            index = reader
            assert nodes[index].op_type == "Wait"
            reader, *more = readers[nodes[index].output[0]]
        assert len(more) == (value == "wte.weight" and "lm_head" in nodes[reader].name)
        # What stands between belongs to the reader: it was written for one of its operands.
        between = {n.name.split("/")[1] for n in nodes[index:reader]}
        assert between == {nodes[reader].name.split("/")[1]}
    assert set(gathers) == names
    backward = {"wte.weight": 0, "ln_f.weight": 1, "layer0.mlp.fc1.weight": 1, "ln_f.bias": 0}
    for name, more in backward.items():
        uses = 2 if name == "wte.weight" else 1  # the table is read by embedding and head
        assert gathers[name] == uses + (more if program == "training_model" else 0)


@pytest.mark.full
def test_what_is_held_beside_the_states(tmp_path: Path) -> None:
    """One layer's parameters and gradients at a time: what is gathered early would all be there.

    That is what the planner says, too.
    """
    model = transformer.build(layers=3, d_model=64, heads=4, vocab=40, max_positions=16)
    spec = TrainingSpec(parse_loss(CROSS_ENTROPY), OptimizerKind.ADAMW)
    batch, more, largest = {}, {}, 0
    for level in range(4):
        strategy = strategy_of("dp=4", level)
        out = shard(tmp_path / str(level), model, strategy, optimizer="adamw")
        batch = batch or batch_of(out, np.random.default_rng(0), batch=4, seq=4)
        first = (TRAINING, OPTIMIZER)
        # The machine "cpu", for which the plan is priced, runs nothing behind the programs.
        with Ranks(out, Trainer, programs=first, measured=True, overlap=False) as group:
            members, step = group.members, hyper("adamw", 1)
            group.on_each(lambda member: member.train_step([batch], step))  # noqa: B023
            peak = members[0].peak_bytes()
        workload = read_workload(out.with_suffix(".onnx"), {}, spec, strategy.optimizer_parallel)
        seeds = resolve(strategy, workload.program)
        sizes = {"batch": 4, "seq": 4}
        price = workload.price(workload.plan(seeds), load_machine("cpu"), sizes)
        manifest = Manifest.load(out)
        states = {s.kind for s in manifest.trained().states.values()} - {"micro_gradient"}
        more[level] = peak - sum(bytes_of(manifest, kind) for kind in states)
        counts = [prod(s.shape) for s in manifest.trained().states.values()]
        largest = 4 * max(int(n) for n in counts)
        # The plan may have one parameter more or less gathered at the peak than the run. It counts
        # one that is ahead and one that is kept, which the run may have elsewhere.
        assert -3 * largest <= peak - price.peak <= largest, level
    replicated = bytes_of(Manifest.load(tmp_path / "0"), "parameter")
    # Level 0 has all reduced gradients beside those that waited for the sum, level 1 a quarter.
    assert more[0] > replicated > 2 * more[1]
    # Then one gradient, or one parameter, and its parts in a collective.
    assert more[2] < more[1]
    assert more[3] < more[2] + 2 * largest < replicated / 2


def measured(directory: Path, manifest: Manifest, rank: Rank) -> Trainer:
    first = (TRAINING, OPTIMIZER)
    return Trainer(
        directory, rank=rank, device="cpu", manifest=manifest, programs=first, measured=True
    )

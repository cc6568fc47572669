"""What runs in the background: readers wait, one order of collectives, no more memory."""

import json
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import transformer

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cost.cost_model import CostModel
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.partition.program_memory import program_memory, value_bytes
from onnxpar.stages import partition_training
from onnxpar.strategy.presets import strategy_for
from onnxpar_runtime.manifest import Manifest

SPEC = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"))
CHAINED = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Permute", "Start")


def sharded(folder: Path, strategy: str, level: int) -> Path:
    """A directory for training of a small transformer."""
    path = folder / "model.onnx"
    ir.save(transformer.build(layers=2, max_positions=16), path)
    out = folder / "out"
    shard_model(path, strategy, out, training=SPEC, optimizer_parallel=level)
    return out


def nodes_of(directory: Path, program: str = "training_model") -> list[onnx.NodeProto]:
    """The nodes of rank 0's graph."""
    path = directory / f"rank0000.{program}.onnx"
    return list(onnx.load(path, load_external_data=False).graph.node)


@pytest.mark.parametrize(
    ("strategy", "level", "background"),
    [
        pytest.param("dp=2", 0, {"StartAhead"}, marks=pytest.mark.full),
        pytest.param("dp=2", 1, {"StartAhead"}, marks=pytest.mark.full),
        pytest.param("dp=2", 2, {"StartAhead", "ReduceScatter"}, marks=pytest.mark.full),
        ("dp=2", 3, {"StartAhead", "ReduceScatter", "AllGather"}),
        ("tp=2", 0, {"AllReduce"}),
        ("dp=2,tp=2", 3, {"StartAhead", "AllReduce"}),
    ],
)
def test_every_reader_waits(
    tmp_path: Path, strategy: str, level: int, background: set[str]
) -> None:
    nodes = nodes_of(sharded(tmp_path, strategy, level))
    started: dict[str, onnx.NodeProto] = {}
    results: set[str] = set()
    # For each value, the results whose Wait has run when it is there, in whatever order
    # onnxruntime runs the nodes.
    complete: dict[str, set[str]] = {}
    kinds = {node.op_type for node in nodes if node.op_type == "StartAhead"}
    token = None
    # What else is in the chain: a Barrier makes a Start wait for the reader before it, Accumulate
    # completes what StartAhead starts on.
    gates = {n.input[1] for n in nodes if n.op_type in CHAINED and len(n.input) > 1}
    gates |= {n.input[0] for n in nodes if n.op_type == "StartAhead"}
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        behind = set().union(*(complete.get(name, set()) for name in node.input))
        if node.op_type == "Wait":
            behind.add(node.input[0])
        assert results.intersection(node.input) <= behind, f"{node.name} need not wait"
        complete |= {name: behind for name in node.output if name}
        if node.op_type == "Wait":
            start = started.pop(node.input[0])
            assert node.input[1] == start.input[0]
            same = {a.name: onnx.helper.get_attribute_value(a) for a in start.attribute}
            assert same == attributes
            continue
        assert not set(node.input) & set(started), f"{node.name} does not wait"
        if node.op_type == "Start":
            started[node.output[0]] = node
            results.add(node.output[0])
            kinds.add(attributes["op"].decode())
        # All of them are in one chain, which is the order of their execution.
        if node.op_type in CHAINED:
            assert list(node.input[1:]) == ([] if token is None else [token])
            token = node.output[1]
        elif node.op_type == "StartAhead" or node.output[0] in gates:
            assert token is None or node.input[0] == token
            token = node.output[0]
    assert not started
    assert kinds >= background


@pytest.mark.parametrize(
    ("preset", "level", "name", "tensors"),
    [
        ("dp=2", 3, "training_model", 2),
        pytest.param("tp=2", 0, "training_model", 1, marks=pytest.mark.full),
        pytest.param("dp=2,tp=2", 2, "training_model", 1, marks=pytest.mark.full),
        ("tp=2", 0, "paired_model", 2),
    ],
)
def test_the_peak_of_memory_rises_by_few_tensors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    level: int,
    name: str,
    tensors: int,
) -> None:
    """By the largest of each micro-batch, and at level 3 also by a gathered parameter."""
    path = tmp_path / "model.onnx"
    model = transformer.build(layers=2, max_positions=16)
    ir.save(model, path)
    strategy = strategy_for(preset, None, model, "model")
    strategy = replace(strategy, pair_micro_batches=name == "paired_model")

    def program_of(out: str) -> PartitionedModel:
        summary = shard_model(
            path, strategy, tmp_path / out, training=SPEC, optimizer_parallel=level
        )
        assert summary.training is not None
        return next(p for p in summary.training.programs if p.program == name)

    with_background = program_memory(program_of("a")).values
    run = partition_training.run_in_background

    def within_the_peak(part: PartitionedModel, cost: CostModel, **options: int | None) -> None:
        run(part, cost, **{**options, "room": 0})

    monkeypatch.setattr(partition_training, "run_in_background", within_the_peak)
    without_room = program_memory(program_of("b")).values
    monkeypatch.setattr(partition_training, "run_in_background", lambda *_, **__: None)
    program = program_of("c")
    alone = program_memory(program).values
    assert without_room <= alone
    moved = [n for n in program.builder.nodes if n.op_type in CHAINED]
    values = [v for n in moved for v in (n.inputs[0], n.outputs[0]) if v is not None]
    largest = max(value_bytes(program, v, {}) for v in values)
    # A token of each, of a byte, may be there longer.
    assert with_background <= alone + tensors * largest + len(moved)


@pytest.mark.parametrize(
    ("machine", "batch", "some"),
    [
        # While the gradients of weights are computed, a sum travels over a slow link.
        ("links: [{bandwidth: 1.2e+8, latency: 1.0e-4, overlaps: true}]", 256, True),
        # They take less time than it takes to hand the sum over.
        ("links: [{bandwidth: 1.2e+8, latency: 1.0e-4, overlaps: true}]", 2, False),
        # A link that needs so little time that there is nothing to hide.
        pytest.param(
            "links: [{bandwidth: 1.0e+15, latency: 1.0e-9, overlaps: true}]",
            256,
            False,
            marks=pytest.mark.full,
        ),
        # A processor moves the data.
        ("links: [{bandwidth: 1.2e+8, latency: 1.0e-4}]", 256, False),
        # Nobody says where the program runs.
        ("", 256, True),
        pytest.param("", 2, False, marks=pytest.mark.full),
    ],
)
def test_prices_decide_what_runs_in_the_background(
    tmp_path: Path, machine: str, batch: int, some: bool
) -> None:
    model = transformer.build(layers=1, max_positions=16)
    ir.save(model, tmp_path / "model.onnx")
    target: dict[str, object] = {"sizes": {"batch": batch, "seq": 8}}
    if machine:
        target["machine"] = str(tmp_path / "machine.yaml")
        (tmp_path / "machine.yaml").write_text(
            "{name: x, flops: {float32: 6.0e+10}, bandwidth: 1.2e+10, memory: 8GiB, overhead: "
            f"3.0e-6, {machine}}}"
        )
    (tmp_path / "s.yaml").write_text(json.dumps({"mesh": {"tp": 2}, "target": target}))
    out = tmp_path / "out"
    shard_model(tmp_path / "model.onnx", tmp_path / "s.yaml", out, training=SPEC)
    assert any(node.op_type == "Start" for node in nodes_of(out)) == some
    if some:
        shard_model(tmp_path / "model.onnx", out / "strategy.yaml", tmp_path / "b", training=SPEC)
        assert nodes_of(tmp_path / "b") == nodes_of(out)


@pytest.mark.parametrize(("strategy", "level"), [("dp=2", 3), ("tp=2", 0)])
def test_a_wait_is_behind_what_hides_it(tmp_path: Path, strategy: str, level: int) -> None:
    """onnxruntime runs at once what reads nothing else, if it has fused a node before it."""
    nodes = nodes_of(sharded(tmp_path, strategy, level))
    made = {name: index for index, node in enumerate(nodes) for name in node.output}
    started: dict[str, int] = {}
    delayed = 0
    for index, node in enumerate(nodes):
        if node.op_type == "Start":
            started[node.output[1]] = index
        if node.op_type != "Wait":
            continue
        barrier = nodes[made[node.input[2]]]
        if barrier.op_type != "Barrier":
            continue
        token, *after = barrier.input
        assert started[token] < made[after[0]] < index
        delayed += 1
    # Those that wait at once are few: the loss, and a gather that the link must not share.
    assert delayed >= len(started) - 3


def test_what_starts_ahead_is_in_the_manifest(tmp_path: Path) -> None:
    out = sharded(tmp_path, "dp=2", 0)
    manifest = Manifest.load(out)
    started = {c.value for c in manifest.program("optimizer_model").collectives if c.started_in}
    operands = {
        name for node in nodes_of(out) if node.op_type == "StartAhead" for name in node.input[2:]
    }
    assert started == operands
    assert started == {f"onnxpar.grad.{n}" for n in manifest.parameters}
    collectives = manifest.program("optimizer_model").collectives
    assert {c.started_in for c in collectives} == {"training_model"}


@pytest.mark.parametrize("compute", [None, "float16"])
def test_parameters_are_finished_next_to_their_readers(tmp_path: Path, compute: str | None) -> None:
    """Also where a cast reads a parameter first, which onnxruntime would run at once."""
    path, out = tmp_path / "model.onnx", tmp_path / "out"
    ir.save(transformer.build(layers=2, max_positions=16), path)
    spec = TrainingSpec(SPEC.loss, SPEC.optimizer, compute=compute)
    shard_model(path, "dp=2", out, training=spec, optimizer_parallel=1)
    graph = onnx.load(out / "rank0000.training_model.onnx", load_external_data=False).graph
    types = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
    after = {n.input[0]: list(n.input[1:]) for n in graph.node if n.op_type == "Finish"}
    assert len(after) > 4
    # Nothing is computed before the table.
    assert after.pop("wte.weight") == []
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}
    for name, values in after.items():
        assert len(values) == 1, name
        assert types[values[0]] in floats, name


def test_it_is_said_what_hides_a_collective(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ir.save(transformer.build(layers=2, max_positions=16), path)
    summary = shard_model(path, "dp=2", tmp_path / "out", training=SPEC, optimizer_parallel=3)
    assert summary.training is not None
    programs = {p.program: p.builder.collectives for p in summary.training.programs}
    gather = next(
        c
        for c in programs["training_model"]
        if c.op == "AllGather" and c.value == "layer1.mlp.fc1.weight"
    )
    # The weights of attention are too small to be sharded, so the two gathers before are the MLP's.
    assert gather.behind == "/layer0/mlp/fc1/MatMul to /layer1/ln2/LayerNormalization"
    ahead = {c.behind for c in programs["optimizer_model"] if c.started_in}
    assert all(text.startswith("the nodes of training_model after ") for text in ahead)
    assert ahead

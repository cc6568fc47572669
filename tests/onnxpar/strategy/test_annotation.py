"""Strategies that stand in the model itself: written, read, and by other producers."""

import json
from pathlib import Path
from typing import Any

import mlp
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import transformer
import two_layer
from _exporter import save

from onnxpar.api.annotate import Annotated, annotate
from onnxpar.api.shard_model import plan
from onnxpar.cli import main
from onnxpar.core.errors import ModelError, StrategyError
from onnxpar.graph.metadata_keys import ANNOTATION
from onnxpar.strategy import Strategy
from onnxpar.strategy.annotation_reader import read_annotation
from tests.onnxpar.strategy.annotated import (
    BODY,
    FUNCTION,
    MERGED,
    MODEL,
    RESIDUAL,
    foreign,
    parsed,
    report,
    saved,
    sharded,
)
from tests.tiers import FULL

ROOT = Path(__file__).parents[3]


def round_trip(tmp_path: Path, path: Path, strategy: Any, devices: int | None = None) -> Annotated:
    """Write, read, write; sharding by the annotation is sharding by the strategy."""
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    done = annotate(path, strategy, first, devices=devices)
    annotate(first, None, second)
    assert first.read_bytes() == second.read_bytes()
    want = report(path, strategy, tmp_path / "by_strategy", devices=devices)
    assert report(first, None, tmp_path / "by_annotation") == want
    graphs = sorted((tmp_path / "by_strategy").glob("*.onnx"))
    assert graphs
    for graph in graphs:
        assert (tmp_path / "by_annotation" / graph.name).read_bytes() == graph.read_bytes()
    assert done.differing == ()
    return done


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"layers": 1, "d_model": 24, "heads": 12, "vocab": 32, "max_positions": 16}
    merged = {"fused_qkv": True, "merged_heads": True, "tied_head": True, "loss": True}
    built = {
        "mlp": mlp.build(),
        "two_layer": two_layer.build(),
        "transformer": transformer.build(**sizes),
        "merged": transformer.build(**sizes, **merged),
    }
    for name, model in built.items():
        save(model, folder / f"{name}.onnx")
    return {name: folder / f"{name}.onnx" for name in built}


STRATEGIES = ["dp=4", "tp=4", "dp=2,tp=4", "dp=3,tp=2", "auto", "auto:propagation", "replicate"]
NAMES = ["mlp", "two_layer", "transformer", "merged"]
QUICK = {
    ("transformer", "dp=2,tp=4"),
    ("transformer", "auto"),
    ("merged", "dp=3,tp=2"),
    *((name, strategy) for name in ("mlp", "two_layer") for strategy in STRATEGIES),
}
CASES = [
    (name, strategy)
    for name in NAMES
    for strategy in STRATEGIES
    if (name, strategy) in QUICK or FULL
]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_round_trip(name: str, strategy: str, models: dict[str, Path], tmp_path: Path) -> None:
    devices = 4 if strategy[:2] in ("au", "re") else None
    round_trip(tmp_path, models[name], strategy, devices)


def test_round_trip_of_numbers(models: dict[str, Path], tmp_path: Path) -> None:
    done = round_trip(tmp_path, models["mlp"], str(ROOT / "models" / "mlp.strategy.yaml"))
    assert (done.devices, done.nodes, done.annotated) == (8, 6, 6)
    found = onnx.load(done.out)
    assert [(c.name, c.num_devices) for c in found.configuration] == [("devices=8", 8)]
    node = next(n for n in found.graph.node if n.name == "/fc1/MatMul")
    spec = next(s for s in node.device_configurations[0].sharding_spec if "weight" in s.tensor_name)
    # [4, 1] of the matrix 2 x 4: each of the four shards is held by two devices, 4 apart.
    assert [(d.axis, [p.num_shards for p in d.simple_sharding]) for d in spec.sharded_dim] == [
        (0, [4])
    ]
    groups = {g.key: list(g.value) for g in spec.index_to_device_group_map}
    assert [groups[d] for d in spec.device] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    # The sum over four devices is partial, which the format cannot say.
    named = {s.tensor_name for s in node.device_configurations[0].sharding_spec}
    assert not named & set(node.output)


STAGED = {
    "presets": "pp=2,dp=2,tp=2",
    "assigned": {
        "devices": 4,
        "nodes": {"/fc1/MatMul": {"in": [[1, 2], [2, 1]]}},
        "pipeline": {
            "stages": 2,
            "micro_batches": 3,
            "schedule": "gpipe",
            "assign": {"/fc1/*": 0, "/relu1/*": 1},
        },
    },
    "chunks": {
        "mesh": {"dp": 2},
        "pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2},
    },
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mlp", "presets"), ("mlp", "assigned"), ("mlp", "chunks"), ("transformer", "presets")],
)
def test_round_trip_of_pipelines(
    name: str, kind: str, models: dict[str, Path], tmp_path: Path
) -> None:
    entry = STAGED[kind]
    strategy = Strategy.from_dict(entry) if isinstance(entry, dict) else entry
    done = round_trip(tmp_path, models[name], strategy)
    found = onnx.load(done.out)
    size = done.devices // 2
    assert found.configuration[0].num_devices == done.devices
    entries = [c for node in found.graph.node for c in node.device_configurations]
    parts = 4 if kind == "chunks" else 2
    assert {c.pipeline_stage for c in entries if c.HasField("pipeline_stage")} == set(range(parts))
    for entry in entries:
        held = range(entry.pipeline_stage % 2 * size, entry.pipeline_stage % 2 * size + size)
        for spec in entry.sharding_spec:
            groups = {g.key: list(g.value) for g in spec.index_to_device_group_map}
            assert sorted(d for key in spec.device for d in groups.get(key, [key])) == [*held]
    # The written annotation has the same stages and schedule, and computes the same.
    directories = [tmp_path / "by_strategy", tmp_path / "by_annotation"]
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in directories]
    assert manifests[0]["pipeline"] == manifests[1]["pipeline"]
    if kind == "assigned":
        assert (manifests[0]["pipeline"]["micro_batches"], done.differing) == (3, ())


def test_another_producer_says_stages_alone(tmp_path: Path) -> None:
    model = parsed(MODEL)
    model.configuration.add(name="any", num_devices=2)
    for stage, node in enumerate(model.graph.node):
        node.device_configurations.add(configuration_id="any", pipeline_stage=stage)
    found = report(saved(tmp_path, model), None, tmp_path / "out")
    assert [(n["name"], n["stage"]) for n in found["nodes"]] == [("mm", 0), ("act", 1)]


def test_pending_sums_are_derived(tmp_path: Path) -> None:
    data = {
        "mesh": {"dp": 2, "tp": 2},
        "nodes": {
            "left": {"in": [["dp", "tp"], ["tp", None]]},
            "right": {"in": [["dp", "tp"], ["tp", None]]},
            "sum": {"in": [["dp", None]] * 2, "partial": {"operands": [0, 1], "axes": ["tp"]}},
            "twice": {"in": [["dp", None]] * 2, "partial": {"operands": [0, 1], "axes": ["tp"]}},
            "act": {"in": [["dp", None]]},
        },
    }
    path = saved(tmp_path, RESIDUAL)
    round_trip(tmp_path, path, Strategy.from_dict(data))
    found = plan(ir.load(tmp_path / "first.onnx"))
    assert [n for n, p in found.nodes.items() if p.carried] == ["sum", "twice"]
    bare = onnx.load(tmp_path / "first.onnx")
    del bare.metadata_props[:]
    found = plan(ir.from_proto(bare))
    assert [n for n, p in found.nodes.items() if p.carried] == ["sum", "twice"]
    data["nodes"]["left"]["out"] = [["dp", "tp"]]  # type: ignore[index]
    data["nodes"] |= {"sum": {"in": [["dp", None]] * 2}, "twice": {"in": [["dp", None]] * 2}}
    round_trip(tmp_path, path, Strategy.from_dict(data))
    found = plan(ir.load(tmp_path / "first.onnx"))
    assert list(found.resharded) == ["p"] and not any(p.carried for p in found.nodes.values())


@pytest.mark.parametrize("dims", [["dp", "tp", None], [None, "tp", "dp"], ["tp", "dp", None]])
def test_merged_dims_have_a_simple_sharding_for_each_part(
    dims: list[str | None], tmp_path: Path
) -> None:
    data = {"mesh": {"dp": 3, "tp": 2}, "nodes": {"merge": {"in": [dims, None]}}}
    round_trip(tmp_path, saved(tmp_path, MERGED), Strategy.from_dict(data))
    node = onnx.load(tmp_path / "first.onnx").graph.node[1]
    spec = node.device_configurations[0].sharding_spec[0]
    parts = [(p.dim_value, p.num_shards) for p in spec.sharded_dim[0].simple_sharding]
    sizes = {"dp": 3, "tp": 2, None: 1}
    assert parts == [(6, sizes[dims[0]]), (4, sizes[dims[1]])]


@pytest.mark.parametrize(("text", "name"), [(BODY, "crop"), (FUNCTION, "call")])
@pytest.mark.parametrize("strategy", ["dp=2", "tp=2", "dp=2,tp=3"])
def test_nodes_whose_bodies_stand_in_their_place(
    text: str, name: str, strategy: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, text)
    annotate(path, strategy, tmp_path / "first.onnx")
    node = onnx.load(tmp_path / "first.onnx").graph.node[0]
    assert node.name == name and node.device_configurations[0].sharding_spec
    want = report(path, strategy, tmp_path / "by_strategy")
    found = report(tmp_path / "first.onnx", None, tmp_path / "by_annotation")
    assert found["collectives"] == want["collectives"]
    layouts = [[o["sharding"] for o in n["inputs"]] for n in want["nodes"]]
    assert [[o["sharding"] for o in n["inputs"]] for n in found["nodes"]] == layouts


def test_symbols_training_and_the_rest_of_the_file_are_kept(tmp_path: Path) -> None:
    model = parsed(MODEL)
    model.ir_version, model.producer_name = 8, "someone"
    model.metadata_props.add(key="note", value="theirs")
    path = saved(tmp_path, model)
    data = {"mesh": {"dp": 2}, "symbols": {"batch": {"divisor": 2, "max": 64}}}
    round_trip(tmp_path, path, Strategy.from_dict(data))
    found = onnx.load(tmp_path / "first.onnx")
    assert found.ir_version == 11 and found.producer_name == "someone"
    for node in found.graph.node:
        node.ClearField("device_configurations")
    found.ClearField("configuration")
    assert {p.key for p in found.metadata_props} == {"note", ANNOTATION}
    assert found.graph == model.graph


def test_training_takes_the_annotation(models: dict[str, Path], tmp_path: Path) -> None:
    given = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "sgd"]
    first = tmp_path / "first.onnx"
    annotate(models["mlp"], "dp=2,tp=2", first)
    assert main(["shard", str(first), "-o", str(tmp_path / "out"), *given]) == 0
    assert (tmp_path / "out" / "rank0003.training_model.onnx").is_file()
    # Ranks get their own graphs, which must not be sharded again.
    for file in sorted((tmp_path / "out").glob("*.onnx")):
        assert not onnx.load(file, load_external_data=False).configuration


# -- external data -------------------------------------------------------------------------------


def external(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    model = parsed(RESIDUAL)
    for number, tensor in enumerate(model.graph.initializer):
        tensor.raw_data = bytes([number + 1]) * 256
    onnx.save(
        model, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0
    )
    return folder / "m.onnx"


def test_external_data_is_kept(tmp_path: Path) -> None:
    path = external(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    annotate(path, "tp=2", path.with_name("beside.onnx"))
    annotate(path, "tp=2", other / "first.onnx")
    annotate(other / "first.onnx", None, other / "second.onnx")
    assert (other / "m.data").read_bytes() == path.with_name("m.data").read_bytes()
    texts = [f.read_bytes() for f in (path.with_name("beside.onnx"), *other.glob("*.onnx"))]
    assert len(texts) == 3 and len(set(texts)) == 1
    tensors = onnx.load(other / "first.onnx").graph.initializer
    assert [t.raw_data[:1] for t in tensors] == [b"\1", b"\2"]
    (other / "m.data").write_bytes(b"mine")
    with pytest.raises(ModelError, match=r"m\.data.*got another file"):
        annotate(path, "tp=2", other / "first.onnx")
    assert (other / "m.data").read_bytes() == b"mine"
    path.with_name("m.data").unlink()
    with pytest.raises(ModelError, match=r"m\.data.*does not exist"):
        annotate(path, "tp=2", tmp_path / "third.onnx")
    assert not (tmp_path / "third.onnx").exists()


def test_a_model_is_annotated_in_place(tmp_path: Path) -> None:
    path = saved(tmp_path, MODEL)
    annotate(path, "dp=2", path)
    before = path.read_bytes()
    with pytest.raises(StrategyError):
        annotate(path, "nonsense", path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    annotate(path, "tp=2", path)
    assert report(path, None, tmp_path / "out")["mesh"]["axes"] == {"tp": 2}


# -- other producers -----------------------------------------------------------------------------


def layouts(model: onnx.ModelProto) -> dict[str, list[str]]:
    found = plan(ir.from_proto(model))
    return {
        name: [s.describe(found.mesh) for s in (*p.inputs, *p.outputs) if s is not None]
        for name, p in found.nodes.items()
    }


def test_another_producer() -> None:
    rows, columns, both = "[2@2, ~]", "[~, 2@1]", "[2@2, 2@1]"
    assert layouts(foreign()) == {"mm": [rows, columns, both], "act": [both, both]}


def test_another_producer_says_the_result(tmp_path: Path) -> None:
    model = parsed(MODEL)
    model.configuration.add(name="any", num_devices=4)
    sharded(model, "mm", "x", [], {1: [4]})
    sharded(model, "mm", "w", [0, 1, 2, 3], {0: [4]})
    # A result with a spec is replicated: of the partial sum a ReduceScatter.
    sharded(model, "mm", "h", [0, 1, 2, 3], {1: [4]})
    model.graph.node[0].device_configurations[0].pipeline_stage = 0
    found = report(saved(tmp_path, model), None, tmp_path / "out")
    assert [c["op"] for c in found["collectives"]] == ["ReduceScatter"]
    assert found["nodes"][1]["inputs"][0]["sharding"] == "[~, 4@1]"
    # And the input arrives as its reader wants it.
    assert found["nodes"][0]["inputs"][0]["sharding"] == "[~, 4@1]"


def test_devices_choose_among_configurations(tmp_path: Path) -> None:
    model = foreign()
    model.configuration.add(name="two", num_devices=2)
    entry = model.graph.node[0].device_configurations.add(configuration_id="two")
    entry.sharding_spec.add(tensor_name="x", device=[0, 1]).sharded_dim.add(
        axis=0
    ).simple_sharding.add(num_shards=2)
    with pytest.raises(StrategyError, match=r"one configuration.*'any' \(4 devices\), 'two' \(2"):
        read_annotation(model, "m")
    path = saved(tmp_path, model)
    assert report(path, None, tmp_path / "out", devices=2)["devices"] == 2
    assert report(path, None, tmp_path / "out", devices=4)["devices"] == 4
    with pytest.raises(StrategyError, match="for the 3 requested devices"):
        read_annotation(model, "m", 3)


def test_a_strategy_that_is_given_wins(tmp_path: Path) -> None:
    path = saved(tmp_path, foreign())
    assert report(path, "dp=3", tmp_path / "out")["devices"] == 3

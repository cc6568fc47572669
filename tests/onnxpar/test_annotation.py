"""Strategies that stand in the model itself: written, read, and by other producers."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import transformer
import two_layer
from _exporter import save

from onnxpar.annotating import Annotated, annotate
from onnxpar.cli import main
from onnxpar.errors import ModelError, OnnxparError, StrategyError
from onnxpar.pipeline import plan, shard
from onnxpar.strategy import Strategy
from onnxpar.strategy.annotation import METADATA, read_annotation

ROOT = Path(__file__).parents[2]

MODEL = """<ir_version: 11, opset_import: ["": 20]>
g (float[batch, 4] x, float[4, 6] w) => (float[batch, 6] y) {
  [mm] h = MatMul(x, w)
  [act] y = Relu(h)
}"""
RESIDUAL = """<ir_version: 11, opset_import: ["": 20]>
g (float[n, 8] x) => (float[n, 8] y) <float[8, 8] a, float[8, 8] b> {
  [left] p = MatMul(x, a)
  [right] q = MatMul(x, b)
  [sum] s = Add(p, q)
  [twice] t = Add(s, s)
  [act] y = Relu(t)
}"""
MERGED = """<ir_version: 11, opset_import: ["": 20]>
g (float[6, 4, 5] x) => (float[24, 5] y) <int64[2] t = {24, 5}> {
  [merge] h = Reshape(x, t)
  [act] y = Relu(h)
}"""
BODY = """<ir_version: 11, opset_import: ["": 20]>
g (float[n, 8, 6] x, float[6, 3] w) => (float[n, 4, 3] y) <int64[1] t = {4}> {
  [crop] c = CenterCropPad<axes=[1]>(x, t)
  [mm] y = MatMul(c, w)
}"""
FUNCTION = """<ir_version: 11, opset_import: ["": 20, "own": 1]>
g (float[n, 8] x, float[8, 6] w) => (float[n, 6] y) {
  [call] h = own.layer(x, w)
  [act] y = Relu(h)
}
<domain: "own", opset_import: ["": 20]>
layer (a, b) => (c) {
  d = MatMul(a, b)
  c = Tanh(d)
}"""

Edit = Callable[[onnx.ModelProto], object]


def parsed(text: str) -> onnx.ModelProto:
    """Reads a model; values that nobody makes are weights, zeros."""
    model = onnx.parser.parse_model(text)
    for value in model.graph.value_info:
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        data = np.zeros(dims, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(data, value.name))
    return model


def saved(tmp_path: Path, model: str | onnx.ModelProto) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(parsed(model) if isinstance(model, str) else model, path)
    return path


def report(model: Path, strategy: object, out: Path, **given: Any) -> dict[str, Any]:
    return shard(model, strategy, out, force=True, **given).report  # type: ignore[arg-type]


def round_trip(tmp_path: Path, path: Path, strategy: Any, devices: int | None = None) -> Annotated:
    """Write, read, write; sharding by the annotation is sharding by the strategy."""
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    done = annotate(path, strategy, first, devices=devices)
    annotate(first, None, second)
    assert first.read_bytes() == second.read_bytes()
    want = report(path, strategy, tmp_path / "by_strategy", devices=devices)
    assert report(first, None, tmp_path / "by_annotation") == want
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
    if (name, strategy) in QUICK or os.environ.get("ONNXPAR_FULL")
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
    # [4, 1] of the matrix 2 x 4: each of the four pieces is held by two devices, 4 apart.
    assert [(d.axis, [p.num_shards for p in d.simple_sharding]) for d in spec.sharded_dim] == [
        (0, [4])
    ]
    groups = {g.key: list(g.value) for g in spec.index_to_device_group_map}
    assert [groups[d] for d in spec.device] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    # The sum over four devices is pending, which the format cannot say.
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
    said = [c for node in found.graph.node for c in node.device_configurations]
    parts = 4 if kind == "chunks" else 2
    assert {c.pipeline_stage for c in said if c.HasField("pipeline_stage")} == set(range(parts))
    for entry in said:
        held = range(entry.pipeline_stage % 2 * size, entry.pipeline_stage % 2 * size + size)
        for spec in entry.sharding_spec:
            groups = {g.key: list(g.value) for g in spec.index_to_device_group_map}
            assert sorted(d for key in spec.device for d in groups.get(key, [key])) == [*held]
    # What was written names the same cut and schedule, and computes the same.
    cut = [tmp_path / "by_strategy", tmp_path / "by_annotation"]
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in cut]
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
    assert {p.key for p in found.metadata_props} == {"note", METADATA}
    assert found.graph == model.graph


def test_training_takes_the_annotation(models: dict[str, Path], tmp_path: Path) -> None:
    given = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "sgd"]
    first = tmp_path / "first.onnx"
    annotate(models["mlp"], "dp=2,tp=2", first)
    assert main(["shard", str(first), "-o", str(tmp_path / "out"), *given]) == 0
    assert (tmp_path / "out" / "rank0003.training_model.onnx").is_file()
    # Ranks are given graphs of their own, which are not to be divided again.
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


def sharded(
    model: onnx.ModelProto,
    node: str,
    tensor: str,
    device: list[int],
    dims: dict[int, list[int]],
    groups: dict[int, list[int]] | None = None,
    configuration: str = "any",
) -> onnx.ShardingSpecProto:
    """Adds a spec as another tool would, without sizes."""
    owner = next(n for n in model.graph.node if n.name == node)
    if not owner.device_configurations:
        owner.device_configurations.add(configuration_id=configuration)
    spec = owner.device_configurations[0].sharding_spec.add(tensor_name=tensor, device=device)
    for key, value in (groups or {}).items():
        spec.index_to_device_group_map.add(key=key, value=value)
    for axis, counts in dims.items():
        dim = spec.sharded_dim.add(axis=axis)
        for count in counts:
            dim.simple_sharding.add(num_shards=count)
    return spec


def foreign() -> onnx.ModelProto:
    """Rows of x over devices 0 and 1, 2 and 3; columns of w over even and odd devices."""
    model = parsed(MODEL)
    model.configuration.add(name="any", num_devices=4, device=["a", "b", "c", "d"])
    # The keys are device numbers here, which the map makes groups of; the other's are not.
    sharded(model, "mm", "x", [0, 2], {-2: [2]}, {0: [0, 1], 2: [2, 3]})
    sharded(model, "mm", "w", [-5, -7], {1: [2]}, {-7: [3, 1], -5: [0, 2]})
    return model


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
    # A result with a spec is whole: of the pending sum a ReduceScatter.
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
    with pytest.raises(StrategyError, match="for the 3 devices asked for"):
        read_annotation(model, "m", 3)


def test_a_strategy_that_is_given_wins(tmp_path: Path) -> None:
    path = saved(tmp_path, foreign())
    assert report(path, "dp=3", tmp_path / "out")["devices"] == 3


# -- mistakes ------------------------------------------------------------------------------------


def x_of(model: onnx.ModelProto) -> onnx.ShardingSpecProto:
    return model.graph.node[0].device_configurations[0].sharding_spec[0]


def refit(
    dims: dict[int, list[int]],
    device: list[int],
    groups: dict[int, list[int]] | None = None,
    also: dict[str, dict[int, list[int]]] | None = None,
) -> Edit:
    """Annotates x so and nothing else, or other tensors on the same devices too."""

    def edit(model: onnx.ModelProto) -> None:
        del model.graph.node[0].device_configurations[0].sharding_spec[:]
        for name, split in {"x": dims, **(also or {})}.items():
            sharded(model, "mm", name, device, split, groups)

    return edit


def metadata(text: str) -> Edit:
    return lambda m: m.metadata_props.add(key=METADATA, value=text)


def stages(model: onnx.ModelProto, first: int | None, second: int | None, devices: int = 4) -> None:
    """Puts the two nodes into pipeline stages; a first one not in order has no tensors said."""
    model.configuration[0].num_devices = devices
    del model.configuration[0].device[:]
    model.graph.node[1].device_configurations.add(configuration_id="any")
    for node, stage in zip(model.graph.node, (first, second), strict=True):
        if stage is not None:
            node.device_configurations[0].pipeline_stage = stage
    if first == 1 and second == 0:
        del model.graph.node[0].device_configurations[0].sharding_spec[:]


def later(stage: int) -> onnx.NodeProto:
    """A further node, of a stage."""
    node = onnx.helper.make_node("Relu", ["h"], ["z"], name="more")
    node.device_configurations.add(configuration_id="any", pipeline_stage=stage)
    return node


MISTAKES: list[tuple[str, Edit, str]] = [
    (
        "unknown configuration",
        lambda m: setattr(m.graph.node[0].device_configurations[0], "configuration_id", "an"),
        r"node 'mm' \(MatMul\): expected a configuration of the model, one of \['any'\], got 'an'",
    ),
    ("no configuration", lambda m: m.ClearField("configuration"), r"one of \[\], got 'any'"),
    ("two alike", lambda m: m.configuration.add(name="any", num_devices=4), "different names"),
    (
        "no devices",
        lambda m: setattr(m.configuration[0], "num_devices", 0),
        "configuration 'any': expected from 1 to 65536 devices, got 0",
    ),
    ("names", lambda m: m.configuration[0].device.append("e"), "names of 4 devices.*got 5"),
    (
        "twice",
        lambda m: m.graph.node[0].device_configurations.add(configuration_id="any"),
        "node 'mm'.*'any' once, got it 2 times",
    ),
    (
        "unknown tensor",
        lambda m: setattr(x_of(m), "tensor_name", "y"),
        r"node 'mm' \(MatMul\): .*one of its tensors \['x', 'w', 'h'\], got 'y'",
    ),
    (
        "two specs",
        lambda m: sharded(m, "mm", "x", [0, 1, 2, 3], {0: [4]}),
        "node 'mm'.*tensor 'x': expected one spec, got two",
    ),
    (
        "axis",
        refit({2: [4]}, [0, 1, 2, 3]),
        r"node 'mm'.*tensor 'x': expected an axis from -2 to 1 for the shape \(batch, 4\), got 2",
    ),
    ("axis below", refit({-3: [4]}, [0, 1, 2, 3]), "axis from -2 to 1.*got -3"),
    ("axis twice", refit({1: [2], -1: [2]}, [0, 1, 2, 3]), "axis -1: expected it once"),
    ("num_shards 0", refit({0: [0]}, []), "axis 0: expected num_shards of at least 1, got 0"),
    ("num_shards -2", refit({0: [-2]}, []), "num_shards of at least 1, got -2"),
    ("fewer", refit({0: [4]}, [0, 1, 2]), r"each of its 4 shards .*got 3"),
    ("no devices listed", refit({0: [2]}, []), r"each of its 2 shards .*got 0"),
    ("out of range", refit({0: [4]}, [0, 1, 2, 4]), "devices from 0 to 3, got 4"),
    ("below", refit({0: [4]}, [0, 1, 2, -1]), "devices from 0 to 3, got -1"),
    (
        "group out of range",
        refit({0: [2]}, [-1, -2], groups={-1: [0, 1], -2: [2, 9]}),
        "devices from 0 to 3, got 9",
    ),
    (
        "unequal groups",
        refit({0: [2]}, [-1, -2], groups={-1: [0, 1, 2], -2: [3]}),
        r"device groups of one size, got sizes \[1, 3\]",
    ),
    ("device twice", refit({0: [4]}, [0, 1, 1, 3]), "each device once, got device 1 twice"),
    (
        "not all",
        refit({0: [2]}, [0, 1]),
        "all 4 devices of the configuration.*got 2; device 2 holds nothing",
    ),
    (
        "no mesh",
        refit({0: [4]}, [0, 3, 1, 2]),
        r"tensor 'x': expected its shards on devices in the order of a mesh .*got 0, 3, 1, 2",
    ),
    (
        "groups of no mesh",
        refit({0: [2]}, [-1, -2], groups={-1: [0, 3], -2: [1, 2]}),
        r"in the order of a mesh .*got \[0, 3\], \[1, 2\]",
    ),
    ("reversed", refit({0: [4]}, [3, 2, 1, 0]), "in the order of a mesh"),
    ("parts without sizes", refit({0: [2, 2]}, [0, 1, 2, 3]), "expected the size of each part"),
    ("stage below", lambda m: stages(m, -1, None), "'mm'.*pipeline stage from 0 to .*got -1"),
    ("no stage 0", lambda m: stages(m, 1, None), "'mm'.*each pipeline stage.*stage 0 has none"),
    ("a gap", lambda m: stages(m, 0, 2), "'act'.*up to its own, 2; stage 1 has none"),
    ("too many", lambda m: stages(m, 0, 1, devices=5), "stages that divides the 5 devices.*got 2"),
    ("backwards", lambda m: stages(m, 1, 0), "'act' is assigned to part 0.*'mm' of part 1"),
    (
        "devices of another stage",
        lambda m: stages(m, 0, 1),
        "'mm'.*of pipeline stage 0: tensor 'x': expected devices from 0 to 1, got 2",
    ),
    (
        "no stage of a node",
        lambda m: (stages(m, None, 1), m.graph.node.append(later(0))),
        "'mm'.*expected its pipeline stage, as other nodes have one",
    ),
    (
        "chunks",
        lambda m: (
            stages(m, 0, 1),
            metadata('{"pipeline": {"schedule": "interleaved", "chunks": 3}}')(m),
        ),
        "chunks that divide the 2 pipeline stages",
    ),
    (
        "operands that disagree",
        refit({1: [4]}, [0, 1, 2, 3], also={"w": {1: [4]}}),
        "tensor 'w': expected dim .* split over 4@1 as tensor 'x' is, got nothing",
    ),
    ("metadata", metadata("{"), f"metadata '{METADATA}': Invalid JSON"),
    ("metadata key", metadata('{"axis": {}}'), "axis: Extra inputs"),
    ("metadata axes", metadata('{"axes": {"dp": 8}}'), r"axes that multiply to the 4.*got \[8\]"),
    ("metadata symbol", metadata('{"symbols": {"batch": {"min": 0}}}'), "min must be at least 1"),
    ("metadata input", metadata('{"inputs": {"z": [[], []]}}'), "input 'z'.*there are 'x', 'w'"),
    ("metadata rank", metadata('{"inputs": {"x": [[]]}}'), "input 'x': expected 2 dims, got 1"),
    ("metadata split", metadata('{"inputs": {"x": [[["batch", [[3, 1]]]], []]}}'), "divide the 4"),
]


@pytest.mark.parametrize(("edit", "said"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_mistakes(edit: Edit, said: str, tmp_path: Path) -> None:
    model = foreign()
    edit(model)
    path = saved(tmp_path, model)
    with pytest.raises(StrategyError, match=said) as raised:
        shard(path, None, tmp_path / "out")
    assert "model.onnx" in str(raised.value)
    assert not (tmp_path / "out").exists()
    # Another strategy may still be given.
    assert plan(path, "dp=2").mesh.size == 2


@pytest.mark.parametrize("number", [5, 6, 7, 8, 13, 18, 21, 26, 31])
def test_mistakes_of_a_model_in_memory(number: int) -> None:
    """Those that onnx_ir keeps when it reads the file."""
    _, edit, said = MISTAKES[number]
    model = foreign()
    edit(model)
    with pytest.raises(StrategyError, match=said):
        plan(ir.from_proto(model))


def test_annotations_in_bodies_are_refused() -> None:
    model = parsed(FUNCTION)
    model.configuration.add(name="any", num_devices=2)
    model.functions[0].node[0].device_configurations.add(configuration_id="any")
    with pytest.raises(StrategyError, match=r"\(MatMul\).*main graph"):
        read_annotation(model, "m")
    with pytest.raises(StrategyError, match=r"\(MatMul\).*main graph"):
        read_annotation(ir.from_proto(model), "m")


def test_neither_a_strategy_nor_an_annotation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, MODEL)
    assert main(["shard", str(path), "-o", str(tmp_path / "out")]) == 2
    assert "expected --strategy, or a model with annotations" in capsys.readouterr().err
    out = tmp_path / "annotated.onnx"
    assert main(["annotate", str(path), "--strategy", "dp=2", "-o", str(out)]) == 0
    assert "annotated     2 of 2 nodes" in capsys.readouterr().out
    assert main(["shard", str(out), "-o", str(tmp_path / "out")]) == 0
    assert main(["shard", str(out), "--devices", "4", "-o", str(tmp_path / "four")]) == 2
    assert "for the 4 devices asked for" in capsys.readouterr().err


# -- malformed -----------------------------------------------------------------------------------


def damaged(model: onnx.ModelProto, draw: random.Random) -> None:
    """Changes a few fields of the annotations at random."""
    numbers = [-(1 << 40), -3, -2, -1, 0, 1, 2, 3, 4, 6, 1 << 20, 1 << 40]
    for _ in range(draw.randint(1, 3)):
        node = draw.choice(list(model.graph.node))
        specs = [s for c in node.device_configurations for s in c.sharding_spec]
        kind = draw.randrange(8)
        if kind == 0:
            model.configuration[0].num_devices = draw.choice([-1, 0, 1, 2, 3, 8, 1 << 30])
        elif kind == 1:
            text = model.metadata_props[-1].value if model.metadata_props else "{}"
            at = draw.randrange(len(text))
            del model.metadata_props[:]
            model.metadata_props.add(
                key=METADATA, value=text[:at] + draw.choice("0{,x]") + text[at:]
            )
        elif specs:
            spec = draw.choice(specs)
            if kind == 2 and spec.device:
                spec.device[draw.randrange(len(spec.device))] = draw.choice(numbers)
            elif kind == 3:
                spec.sharded_dim.add(axis=draw.choice(numbers[1:10]))
            elif kind == 4:
                for dim in spec.sharded_dim:
                    dim.simple_sharding.add(
                        num_shards=draw.choice(numbers),
                        dim_param=draw.choice(["", "n", "2*(", "0"]),
                    )
            elif kind == 5:
                draw.shuffle(spec.device)
            elif kind == 6:
                spec.index_to_device_group_map.add(
                    key=draw.choice(numbers), value=draw.sample(numbers, 2)
                )
            else:
                spec.tensor_name = draw.choice(["", "x", "h", "none"])


@pytest.mark.parametrize("seed", range(20))
def test_malformed_annotations_are_an_error_or_are_carried_out(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    path = saved(tmp_path, RESIDUAL)
    annotate(path, draw.choice(["dp=2,tp=2", "tp=4", "dp=4"]), path)
    for _ in range(5):
        model = onnx.load(path)
        damaged(model, draw)
        changed = tmp_path / "changed.onnx"
        onnx.save(model, changed)
        try:
            plan(changed)
        except OnnxparError as error:
            assert 0 < len(str(error)) < 1000

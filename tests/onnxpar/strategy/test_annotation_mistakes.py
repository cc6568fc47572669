"""Annotations that are wrong: refused by name, before anything is written."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from onnxpar.api.annotate import annotate
from onnxpar.api.shard_model import plan, shard_model
from onnxpar.cli import main
from onnxpar.core.errors import OnnxparError, StrategyError
from onnxpar.graph.metadata_keys import ANNOTATION
from onnxpar.strategy.annotation_reader import read_annotation
from tests.onnxpar.strategy.annotated import (
    FUNCTION,
    MODEL,
    RESIDUAL,
    foreign,
    parsed,
    saved,
    sharded,
)

Edit = Callable[[onnx.ModelProto], object]


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
    return lambda m: m.metadata_props.add(key=ANNOTATION, value=text)


def stages(model: onnx.ModelProto, first: int | None, second: int | None, devices: int = 4) -> None:
    """Puts the two nodes into stages; a first one out of order has no annotated tensors."""
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
    ("two alike", lambda m: m.configuration.add(name="any", num_devices=4), "distinct names"),
    (
        "no devices",
        lambda m: setattr(m.configuration[0], "num_devices", 0),
        "configuration 'any': expected from 1 to 65536 devices, got 0",
    ),
    ("names", lambda m: m.configuration[0].device.append("e"), "4 device names or none, got 5"),
    (
        "twice",
        lambda m: m.graph.node[0].device_configurations.add(configuration_id="any"),
        "node 'mm'.*'any' once, got it 2 times",
    ),
    (
        "unknown tensor",
        lambda m: setattr(x_of(m), "tensor_name", "y"),
        r"node 'mm' \(MatMul\): .*a tensor of the node, one of \['x', 'w', 'h'\], got 'y'",
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
        "all 4 devices of the configuration.*got 2; device 2 holds no shard",
    ),
    (
        "no mesh",
        refit({0: [4]}, [0, 3, 1, 2]),
        r"tensor 'x': expected shards in mesh order .*got 0, 3, 1, 2",
    ),
    (
        "groups of no mesh",
        refit({0: [2]}, [-1, -2], groups={-1: [0, 3], -2: [1, 2]}),
        r"in mesh order .*got \[0, 3\], \[1, 2\]",
    ),
    ("reversed", refit({0: [4]}, [3, 2, 1, 0]), "in mesh order"),
    (
        "parts without sizes",
        refit({0: [2, 2]}, [0, 1, 2, 3]),
        "expected the size of each component",
    ),
    ("stage below", lambda m: stages(m, -1, None), "'mm'.*pipeline stage from 0 to .*got -1"),
    ("no stage 0", lambda m: stages(m, 1, None), "'mm'.*every earlier stage, got none in stage 0"),
    ("a gap", lambda m: stages(m, 0, 2), "'act'.* is in pipeline stage 2: .*, got none in stage 1"),
    ("too many", lambda m: stages(m, 0, 1, devices=5), "stages that divides the 5 devices.*got 2"),
    (
        "backwards",
        lambda m: stages(m, 1, 0),
        "'act' is assigned to virtual stage 0.*'mm' of .* 1",
    ),
    (
        "devices of another stage",
        lambda m: stages(m, 0, 1),
        "'mm'.*of pipeline stage 0: tensor 'x': expected devices from 0 to 1, got 2",
    ),
    (
        "no stage of a node",
        lambda m: (stages(m, None, 1), m.graph.node.append(later(0))),
        "'mm'.*expected a pipeline stage, since other nodes have one",
    ),
    (
        "chunks",
        lambda m: (
            stages(m, 0, 1),
            metadata('{"pipeline": {"schedule": "interleaved", "chunks": 3}}')(m),
        ),
        "a number of chunks that divides the 2 pipeline stages",
    ),
    (
        "operands that disagree",
        refit({1: [4]}, [0, 1, 2, 3], also={"w": {1: [4]}}),
        "tensor 'w': expected dim .* sharded over 4@1 as tensor 'x' is, got nothing",
    ),
    ("metadata", metadata("{"), f"metadata '{ANNOTATION}': Invalid JSON"),
    ("metadata key", metadata('{"axis": {}}'), "'axis': unknown key"),
    ("metadata axes", metadata('{"axes": {"dp": 8}}'), r"axes whose product is the 4.*got \[8\]"),
    (
        "metadata symbol",
        metadata('{"symbols": {"batch": {"min": -1}}}'),
        "min: expected at least 0",
    ),
    ("metadata input", metadata('{"inputs": {"z": [[], []]}}'), "input 'z'.*there are 'x', 'w'"),
    ("metadata rank", metadata('{"inputs": {"x": [[]]}}'), "input 'x': expected 2 dims, got 1"),
    ("metadata split", metadata('{"inputs": {"x": [[["batch", [[3, 1]]]], []]}}'), "divide the 4"),
]


@pytest.mark.parametrize(
    ("edit", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistakes(edit: Edit, message: str, tmp_path: Path) -> None:
    model = foreign()
    edit(model)
    path = saved(tmp_path, model)
    with pytest.raises(StrategyError, match=message) as raised:
        shard_model(path, None, tmp_path / "out")
    assert "model.onnx" in str(raised.value)
    assert not (tmp_path / "out").exists()
    # Another strategy may still be given.
    assert plan(path, "dp=2").mesh.size == 2


@pytest.mark.parametrize("number", [5, 6, 7, 8, 13, 18, 21, 26, 31])
def test_mistakes_of_a_model_in_memory(number: int) -> None:
    """Those that onnx_ir keeps when it reads the file."""
    _, edit, message = MISTAKES[number]
    model = foreign()
    edit(model)
    with pytest.raises(StrategyError, match=message):
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
    assert main(["annotate", str(path), "--strategy", "dp=2", "-o", str(out), "--json"]) == 0
    done = {"out": str(out), "devices": 2, "nodes": 2, "annotated": 2, "differing": []}
    assert json.loads(capsys.readouterr().out) == done
    assert main(["shard", str(out), "-o", str(tmp_path / "out")]) == 0
    assert main(["shard", str(out), "--devices", "4", "-o", str(tmp_path / "four")]) == 2
    assert "for the 4 requested devices" in capsys.readouterr().err


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
                key=ANNOTATION, value=text[:at] + draw.choice("0{,x]") + text[at:]
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

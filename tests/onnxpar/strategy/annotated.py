"""Models for tests of annotations, and annotations as another tool would make them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

from onnxpar.api.shard_model import shard_model

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
    return shard_model(model, strategy, out, force=True, **given).report  # type: ignore[arg-type]


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

"""The example models, sharded and run with every rank in this process, equal the undivided ones."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mlp
import onnx.parser
import onnx_ir as ir
import pytest
import transformer
import two_layer

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.compare import verify
from onnxpar_runtime.verify.findings import Case
from tests.tiers import covering

LAYERS = 4
MODELS: dict[str, Callable[[], ir.Model]] = {
    "mlp": mlp.build,
    "two_layer": two_layer.build,
    "transformer": lambda: transformer.build(layers=2, d_model=32),
    "merged_heads": lambda: transformer.build(layers=1, d_model=32, merged_heads=True),
    "loss": lambda: transformer.build(layers=1, d_model=30, heads=6, vocab=37, loss=True),
}


def shard(
    tmp_path: Path, model: ir.Model, strategy: str, cases: Sequence[Mapping[str, int]]
) -> tuple[Manifest, list[Case]]:
    """Shards a model and compares it with the undivided one at each case."""
    path, directory = tmp_path / "model.onnx", tmp_path / "sharded"
    ir.save(model, path)
    shard_model(path, strategy, directory)
    return Manifest.load(directory), verify(directory, path, cases)


@pytest.mark.parametrize(("name", "strategy"), covering(MODELS, ["dp=4", "dp=2,tp=2", "tp=3"]))
def test_batches_from_1_to_17(tmp_path: Path, name: str, strategy: str) -> None:
    """No constraint on the batch, and no number but 1 divides most of them."""
    model = MODELS[name]()
    has_seq = any("seq" in str(value.shape) for value in model.graph.inputs)
    # Lengths 1 to 13, so that some are uneven wherever they might be split.
    cases = [{"batch": b, "seq": 1 + 5 * b % 13} if has_seq else {"batch": b} for b in range(1, 18)]
    _, results = shard(tmp_path, model, strategy, cases)
    assert [p for case in results for p in case.problems] == []
    assert [case.symbols["batch"] for case in results] == list(range(1, 18))


def test_transformer_over_data_and_tensor_axes(tmp_path: Path) -> None:
    cases = [
        {"batch": 1, "seq": 16},
        {"batch": 3, "seq": 16},
        {"batch": 7, "seq": 16},
        {"batch": 4, "seq": 1},
        {"batch": 8, "seq": 33},
    ]
    model = transformer.build(layers=LAYERS, d_model=64)
    manifest, results = shard(tmp_path, model, "dp=2,tp=4", cases)
    for case in results:
        assert case.ok, case.problems
        assert case.max_rel < 1e-5
        # Groups of four: 2·n·3/4 of a multiple of 16 bytes is whole, so nothing is rounded.
        assert case.bytes_counted == case.bytes_expected != 0
    collectives = manifest.program("model").collectives
    # The mesh is dp=2, tp=2·2: nothing travels along the data axis, atom 0.
    assert {c.atoms for c in collectives} == {(1, 2)}
    assert {c.op for c in collectives} == {"AllReduce"}
    by_layer = Counter(c.value.split("/")[1] for c in collectives if c.value.startswith("/layer"))
    assert by_layer == {f"layer{i}": 2 for i in range(LAYERS)}


def test_scalars_control_flow_and_sizes_that_depend_on_data(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[n, 6] x, bool p, float s) => (float[n, 6] y, float z, int64[2, m] i) {
      a = Relu(x)
      b = If (p) <
        then_branch = t () => (float[n, 6] r) { r = Add(a, a) },
        else_branch = e () => (float[n, 6] q) { q = Neg(a) }
      >
      c = Mul(b, a)
      y = Mul(c, s)
      z = Add(s, s)
      i = NonZero(y)
    }"""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    _, results = shard(tmp_path, model, "dp=3", [{"n": n} for n in (1, 3, 7)])
    for case in results:
        assert case.ok, case.problems


@pytest.mark.parametrize("strategy", ["tp=2", "dp=2"])
def test_scales_of_an_unsharded_resize_can_be_read_at_load(tmp_path: Path, strategy: str) -> None:
    """onnxruntime infers the shape from them, which it refuses to do from a weight file."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
        g (float[batch, 3, 5, 7] x) => (float[batch, 3, 10, 14] y)
        <float[4] s = {1, 1, 2, 2}, float[8] r = {0, 0, 0.1, 0.1, 1, 1, 0.9, 0.9}> {
            a = Relu(x)
            b = Resize<coordinate_transformation_mode = "tf_crop_and_resize", mode = "linear">(
                a, r, s)
            c = Resize<mode = "nearest">(a, , s)
            y = Add(b, c)
        }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    _, results = shard(tmp_path, model, strategy, [{"batch": 5}])
    assert [p for case in results for p in case.problems] == []

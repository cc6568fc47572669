"""A model whose nodes are differentiated by their bodies trains as on one device."""

import json
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.cli import main
from tests.training_cases import shard

TEXT = """<ir_version: 10, opset_import: ["": 24, "l": 1]>
g (float[batch, seq, 16] x, float[batch, seq, 16] wanted) => (float loss)
<int64[1] t = {12}, int64 six = {6}, int64 one = {1}> {
  [q] q = MatMul(x, wq) [k] k = MatMul(x, wk) [v] v = MatMul(x, wv)
  [attn] a = Attention<q_num_heads=4, kv_num_heads=4, is_causal=1>(q, k, v)
  [swish] b = Swish(a)
  [mean] c = Mean(b, x, bias)
  [shrink] d = l.Cut(c)
  [crop] e = CenterCropPad<axes=[2]>(d, t)
  [list] s = SplitToSequence<axis=2>(e, six)
  [second] f = SequenceAt(s, one)
  [other] u = SplitToSequence<axis=2>(wanted, six)
  [first] w = SequenceAt(u, one)
  r = Sub(f, w) rr = Mul(r, r) loss = ReduceMean<keepdims=0>(rr)
}
<domain: "l", opset_import: ["": 22]> Cut (x) => (y) { [inner] y = Shrink<lambd=0.1>(x) }"""
ENTRIES = """mesh: {dp: 2, tp: 2}
nodes:
  attn: {in: [[dp, ~, tp], [dp, ~, tp], [dp, ~, tp]]}
  swish: {in: [[dp, ~, tp]]}
"""


def model() -> ir.Model:
    proto = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    for name, shape in {"wq": (16, 16), "wk": (16, 16), "wv": (16, 16), "bias": (16,)}.items():
        content = (rng.standard_normal(shape) / 4).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(content, name))
    return ir.from_proto(proto)


@pytest.mark.parametrize(
    "strategy",
    ["dp=2,tp=2", pytest.param("tp=2", marks=pytest.mark.full), ENTRIES],
    ids=["both", "tp", "entries"],
)
def test_losses_gradients_and_states(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: str | Path = strategy
    if "\n" in strategy:
        given = tmp_path / "strategy.yaml"
        given.write_text(strategy)
    out = shard(tmp_path / "ranks", model(), given, loss="output:loss", optimizer="adamw")
    capsys.readouterr()
    # Uneven over two data ranks; `verify` compares 3 steps and evaluation with one device.
    case = ["--symbol", "batch=3", "--symbol", "seq=5"]
    source = str(out.with_suffix(".onnx"))
    code = main(["verify", str(out), "--model", source, *case, "--steps", "3", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0 and printed["ok"], printed
    assert main(["inspect", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert not shown["replicated"]
    split = {n["name"]: n["inputs"][0]["strategy"] for n in shown["nodes"] if n["inputs"]}
    if strategy == ENTRIES:
        assert split["attn/Reshape"] == [2, 1, 2] and split["swish/Sigmoid"] == [2, 1, 2]

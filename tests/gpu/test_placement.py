"""Where the CUDA provider puts the nodes of emitted graphs: all on the device but sizes."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import mlp
import onnx
import onnx_ir as ir
import pytest
import transformer

from tests.training_cases import shard

PLACEMENT = Path(__file__).parent / "standin" / "placement.py"
HOST = ("layer_ann", "onnxpar.host")
DROPOUT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, 6] x) => (float[batch, 4] y)
  <float[6, 4] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4},
   float ratio = {0.5}, bool training = {1}> {
  [product] a = MatMul(x, w)
  [drop] y = Dropout(a, ratio, training)
}"""
# Of opset 24 on purpose: Swish needs it, so that the rest cannot be written in opset 21.
NEWER = """<ir_version: 10, opset_import: ["" : 24]>
g (float[batch, 4, 8, 8] x) => (float[batch, 4] y)
  <float[4, 4, 3, 3] k, float[4, 4] w> {
  [convolution] a = Conv<pads = [1, 1, 1, 1]>(x, k)
  [unit] b = Elu<alpha = 0.5>(a)
  [pool] c = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(b)
  [scaled] d = Selu(c)
  [cut] e = ThresholdedRelu<alpha = 0.1>(d)
  [switch] f = SWITCH(e)
  [drop] h = Dropout(f)
  [mean] i = ReduceMean<keepdims = 0>(h, axes)
  [product] y = MatMul(i, w)
}"""


def newer(switch: str) -> ir.Model:
    text = NEWER.replace("SWITCH", switch).replace(
        "k, float[4, 4] w>",
        f"k = {{{', '.join(['0.1'] * 144)}}}, float[4, 4] w = "
        f"{{{', '.join(['0.2'] * 16)}}}, int64[2] axes = {{2, 3}}>",
    )
    return ir.from_onnx_text(text)


def small(name: str) -> ir.Model:
    if name == "mlp":
        return mlp.build(image=4, hidden=(12, 8))
    if name == "lowered":
        return newer("Tanh")
    if name == "newer":
        return newer("Swish")
    if name == "dropout":
        return ir.from_onnx_text(DROPOUT)
    return transformer.build(layers=2, d_model=16, heads=2, vocab=20, max_positions=8)


def marked(path: Path) -> tuple[set[str], set[str]]:
    """Names of the nodes of a graph that are marked for the host, and of their results."""
    nodes = [
        node
        for node in onnx.load(path, load_external_data=False).graph.node
        if any((p.key, p.value) == HOST for p in node.metadata_props)
    ]
    return {node.name for node in nodes}, {name for node in nodes for name in node.output}


@pytest.mark.parametrize(
    ("name", "compute", "devices", "strategy"),
    [
        ("mlp", None, 1, "dp"),
        ("dropout", None, 4, "dp=2,tp=2"),
        ("lowered", None, 1, "dp"),
        ("newer", None, 2, "dp=2"),
        ("newer", "bfloat16", 1, "dp"),
        ("lowered", "float16", 1, "dp"),
        ("mlp", "bfloat16", 4, "dp=2,tp=2"),
        pytest.param("transformer", None, 4, "dp=2,tp=2", marks=pytest.mark.full),
        pytest.param("transformer", "float16", 1, "dp", marks=pytest.mark.full),
        ("transformer", "bfloat16", 4, "dp=2,tp=2"),
    ],
)
def test_nothing_falls_back_and_nothing_is_copied_to_the_host(
    name: str,
    compute: str | None,
    devices: int,
    strategy: str,
    standin_cuda: Mapping[str, str],
    tmp_path: Path,
) -> None:
    out = shard(
        tmp_path / "a",
        small(name),
        strategy,
        devices=devices,
        optimizer="adamw",
        compute=compute,
    )
    paths = sorted(out.glob("rank0000.*.onnx"))
    done = subprocess.run(
        [sys.executable, str(PLACEMENT), "--ranks", str(devices), *map(str, paths)],
        env=dict(standin_cuda),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(paths) > 2
    for path in paths:
        nodes, values = marked(path)
        placed = found[str(path)]
        assert placed["cuda"]
        assert {node for _, node in placed["cpu"]} <= nodes, path.name
        for operator, value, *_ in placed["copies"]:
            # What both need: sizes, and the numbers that they are computed from.
            assert operator == "MemcpyFromHost", (path.name, value)
            sizes = ("onnxpar.symbol.", "onnxpar.coord.")
            assert value in values or value.startswith(sizes), (path.name, value)

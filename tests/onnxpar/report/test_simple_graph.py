"""A rank's graph reduced for people: complete, in order, and without what only machines need."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import onnx
import pytest
import transformer

from onnxpar.cli.view import simple_file
from tests.training_cases import shard


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = transformer.build(layers=3, d_model=16, heads=2, vocab=32)
    return shard(tmp_path_factory.mktemp("gpt") / "out", model, "dp=2,tp=2")


def test_a_training_graph(sharded: Path, tmp_path: Path) -> None:
    path = sharded / "rank0003.training_model.onnx"
    full = onnx.load(path, load_external_data=False)
    shown = simple_file(sharded, path, None, tmp_path)
    assert shown.name == "rank0003.training_model.simple.onnx"
    simple = onnx.load(shown, load_external_data=False)
    nodes = simple.graph.node
    # About half of the graph computes sizes and padding, or divides a node of the model.
    assert len(nodes) < len(full.graph.node) * 0.55
    # Everything is read after it is made, and nothing is made twice.
    known = {v.name for v in simple.graph.input} | {t.name for t in simple.graph.initializer}
    for node in nodes:
        assert set(node.input) <= known
        assert not set(node.output) & known
        known |= set(node.output)
    # The outputs are all there, but for sums over micro-batches.
    made = {name for node in nodes for name in node.output}
    outputs = {v.name for v in full.graph.output if not v.name.startswith("onnxpar.micro.")}
    assert {name for name in outputs if name.startswith(("onnxpar.grad.", "onnxpar.loss"))} <= made
    # Each layer has its products and norms once, and each collective says over what it is.
    kinds = Counter(node.op_type for node in nodes)
    attention = "ScaledDotProductAttention"
    assert kinds[attention] == kinds[f"{attention}Grad"] == kinds["Gelu"] == 3
    assert kinds["LayerNormalization"] == 7
    found = {kind for kind in kinds if kind.startswith("AllReduce")}
    assert {"AllReduce over tp", "AllReduce over dp (start)"} <= found
    assert "AllReduce" not in found
    assert not any(name.startswith(("onnxpar.symbol", "onnxpar.coord")) for name in known)


def test_bodies_have_what_was_folded(sharded: Path, tmp_path: Path) -> None:
    path = sharded / "rank0000.training_model.onnx"
    simple = onnx.load(simple_file(sharded, path, "training_model", tmp_path))
    bodies = {(f.domain, f.name): f for f in simple.functions}
    calls = [n for n in simple.graph.node if (n.domain, n.op_type) in bodies and n.domain]
    assert {(n.domain, n.op_type) for n in calls} <= bodies.keys() and len(calls) > 10
    (gather,) = [node for node in calls if node.name == "/wte/Gather"]
    body = bodies[gather.domain, gather.op_type]
    assert gather.op_type == "Gather" and len(body.node) > 5
    assert list(gather.input) == list(body.input) and list(gather.output) == list(body.output)
    assert set(gather.input) == {"input_ids", "wte.weight"}


@pytest.mark.full
@pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)",
)
def test_netron_draws_it(sharded: Path, tmp_path: Path) -> None:
    pytest.importorskip("selenium", reason="selenium is not installed")
    script = Path(__file__).parents[3] / "tools" / "netron_screenshot.py"
    arguments = [str(sharded), "-o", str(tmp_path / "a.png"), "--simple", "--select", "AllReduce"]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    arguments[-1] = "Nobody"
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "no node is called 'Nobody'" in done.stderr

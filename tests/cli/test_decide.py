"""One decision: `shard` of a strategy that searches is `shard` of the file that `plan` writes."""

import json
from pathlib import Path
from typing import Any

import hybrid
import mlp
import onnx_ir as ir
import pytest
import three_blocks
import transformer
import two_layer
import yaml
from _exporter import save

from onnxpar.cli import main
from onnxpar.pipeline import plan

GPT = transformer.Config(layers=1, d_model=64, heads=4, vocab=256, max_positions=64)
MODELS = {
    "mlp": lambda: mlp.build(hidden=(64, 64)),
    "two_layer": two_layer.build,
    "three_blocks": three_blocks.build,
    "hybrid": lambda: hybrid.build(hidden=64),
    "gpt": lambda: transformer.build(GPT),
}
LOSSES = {"gpt": "softmax_cross_entropy", "mlp": "softmax_cross_entropy"}


def seen(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `inspect --json` says."""
    capsys.readouterr()
    assert main(["inspect", str(directory), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def alike(
    folder: Path, capsys: pytest.CaptureFixture[str], loss: str | None, *, text: str = ""
) -> dict[str, Any]:
    """Cuts by a search and by the file that `plan` writes; returns the content of the file."""
    model, found = str(folder / "m.onnx"), folder / "found.yaml"
    wanted = ["--strategy", "auto", "--devices", "4"]
    if text:
        (folder / "wanted.yaml").write_text(text)
        wanted = ["--strategy", str(folder / "wanted.yaml")]
    plain = [] if loss is None else ["--loss", loss, "--optimizer", "adamw"]
    train = [] if loss is None else ["--train", *plain]
    assert main(["plan", model, *wanted, *plain, "-o", str(found)]) == 0
    first, second = folder / "by_file", folder / "by_search"
    assert main(["shard", model, "--strategy", str(found), "-o", str(first), *train]) == 0
    assert main(["shard", model, *wanted, "-o", str(second), *train]) == 0
    assert seen(first, capsys) == seen(second, capsys)
    # And the strategies as resolved, but for what a search was told of the machine.
    assert (first / "strategy.yaml").read_text() == (second / "strategy.yaml").read_text()
    return dict(yaml.safe_load(found.read_text()))


@pytest.mark.parametrize(
    ("name", "train"),
    # The other test trains the GPT.
    [(name, train) for name in MODELS for train in (False, True) if name != "gpt" or not train],
)
def test_every_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, train: bool
) -> None:
    ir.save(MODELS[name](), tmp_path / "m.onnx")
    alike(tmp_path, capsys, LOSSES.get(name, "mse") if train else None)


@pytest.mark.parametrize(
    "text",
    [
        "devices: 6\nsearch: {level: 1}",
        "devices: 4\nsearch: {level: 0}\noptimizer_parallel: {level: 1, threshold: 0}",
        "devices: 4\nsearch: {}\npipeline: {stages: 2}",
        "devices: 4\nsearch: {}\npipeline: {stages: 4, micro_batches: 3, schedule: gpipe}",
        "devices: 4\nsearch: {}\npipeline: {stages: 2, chunks: 2, schedule: interleaved}\n"
        "recompute: ['/layer0/*']",
        "mesh: {x: 2}\nsearch: {memory: 24MiB, sizes: {batch: 64, seq: 64}}\npipeline: {stages: 2}",
        "mesh: {dp: 2, tp: 2}\nnodes: {/layer0/attn/q_proj/MatMul: {in: [[~, ~, tp], [tp, ~]]}}\n"
        "search: {machine: h100}",
    ],
)
def test_whatever_is_asked_of_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    save(transformer.build(GPT), tmp_path / "m.onnx")
    written = alike(tmp_path, capsys, "softmax_cross_entropy", text=text)
    asked = yaml.safe_load(text)
    assert written.get("recompute", {}).get("nodes") == asked.get("recompute")
    said = asked.get("pipeline", {})
    assert written.get("pipeline", {}).get("stages") == said.get("stages")


def test_a_preset_that_is_better_is_what_shard_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(transformer.build(GPT), tmp_path / "m.onnx")
    text = "devices: 8\nsearch: {sizes: {batch: 8, seq: 32}}"
    written = alike(tmp_path, capsys, "softmax_cross_entropy", text=text)
    assert written["mesh"] == {"dp": 2, "tp": 4}


def test_plan_says_the_stages(tmp_path: Path) -> None:
    save(transformer.build(GPT), tmp_path / "m.onnx")
    found = plan(tmp_path / "m.onnx", "pp=2,tp=2")
    assert set(found.stages) == set(found.nodes) and set(found.stages.values()) == {0, 1}
    assert found.mesh.size == 2
    assert found.stages["/wte/Gather"] == 0 and found.stages["/lm_head/MatMul"] == 1
    assert not plan(tmp_path / "m.onnx", "tp=2").stages

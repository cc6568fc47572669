"""The strategy as resolved: what `shard` writes of it is the same directory again, byte by byte."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx_ir as ir
import pytest
import three_blocks
import transformer
import two_layer
from _exporter import save

from onnxpar.cli import main
from tests.tiers import FULL, covering

TRAIN = ["--train", "--optimizer", "adamw", "--loss"]
CONFIG = transformer.Config(layers=1, d_model=32, heads=4, vocab=64, max_positions=16)


def _gpt(path: Path) -> None:
    save(transformer.build(CONFIG), path)


def _zoo(name: str, path: Path) -> None:
    zoo = pytest.importorskip("zoo", reason="needs transformers: the extra zoo")
    export_module = pytest.importorskip("onnxpar.api.pytorch.export_module")
    save(export_module.export(zoo.example(name)), path)


MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "two_layer": (lambda path: ir.save(two_layer.build(), path), "mse"),
    "three_blocks": (lambda path: ir.save(three_blocks.build(), path), "mse"),
    "gpt": (_gpt, "softmax_cross_entropy"),
}
for network in ("llama", "bert", "resnet50", "vit") if FULL else ():
    MODELS[network] = (partial(_zoo, network), "mse")
PRESETS = ("dp=4", "tp=4", "dp=2,tp=2", "replicate", "auto", "auto:ilp", "auto:propagation")
SAMPLE = (
    ("two_layer", "auto:ilp"),
    ("three_blocks", "tp=4"),
    ("gpt", "dp=2,tp=2"),
    ("gpt", "auto"),
)
CASES = [(m, s) for m in MODELS for s in PRESETS] if FULL else SAMPLE


def sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a directory."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def again(folder: Path, strategy: str, *training: str) -> None:
    """Shards, shards again by what was written of the strategy, and compares."""
    model, first, second = (str(folder / name) for name in ("m.onnx", "first", "second"))
    devices = [] if "=" in strategy or Path(strategy).is_file() else ["--devices", "4"]
    command = ["shard", model, "--strategy", strategy, "-o", first, *devices, *training]
    assert main(command) == 0
    file = str(folder / "first" / "strategy.yaml")
    assert main(["shard", model, "--strategy", file, "-o", second, *training]) == 0
    assert sums(folder / "first") == sums(folder / "second")
    assert "strategy.yaml" in sums(folder / "first")


@pytest.mark.parametrize(("case", "train"), covering(CASES, [True, False]))
def test_the_same_bytes(tmp_path: Path, case: tuple[str, str], train: bool) -> None:
    name, strategy = case
    make, loss = MODELS[name]
    make(tmp_path / "m.onnx")
    again(tmp_path, strategy, *([*TRAIN, loss] if train else []))


@pytest.mark.parametrize(
    "text",
    [
        # Numbers alone: devices have no names.
        "devices: 8\nnodes: {/matmul1/MatMul: {in: [[2, 4], [4, 1]], out: [[8, 1]]}}",
        # An order of the devices that the entries do not say.
        "devices: 6\nnodes: {/matmul1/MatMul: {in: [[3, 1], [1, 2]]}}\nrest: data_parallel",
        "mesh: {dp: 2, tp: 2}\nsymbols: {batch: {divisor: 2}}\n"
        'dataset: {x: [dp, "(4 8:tp)"]}\nparameters: {"*1.weight": [tp, ~]}',
        "devices: 4\nnodes: {/relu/Relu: {in: [[2, 2]]}}\nsearch: {level: 1}",
    ],
)
@pytest.mark.parametrize("train", [False, True])
def test_strategy_files(tmp_path: Path, text: str, train: bool) -> None:
    ir.save(two_layer.build(), tmp_path / "m.onnx")
    (tmp_path / "s.yaml").write_text(text)
    again(tmp_path, str(tmp_path / "s.yaml"), *([*TRAIN, "mse"] if train else []))


def test_one_part_is_changed_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rest stays: the file says it all, and is for people to edit."""
    ir.save(two_layer.build(), tmp_path / "m.onnx")
    shard = ["shard", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "out"), "--force"]
    assert main([*shard, "--strategy", "dp=2,tp=2"]) == 0
    file = tmp_path / "s.yaml"
    text = (tmp_path / "out" / "strategy.yaml").read_text()
    old = "/matmul2/MatMul: {in: [[dp, tp], [tp, ~]]}"
    assert text.count(old) == 1
    file.write_text(text.replace(old, "/matmul2/MatMul: {in: [[dp, ~], [~, tp]]}"))
    capsys.readouterr()
    assert main([*shard, "--strategy", str(file)]) == 0
    assert "1 AllGather;" in capsys.readouterr().out


def test_a_file_for_another_program_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ir.save(two_layer.build(), tmp_path / "m.onnx")
    shard = ["shard", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "out"), "--force"]
    assert main([*shard, "--strategy", "dp=2", *TRAIN, "mse"]) == 0
    file = tmp_path / "s.yaml"
    file.write_text((tmp_path / "out" / "strategy.yaml").read_text())
    capsys.readouterr()
    assert main([*shard, "--strategy", str(file)]) == 2
    error = capsys.readouterr().err
    assert "expected the name or a pattern of a" in error and "which matches no node" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("atoms: [2, 2]\ndevices: 8", "s.yaml:1: expected prime factors of 8 devices, got [2, 2]"),
        ("devices: 4\ndataset: {x: [3@1, ~]}", "expected a mesh axis, got '3@1'"),
        (
            "devices: 4\nnodes: {/relu/Relu: {in: [[~, ~]], split: {Q: 2@2}}}",
            "'split': expected a factor that is in no operand, got 'Q'",
        ),
        (
            "devices: 4\nnodes: {/relu/Relu: {in: [[~, ~]], split: {a: 2}}}",
            "expected mesh axes for the factor 'a', got 2",
        ),
    ],
)
def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    ir.save(two_layer.build(), tmp_path / "m.onnx")
    (tmp_path / "s.yaml").write_text(text)
    shard = ["shard", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "out")]
    assert main([*shard, "--strategy", str(tmp_path / "s.yaml")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_any_hash_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """Sets of names have another order in every process; nothing may depend on it."""
    _gpt(tmp_path / "m.onnx")
    command = [sys.executable, "-m", "onnxpar.cli", "shard", "m.onnx", "--strategy", "auto"]
    command += ["--devices", "4", *TRAIN, "softmax_cross_entropy", "-o"]
    seeds = ("0", "1", "2")
    running = [
        subprocess.Popen([*command, seed], cwd=tmp_path, env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in seeds
    ]
    assert [process.wait(100) for process in running] == [0] * len(seeds)
    first, *others = (sums(tmp_path / seed) for seed in seeds)
    assert all(other == first for other in others)

"""`onnxpar plan`: what it prints and writes, and that `shard` carries out what it wrote."""

import json
from pathlib import Path

import pytest
import transformer
from _exporter import save

from onnxpar.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "gpt.onnx"
    config = transformer.Config(
        layers=2, d_model=128, heads=4, vocab=512, max_positions=32, fused_qkv=True
    )
    save(transformer.build(config), path)
    return path


SIZES = ["--symbol", "batch=8", "--symbol", "seq=16"]


def inspected(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert main(["inspect", str(directory), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    return {"nodes": data["nodes"], "collectives": data["collectives"]}


@pytest.mark.parametrize("algorithm", ["recursive", "ilp"])
@pytest.mark.parametrize("train", [False, True])
def test_shard_carries_out_what_plan_wrote(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
    train: bool,
) -> None:
    found = tmp_path / "found.yaml"
    loss = "softmax_cross_entropy"
    # Little memory, so that weights are split.
    search = ["--algorithm", algorithm, "--machine", "h100", "--memory", "4MiB"]
    plan = ["plan", str(model), "--devices", "4", *search, *SIZES, "-o", str(found)]
    assert main([*plan, *(["--loss", loss] if train else [])]) == 0
    shown = capsys.readouterr().out
    assert "The best preset is" in shown or "No preset fits" in shown
    training = ["--train", "--loss", loss, "--optimizer", "adamw"] if train else []
    by_file = tmp_path / "by_file"
    assert main(["shard", str(model), "--strategy", str(found), "-o", str(by_file), *training]) == 0
    searched = tmp_path / "searched.yaml"
    searched.write_text(
        f"search: {{algorithm: {algorithm}, machine: h100, memory: 4MiB, "
        "sizes: {batch: 8, seq: 16}}\n"
    )
    by_search = tmp_path / "by_search"
    command = ["shard", str(model), "--strategy", str(searched), "--devices", "4"]
    assert main([*command, "-o", str(by_search), *training]) == 0
    assert inspected(by_file, capsys) == inspected(by_search, capsys)
    assert main(["verify", str(by_file), "--model", str(model)]) == 0


def test_json_has_every_way_with_its_price(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.yaml"
    assert main(["plan", str(model), "--devices", "4", *SIZES, "--json", "-o", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    ways = {way["name"]: way for way in data["ways"]}
    assert set(ways) == {"found", "dp=4", "dp=2,tp=2", "tp=4"}
    for way in ways.values():
        assert way["seconds"] == pytest.approx(way["computing"] + way["communicating"])
        assert 0 < way["held_bytes"] <= way["peak_bytes"]
    assert ways["tp=4"]["held_bytes"] < ways["dp=4"]["held_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "4", "--algorithm", "magic"], "--algorithm: expected one of recursive, ilp"),
        (["--devices", "4", "--memory", "much"], "--memory: expected a size such as 80GiB"),
        (["--devices", "4", "--memory", "1KiB"], "no strategy fits: the least memory of a device"),
        (["--devices", "4", "--machine", "h1000"], "machine 'h1000': expected a file or one of"),
        ([], "expected a mesh, 'devices' or --devices"),
    ],
)
def test_mistakes(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    out = tmp_path / "s.yaml"
    assert main(["plan", str(model), *options, "-o", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()

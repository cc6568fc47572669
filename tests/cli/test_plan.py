"""`onnxpar plan`: what it prints and writes, and that `shard` carries out what it wrote."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import transformer
import two_layer
import yaml
from _exporter import save

import onnxpar
from onnxpar.cli import main
from onnxpar.search.rival_plans import PAYS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "gpt.onnx"
    config = transformer.Config(
        layers=1, d_model=128, heads=4, vocab=512, max_positions=32, fused_qkv=True
    )
    save(transformer.build(config), path)
    return path


SIZES = ["--symbol", "batch=8", "--symbol", "seq=16"]


def inspected(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert main(["inspect", str(directory), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    return {"nodes": data["nodes"], "collectives": data["collectives"]}


@pytest.mark.parametrize(
    ("train", "algorithm"),
    [
        (False, "ilp"),
        (True, "recursive"),
        pytest.param(False, "recursive", marks=pytest.mark.full),
        pytest.param(True, "ilp", marks=pytest.mark.full),
    ],
)
def test_shard_carries_out_what_plan_wrote(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
    train: bool,
) -> None:
    found = tmp_path / "found.yaml"
    loss = "softmax_cross_entropy"
    # Little memory, so that weights are split; in training `plan` alone limits the plan's own peak.
    memory = "1GiB" if train else "4MiB"
    search = ["--algorithm", algorithm, "--machine", "h100", "--memory", memory]
    # On a mesh of the user's, with which no preset competes.
    mesh = "mesh: {x: 2, z: 2}\n"
    fixed = tmp_path / "fixed.yaml"
    fixed.write_text(f"{mesh}search: {{}}\n")
    plan = ["plan", str(model), "--strategy", str(fixed), *search, *SIZES, "-o", str(found)]
    assert main([*plan, *(["--loss", loss] if train else [])]) == 0
    shown = capsys.readouterr().out
    assert "The plan found is best for speed" in shown
    training = ["--train", "--loss", loss, "--optimizer", "adamw"] if train else []
    by_file = tmp_path / "by_file"
    assert main(["shard", str(model), "--strategy", str(found), "-o", str(by_file), *training]) == 0
    searched = tmp_path / "searched.yaml"
    searched.write_text(
        f"{mesh}search: {{algorithm: {algorithm}, machine: h100, memory: {memory}, "
        "sizes: {batch: 8, seq: 16}}\n"
    )
    by_search = tmp_path / "by_search"
    command = ["shard", str(model), "--strategy", str(searched), "--devices", "4"]
    assert main([*command, "-o", str(by_search), *training]) == 0
    assert inspected(by_file, capsys) == inspected(by_search, capsys)
    assert main(["verify", str(by_file), "--model", str(model)]) == 0


def test_the_micro_batches_of_one_stage_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "two_layer.onnx", tmp_path / "d"
    save(two_layer.build(inputs=8, hidden=8, outputs=8), model)
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    training = ["--loss", "mse", "--optimizer", "sgd"]
    plan = ["plan", str(model), *training, "--symbol", "batch=8"]
    assert main([*plan, "--devices", "1", "--micro-batches", "4", "-o", str(first)]) == 0
    assert yaml.safe_load(first.read_text())["micro_batches"] == 4
    # The file alone gives the same step again, and the directory keeps the number for `train`.
    assert main([*plan, "--strategy", str(first), "-o", str(second)]) == 0
    step = second.read_text().splitlines()[1]
    assert step.startswith("# A step of 4 micro-batches") and step in first.read_text()
    command = ["shard", str(model), "--strategy", str(second), "--train", *training]
    assert main([*command, "-o", str(out)]) == 0
    assert "step          micro-batches in a step: 4, or as --accumulate" in capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["training"]["micro_batches"] == 4
    assert yaml.safe_load((out / "strategy.yaml").read_text())["micro_batches"] == 4
    data, rows = tmp_path / "d.npz", np.ones((2, 8), np.float32)
    np.savez(data, x=rows, labels=rows)
    train = ["train", str(out), "--data", f"npz:{data}", "--batch-size", "2", "--lr", "1"]
    assert main([*train, "--epochs", "1"]) == 2
    assert "--batch-size 2 in 4 micro-batches" in capsys.readouterr().err
    # `--accumulate` comes first, and an older directory has no number.
    assert main([*train, "--epochs", "1", "--accumulate", "2"]) == 0
    del manifest["training"]["micro_batches"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert main([*train, "--epochs", "1"]) == 0


def test_what_is_proved_is_said_of_plans_within_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit that binds is moved until the plan's peak is within: nothing is proved beyond it."""
    path = tmp_path / "two_layer.onnx"
    save(two_layer.build(inputs=1024, hidden=1024, outputs=1024), path)
    exact = ["--algorithm", "ilp", "--machine", "h100", "-o", str(tmp_path / "s.yaml")]
    # With a limit the mesh keeps the presets from being taken.
    fixed = tmp_path / "fixed.yaml"
    fixed.write_text("mesh: {x: 4}\nsearch: {}\n")
    command = ["plan", str(path), "--strategy", str(fixed), "--symbol", "batch=8", *exact]
    assert main(command) == 0
    free = capsys.readouterr().out
    assert "it is proved" in free and "by the search's own estimate" not in free
    assert main([*command, "--memory", "3MiB"]) == 0
    limited = capsys.readouterr().out
    assert "with at most" in limited and "by the search's own estimate" in limited
    assert main([*command, "--memory", "3MiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert all(mesh["limit"] <= 3 << 20 for mesh in data["meshes"])
    assert main([*command, "--memory", "1KiB"]) == 2
    assert "no strategy fits the memory limit: the smallest" in capsys.readouterr().err


def test_a_plan_that_shards_nothing_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two_layer.onnx"
    save(two_layer.build(inputs=1, hidden=1, outputs=1), path)
    command = ["plan", str(path), "--devices", "4", "--symbol", "batch=1"]
    assert main([*command, "-o", str(tmp_path / "s.yaml")]) == 0
    assert "Everything is replicated" in capsys.readouterr().out


@pytest.mark.parametrize("train", [False, True])
def test_the_rows_of_layers_sum_to_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], train: bool
) -> None:
    """The fixed layouts leave a partial sum at the end, and replicas that reduce gradients."""
    path, fixed = tmp_path / "two_layer.onnx", tmp_path / "fixed.yaml"
    save(two_layer.build(inputs=256, hidden=256, outputs=256), path)
    fixed.write_text(
        "mesh: {x: 2, z: 2}\nsearch: {}\nnodes:\n  /matmul2/MatMul: {in: [[x, z], [z, null]]}\n"
    )
    options = ["--strategy", str(fixed), "--symbol", "batch=64", "--json"]
    training = ["--loss", "mse", "--optimizer", "adam"] if train else []
    assert main(["plan", str(path), *options, *training, "-o", str(tmp_path / "s.yaml")]) == 0
    data = json.loads(capsys.readouterr().out)
    best, layers = data["ways"][0], data["layers"]
    assert best["communicating"] > 0
    assert sum(r["computing"] for r in layers) == pytest.approx(best["computing"])
    assert sum(r["communication"] for r in layers) == pytest.approx(best["communicating"])
    names = {row["name"] for row in layers}
    assert {"gradients", "optimizer"} <= names if train else "outputs" in names


def test_rows_keep_the_numbers_that_all_their_nodes_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two products of a feed-forward pair differ in their shapes, those of layers do not."""
    path = tmp_path / "gpt.onnx"
    save(transformer.build(transformer.Config(layers=2, d_model=64, heads=4)), path)
    command = ["plan", str(path), "--devices", "2", *SIZES, "--json"]
    assert main([*command, "-o", str(tmp_path / "s.yaml")]) == 0
    rows = {row["name"]: row["nodes"] for row in json.loads(capsys.readouterr().out)["layers"]}
    assert rows["/layer*/mlp/fc1/MatMul"] == rows["/layer*/mlp/fc2/MatMul"] == 2
    assert rows["/lm_head/MatMul"] == 1


def test_ways_that_are_equally_good_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two_layer.onnx"
    save(two_layer.build(), path)
    assert main(["plan", str(path), "--devices", "2", "-o", str(tmp_path / "s.yaml")]) == 0
    assert "The plan found is best for speed, and so is dp=2." in capsys.readouterr().out


def test_what_is_frozen_is_planned_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A frozen parameter has no gradient and no moments; `plan` prints the options for `shard`."""
    path, out = tmp_path / "two_layer.onnx", tmp_path / "s.yaml"
    save(two_layer.build(inputs=256, hidden=256, outputs=256), path)
    command = ["plan", str(path), "--devices", "1", "--symbol", "batch=8", "--loss", "mse"]
    command += ["-o", str(out)]
    assert main([*command, "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)["ways"][0]["held_bytes"]
    frozen = [*command, "--freeze", "matmul1.*"]
    assert main([*frozen, "--json"]) == 0
    frozen_one = json.loads(capsys.readouterr().out)["ways"][0]["held_bytes"]
    # Of 256 x 256 numbers of four bytes: a gradient and AdamW's two moments less.
    assert trained - frozen_one == 3 * 256 * 256 * 4
    assert main(frozen) == 0
    options = "--train --loss mse --optimizer adamw --freeze 'matmul1.*' -o DIR"
    assert options in capsys.readouterr().out


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


def test_each_stage_has_its_own_plan(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.yaml"
    loss = "softmax_cross_entropy"
    # A link so slow that reducing gradients costs more than a bubble.
    options = ["--devices", "4", "--machine", "cpu", "--loss", loss, "--stages", "auto"]
    options += ["--optimizer-parallel", "0"]
    sizes = ["--symbol", "batch=16", *SIZES[2:]]
    command = ["plan", str(model), *options, "--micro-batches", "16", *sizes]
    assert main([*command, "--json", "-o", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    ways = {way["name"]: way for way in data["ways"]}
    assert {"found", "found, 2 stages", "found, 4 stages", "dp=4"} <= set(ways)
    for name, count in (("found", 0), ("found, 2 stages", 2), ("found, 4 stages", 4)):
        way = ways[name]
        assert len(way["stages"]) == count
        if count:
            slowest = max(stage["seconds"] for stage in way["stages"])
            # The bubble is (p - 1) / m; the optimizer's share comes on top.
            assert way["seconds"] >= (16 + count - 1) * slowest
            assert way["seconds"] <= (16 + count - 1) * slowest + 0.01
    # A preset is chosen if the search finds nothing better.
    assert data["ways"][0] == min(data["ways"], key=lambda way: way["seconds"])
    assert main([*command[:-4], *sizes, "--stages", "2", "-o", str(out)]) == 0
    text = yaml.safe_load(out.read_text())
    assert text["pipeline"]["stages"] == 2 and set(text["pipeline"]["assign"].values()) == {0, 1}
    sharded = tmp_path / "sharded"
    train = ["--train", "--loss", loss, "--optimizer", "sgd"]
    assert main(["shard", str(model), "--strategy", str(out), "-o", str(sharded), *train]) == 0
    assert main(["verify", str(sharded), "--model", str(model), "--symbol", "batch=4,seq=5"]) == 0


def test_shared_states_let_data_parallel_fit(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is between the bytes of levels 0 and 3; small parameters are not sharded."""
    out = tmp_path / "s.yaml"
    command = ["plan", str(model), "--devices", "4", *SIZES, "--json", "-o", str(out)]
    command += ["--loss", "softmax_cross_entropy", "--optimizer", "adamw"]
    ways = {}
    for level in range(4):
        assert main([*command, "--optimizer-parallel", str(level)]) == 0
        data = json.loads(capsys.readouterr().out)
        ways[level] = next(way for way in data["ways"] if way["name"] == "dp=4")
        kept = yaml.safe_load(out.read_text()).get("optimizer_parallel")
        assert kept == ({"level": level, "threshold": 65536} if level else None)
    tensors = onnx.load(model).graph.initializer
    large = {t.name: 4 * prod(t.dims) for t in tensors if 4 * prod(t.dims) >= 65536}
    held = [way["held_bytes"] for way in ways.values()]
    # Of a large parameter, its gradient and two moments, a level shards so many over 4 replicas.
    for found, states in zip(held, (0, 2, 3, 4), strict=True):
        assert held[0] - found == states * sum(large.values()) * 3 // 4
    # ReduceScatter and AllGather send what AllReduce does. All gradients fit into one bucket, and a
    # call takes log2(4) rounds of 2 us. At level 1 the large ones have calls of their own, at level
    # 2 a ReduceScatter each. Level 3 also has an AllGather each, and gathers once more all that the
    # backward pass reads, which is not the embedding: 3/4 of it at 3 GB/s.
    call, again = 2 * 2e-6, [size for name, size in large.items() if name != "wte.weight"]
    times = [way["communicating"] for way in ways.values()]
    more = [0, 2 * call, (len(large) + 1) * call, 2 * len(large) * call]
    more[3] += sum(call + n * 3 / 4 / 3e9 for n in again)
    assert [time - times[0] for time in times] == pytest.approx(more)


def test_states_are_sharded_if_a_step_then_takes_less_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out, directory = (tmp_path / name for name in ("gpt.onnx", "s.yaml", "d"))
    config = transformer.Config(layers=1, d_model=256, heads=4, vocab=512)
    save(transformer.build(config), path)
    training = ["--loss", "softmax_cross_entropy", "--optimizer", "adamw"]
    options = ["--devices", "4", "--machine", "h100", "--symbol", "batch=256", "--symbol", "seq=64"]

    def planned(*more: str) -> dict[str, dict[str, Any]]:
        assert main(["plan", str(path), *options, *training, *more, "--json", "-o", str(out)]) == 0
        ways = json.loads(capsys.readouterr().out)["ways"]
        assert ways[0]["seconds"] == min(way["seconds"] for way in ways)
        return {way["name"]: way for way in ways}

    plain, sharded = planned("--optimizer-parallel", "0"), planned("--optimizer-parallel", "1")
    found = planned()
    for name, way in plain.items():
        # One row for each plan: with optimizer parallel, if that pays.
        other = found.get(f"{name}, optimizer parallel 1")
        assert (other is None) == (name in found)
        if other is not None:
            assert other["seconds"] < PAYS * way["seconds"]
            assert other["peak_bytes"] < way["peak_bytes"]
    dp = sharded["dp=4"]
    assert dp["seconds"] < PAYS * plain["dp=4"]["seconds"]
    assert found["dp=4, optimizer parallel 1"]["seconds"] == dp["seconds"]
    best = next(iter(found))
    assert best.endswith(", optimizer parallel 1")
    assert yaml.safe_load(out.read_text())["optimizer_parallel"]["level"] == 1
    shard = ["shard", str(path), "--train", *training, "--strategy", str(out)]
    assert main([*shard, "-o", str(directory)]) == 0
    assert main(["verify", str(directory), "--model", str(path), "--symbol", "batch=4,seq=5"]) == 0


def test_a_preset_that_the_search_does_not_better_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "gpt.onnx", tmp_path / "s.yaml"
    save(transformer.build(transformer.Config(layers=1, d_model=64, heads=4)), path)
    training = ["--loss", "softmax_cross_entropy", "--optimizer", "adamw"]
    options = ["--devices", "8", "--machine", "cpu", "--symbol", "batch=16", "--symbol", "seq=64"]
    options += ["--optimizer-parallel", "0"]

    def by(level: int) -> list[dict[str, float]]:
        command = ["plan", str(path), *options, *training, "--level", str(level)]
        assert main([*command, "--json", "-o", str(out)]) == 0
        ways = json.loads(capsys.readouterr().out)["ways"]
        assert {"found", "dp=8", "tp=8"} <= {way["name"] for way in ways}
        return ways

    ways = by(1)
    assert ways[0]["peak_bytes"] == min(way["peak_bytes"] for way in ways)
    ways = by(2)
    winner = str(ways[0]["name"])
    assert "=" in winner  # a preset
    assert ways[0]["seconds"] == min(way["seconds"] for way in ways)
    # And that is what `shard` carries out by the file.
    first, second = tmp_path / "by_file", tmp_path / "by_preset"
    shard = ["shard", str(path), "--train", *training]
    assert main([*shard, "--strategy", str(out), "-o", str(first)]) == 0
    assert main([*shard, "--strategy", winner, "-o", str(second)]) == 0
    assert inspected(first, capsys)["nodes"] == inspected(second, capsys)["nodes"]


def test_a_forward_program_runs_once_whatever_its_stages(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.yaml"
    command = ["plan", str(model), "--devices", "4", "--machine", "h100", "--stages", "auto"]
    assert main([*command, *SIZES, "--json", "-o", str(out)]) == 0
    ways = {way["name"]: way for way in json.loads(capsys.readouterr().out)["ways"]}
    assert {way["micro_batches"] for way in ways.values()} == {1}
    # Stages one after another take what they take together, and what goes between them.
    assert ways["found, 4 stages"]["seconds"] > ways["found, 4 stages"]["computing"]
    assert ways["found"]["seconds"] <= ways["found, 4 stages"]["seconds"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "4", "--stages", "3"], "expected numbers that divide the 4 devices, got 3"),
        (["--devices", "4", "--stages", "x"], "--stages: expected a number or auto, got 'x'"),
        (["--devices", "4", "--optimizer-parallel", "1"], "only for training; expected --loss"),
        (["--devices", "4", "--freeze", "*"], "--freeze: only for training; expected --loss"),
        (
            ["--devices", "4", "--level", "5"],
            "error: --level: expected a number <= 2, got 5",
        ),
        (["--devices", "4", "--level", "fast"], "--level: expected an integer, got 'fast'"),
        (["--devices", "4", "--algorithm", "magic"], "--algorithm: expected one of recursive, ilp"),
        (["--devices", "4", "--memory", "much"], "--memory: expected a size such as 80GiB"),
        (
            ["--devices", "4", "--machine", "h1000"],
            "machine 'h1000': expected a file or a known machine; nearest: 'h100'",
        ),
        ([], "expected a mesh, 'devices' or --devices"),
        (
            ["--devices", "4", "--symbol", "bacth=8"],
            "sizes for planning: expected a symbol of the model's inputs, got 'bacth'; nearest: 'b",
        ),
        (["--devices", "4", "--symbol", "batch=0"], "--symbol: 'batch': expected a number >= 1"),
        (["--devices", "4", "--symbol", "batch=-1"], "batch=-1: expected a size, as in batch=32"),
        (
            ["--devices", "4", "--symbol", "batch=12", "--symbol", "batch:divisor=8"],
            "symbol 'batch' is 12, which leaves a remainder of 4 when divided by 8",
        ),
        (
            ["--devices", "2", "--loss", "mse", "--symbol", "batch=2", "--micro-batches", "4"],
            "micro-batches: expected at most 2, since batch=2 is the batch of a step, got 4",
        ),
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


@pytest.mark.parametrize("command", ["plan", "annotate"])
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("missing/s.yaml", "its folder {folder}/missing does not exist"),
        (".", "expected a file to write to, got a directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, out: str, message: str
) -> None:
    target = tmp_path / out
    missing = str(tmp_path / "no.onnx")
    assert main([command, missing, "--strategy", "auto", "--devices", "2", "-o", str(target)]) == 2
    assert capsys.readouterr().err == (
        f"onnxpar: error: {target}: {message.format(folder=tmp_path)}\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_strategy_is_written_completely_through_links_and_to_devices(tmp_path: Path) -> None:
    path, real, link = (tmp_path / name for name in ("m.onnx", "real.yaml", "link.yaml"))
    onnx.save(onnx.parser.parse_model(CHAIN), path)
    link.symlink_to(real)
    command = ["plan", str(path), "--devices", "2", "-o"]
    assert main([*command, str(link)]) == 0
    assert link.is_symlink() and "first" in yaml.safe_load(real.read_text())["nodes"]
    assert main([*command, os.devnull]) == 0
    assert not Path(os.devnull).is_file()
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, real.name, link.name}


CHAIN = """\
<ir_version: 10, opset_import: ["" : 20]>
g (float[64, 32] x, float[32, 48] a, float[48, 16] b) => (float[64, 16] y) {
    [first] h = MatMul(x, a)
    [second] y = MatMul(h, b)
}
"""
PIN = "devices: 8\nnodes: {first: {in: [[2, 1], [1, 4]]}}\n"


def pieces(file: Path, model: Path, node: str) -> list[tuple[int, ...]]:
    """The numbers of shards of a node's operands in a strategy file."""
    found = onnxpar.plan(model, file)
    return [s.strategy(found.mesh) for s in found.nodes[node].inputs if s is not None]


def planned(folder: Path, model: Path, *more: str) -> Path:
    out = folder / "found.yaml"
    assert main(["plan", str(model), *more, "-o", str(out)]) == 0
    return out


@pytest.mark.parametrize("kind", ["file", "annotation", "resolved"])
def test_what_the_user_fixed_is_kept_and_the_rest_searched(tmp_path: Path, kind: str) -> None:
    model, pin = tmp_path / "m.onnx", tmp_path / "pin.yaml"
    onnx.save(onnx.parser.parse_model(CHAIN), model)
    pin.write_text(PIN)
    options = ["--strategy", str(pin)]
    target = model
    if kind == "annotation":
        # Every node is annotated; that the second one followed is kept beside it.
        target = tmp_path / "annotated.onnx"
        options = []
        assert main(["annotate", str(model), "--strategy", str(pin), "-o", str(target)]) == 0
    elif kind == "resolved":
        out = tmp_path / "out"
        assert main(["shard", str(model), "--strategy", str(pin), "-o", str(out)]) == 0
        options = ["--strategy", str(out / "strategy.yaml")]
    found = planned(tmp_path, target, *options)
    assert pieces(found, model, "first") == [(2, 1), (1, 4)]
    written = yaml.safe_load(found.read_text())
    assert written["given"] == ["first"] and set(written["nodes"]) == {"first", "second"}
    free = planned(tmp_path, target, "--strategy", "auto", "--devices", "8")
    assert yaml.safe_load(free.read_text())["given"] == []


def test_all_of_an_annotation_by_another_tool_is_fixed(tmp_path: Path) -> None:
    """One node has a spec, the other none: that one is searched for."""
    model, pin, annotated = (tmp_path / n for n in ("m.onnx", "pin.yaml", "annotated.onnx"))
    onnx.save(onnx.parser.parse_model(CHAIN), model)
    pin.write_text(PIN)
    assert main(["annotate", str(model), "--strategy", str(pin), "-o", str(annotated)]) == 0
    proto = onnx.load(annotated)
    del proto.metadata_props[:]
    proto.graph.node[1].ClearField("device_configurations")
    onnx.save(proto, annotated)
    found = planned(tmp_path, annotated)
    assert pieces(found, model, "first") == [(2, 1), (1, 4)]
    assert yaml.safe_load(found.read_text())["given"] == ["first"]


def test_progress_is_shown_on_a_terminal_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "two_layer.onnx"
    save(two_layer.build(), model)
    plan = ["plan", str(model), "--devices", "4", "-o", str(tmp_path / "found.yaml")]
    command = [sys.executable, "-m", "onnxpar.cli", *plan]
    leader, terminal = os.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=terminal, env=environment
    ) as process:
        os.close(terminal)
        shown = b""
        # Reading a terminal whose other side is closed is an error, not an end.
        with suppress(OSError):
            while part := os.read(leader, 4096):
                shown += part
    os.close(leader)
    assert process.returncode == 0
    # Of dp=4, dp=2,tp=2 and tp=4 the last has begun and two are done.
    assert b"pricing tp=4" in shown
    assert b"2/3" in shown
    assert main(plan) == 0
    assert capfd.readouterr().err == ""


HALF = "{float32: 1e9, bfloat16: 4e9}"


@pytest.mark.parametrize(
    ("flops", "overhead", "chosen", "other"),
    [
        (HALF, 0.0, "bfloat16", "float32"),
        # Casts take longer to start than products save.
        pytest.param(HALF, 1.0, "float32", "bfloat16", marks=pytest.mark.full),
        # The machine may not have the type.
        pytest.param("{float32: 1e9}", 0.0, "float32", None, marks=pytest.mark.full),
    ],
)
def test_the_type_of_products_is_chosen_if_it_is_open(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flops: str,
    overhead: float,
    chosen: str,
    other: str | None,
) -> None:
    machine, out = tmp_path / "machine.yaml", tmp_path / "s.yaml"
    machine.write_text(
        f"name: slow\nflops: {flops}\nbandwidth: 1e12\nmemory: 1GiB\noverhead: {overhead}\n"
        "links: [{bandwidth: 1e10, latency: 1e-6}]\n"
    )
    loss = ["--loss", "softmax_cross_entropy"]
    options = [*loss, "--devices", "2", "--machine", str(machine), *SIZES, "-o", str(out)]
    seconds = {}
    for compute in ("bfloat16", None):
        given = ["--compute", compute] if compute else []
        assert main(["plan", str(model), *options, *given, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        seconds[compute or "float32"] = plan["ways"][0]["seconds"]
    assert main(["plan", str(model), *options, "--compute", "auto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["types"]
    assert [each["type"] for each in found] == [chosen, *([other] if other else [])]
    assert found[0]["seconds"] == seconds[chosen]
    assert all(found[0]["seconds"] < each["seconds"] for each in found[1:])
    assert main(["plan", str(model), *options, "--compute", "auto"]) == 0
    shown = capsys.readouterr().out
    assert f"Products are computed in {chosen}" in shown
    assert f"products in {chosen}" in out.read_text()
    line = next(line for line in shown.splitlines() if line.startswith("next"))
    command = line.removeprefix("next").split()[1:-1]
    assert ("--compute" in command) == (chosen == "bfloat16")
    assert main([*command, str(tmp_path / "d")]) == 0
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert manifest["training"]["compute"] == (None if chosen == "float32" else chosen)


def test_only_plan_decides_the_type_of_products(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "sgd"]
    options = ["--strategy", "dp", "--devices", "2", "--compute", "auto", *train]
    assert main(["shard", str(model), *options, "-o", str(tmp_path / "d")]) == 2
    assert "got 'auto'; only plan decides the type" in capsys.readouterr().err

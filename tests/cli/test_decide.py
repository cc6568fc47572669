"""One decision: `shard` of a strategy that searches is `shard` of the file that `plan` writes.

`ONNXPAR_FULL` asks the search for all that is listed; the sample of the quick tier is drawn by
`ONNXPAR_FUZZ_SEED`.
"""

import json
import os
import random
import re
from dataclasses import replace
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

from onnxpar.api.plan_strategy import read_workload, searching
from onnxpar.api.shard_model import plan
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cli import main
from onnxpar.core.errors import ShardingError
from onnxpar.search.decide import Decision, decide
from onnxpar.search.find_plan import SearchSpec, find
from onnxpar.search.limited_search import search
from onnxpar.search.workload import Workload
from onnxpar.strategy import Strategy, load_strategy, resolve
from onnxpar.strategy.machine_file import load_machine
from tests.tiers import FULL

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
GPT = transformer.Config(layers=1, d_model=64, heads=4, vocab=256, max_positions=64)
MODELS = {
    "mlp": lambda: mlp.build(hidden=(64, 64)),
    "two_layer": two_layer.build,
    "three_blocks": three_blocks.build,
    "hybrid": lambda: hybrid.build(hidden=64),
    "gpt": lambda: transformer.build(GPT),
}
ASKED = [
    "devices: 6\nsearch: {level: 1}",
    "devices: 4\nsearch: {level: 0}\noptimizer_parallel: {level: 1, threshold: 0}",
    "devices: 4\nsearch: {}\npipeline: {stages: 2}",
    "devices: 4\nsearch: {}\npipeline: {stages: 4, micro_batches: 3, schedule: gpipe}",
    "devices: 4\nsearch: {}\npipeline: {stages: 2, chunks: 2, schedule: interleaved}\n"
    "recompute: ['/layer0/*']",
    "mesh: {x: 2}\nsearch: {memory: 24MiB, sizes: {batch: 64, seq: 64}}\npipeline: {stages: 2}",
    "mesh: {dp: 2, tp: 2}\nnodes: {/layer0/attn/q_proj/MatMul: {in: [[~, ~, tp], [tp, ~]]}}\n"
    "search: {machine: h100}",
]
LOSSES = {"gpt": "softmax_cross_entropy", "mlp": "softmax_cross_entropy"}


def seen(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `inspect --json` says."""
    capsys.readouterr()
    assert main(["inspect", str(directory), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def alike(
    folder: Path, capsys: pytest.CaptureFixture[str], loss: str | None, *, text: str = ""
) -> dict[str, Any]:
    """Shards by a search and by the file that `plan` writes; returns the content of the file."""
    model, found = str(folder / "m.onnx"), folder / "found.yaml"
    wanted = ["--strategy", "auto", "--devices", "4"]
    if text:
        (folder / "wanted.yaml").write_text(text)
        wanted = ["--strategy", str(folder / "wanted.yaml")]
    plain = [] if loss is None else ["--loss", loss, "--optimizer", "adamw"]
    train = [] if loss is None else ["--train", *plain]
    # Only `plan` decides optimizer parallel.
    given = loss is None or "optimizer_parallel" in text
    level = [] if given else ["--optimizer-parallel", "0"]
    assert main(["plan", model, *wanted, *plain, *level, "-o", str(found)]) == 0
    first, second = folder / "by_file", folder / "by_search"
    assert main(["shard", model, "--strategy", str(found), "-o", str(first), *train]) == 0
    assert main(["shard", model, *wanted, "-o", str(second), *train]) == 0
    assert seen(first, capsys) == seen(second, capsys)
    # The resolved strategies are equal, too, except for the machine of the search.
    assert (first / "strategy.yaml").read_text() == (second / "strategy.yaml").read_text()
    return dict(yaml.safe_load(found.read_text()))


@pytest.mark.parametrize(
    ("name", "train"),
    # The other test trains the GPT. What is searched of a training has the forward pass.
    [
        pytest.param(name, train, marks=() if train or name == "gpt" else pytest.mark.full)
        for name in MODELS
        for train in (False, True)
        if name != "gpt" or not train
    ],
)
def test_every_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, train: bool
) -> None:
    ir.save(MODELS[name](), tmp_path / "m.onnx")
    alike(tmp_path, capsys, LOSSES.get(name, "mse") if train else None)


@pytest.mark.parametrize("text", ASKED if FULL else random.Random(SEED).sample(ASKED, 1))
def test_whatever_is_asked_of_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    save(transformer.build(GPT), tmp_path / "m.onnx")
    written = alike(tmp_path, capsys, "softmax_cross_entropy", text=text)
    asked = yaml.safe_load(text)
    assert written.get("recompute", {}).get("nodes") == asked.get("recompute")
    said = asked.get("pipeline", {})
    assert written.get("pipeline", {}).get("stages") == said.get("stages")


@pytest.mark.full
def test_a_preset_that_is_better_is_what_shard_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(transformer.build(GPT), tmp_path / "m.onnx")
    text = "devices: 8\nsearch: {sizes: {batch: 16, seq: 64}}"
    written = alike(tmp_path, capsys, "softmax_cross_entropy", text=text)
    # Axes have a preset's names.
    assert written["mesh"] == {"dp": 8}


def test_plan_says_the_stages(tmp_path: Path) -> None:
    save(transformer.build(GPT), tmp_path / "m.onnx")
    found = plan(tmp_path / "m.onnx", "pp=2,tp=2")
    assert set(found.stages) == set(found.nodes) and set(found.stages.values()) == {0, 1}
    assert found.mesh.size == 2
    assert found.stages["/wte/Gather"] == 0 and found.stages["/lm_head/MatMul"] == 1
    assert not plan(tmp_path / "m.onnx", "tp=2").stages


SLOW = """\
name: slow
flops: {float32: 6.0e+10}
bandwidth: 1.2e+10
memory: 8GiB
overhead: 3.0e-6
links: [{bandwidth: 1.0e+8, latency: 1.0e-4}]
"""


def test_memory_is_saved_for_twice_the_time_at_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links so slow that the least memory takes longer than that."""
    path, machine = tmp_path / "m.onnx", tmp_path / "slow.yaml"
    save(transformer.build(GPT), path)
    machine.write_text(SLOW)
    workload = read_workload(path, {})
    wanted = searching(load_strategy("auto", 4))
    entry = wanted.search.model_copy(update={"machine": str(machine), "level": 1})
    wanted = replace(wanted, search=entry)
    seeds = resolve(wanted, workload.program)
    spec = SearchSpec(load_machine(str(machine)), level=1)
    least = find(workload.program, seeds, spec, named=False, free_inputs=True)
    fastest = find(workload.program, seeds, replace(spec, level=2), named=False, free_inputs=True)
    assert least.chosen.seconds > 2 * fastest.chosen.seconds
    found = search(wanted, workload, seeds)
    assert found.chosen.seconds <= 2 * fastest.chosen.seconds
    assert least.chosen.memory <= found.chosen.memory < fastest.chosen.memory
    # If only the smallest plan fits, it is chosen.
    tight = replace(wanted, search=entry.model_copy(update={"memory": int(least.chosen.memory)}))
    assert search(tight, workload, seeds).chosen.memory == least.chosen.memory
    # A preset is no way around it.
    best = decide(wanted, workload)
    assert best.ways[0].seconds <= 2 * min(way.seconds for way in best.ways)


def test_a_preset_is_taken_where_nothing_found_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    save(transformer.build(GPT), path)
    workload = read_workload(path, {})
    wanted = searching(load_strategy("auto", 4))
    free = decide(wanted, workload)
    least = min((w for w in free.ways if w.name != "found"), key=lambda w: w.peak)

    def nothing(*_: object, **__: object) -> None:
        raise ShardingError("no strategy fits the memory limit: the smallest peak found is 9")

    monkeypatch.setattr("onnxpar.search.limited_search.find", nothing)

    def limited(memory: int) -> Strategy:
        return replace(wanted, search=wanted.search.model_copy(update={"memory": memory}))

    taken = decide(limited(least.peak), workload)
    assert taken.ways[0].name == least.name and taken.ways[0].peak <= least.peak
    assert taken.ways[1].name == "found" and "no strategy fits" in taken.ways[1].reason
    with pytest.raises(
        ShardingError,
        match=r"is 9; the preset that needs least memory is .*, "
        r"with [0-9.]+ MiB",
    ):
        decide(limited(least.peak // 2), workload)
    # No preset keeps what is fixed.
    fixed = replace(limited(least.peak), dataset="data_parallel")
    with pytest.raises(ShardingError, match=r"is 9$"):
        decide(fixed, workload)


def unproved(folder: Path, model: ir.Model, loss: str) -> tuple[Workload, Strategy]:
    """Training on 4 devices, with a batch of which no divisor is known."""
    save(model, folder / "m.onnx")
    spec = TrainingSpec(parse_loss(loss), parse_optimizer("adamw"))
    wanted = searching(load_strategy("auto", 4))
    workload = read_workload(folder / "m.onnx", {}, spec)
    sizes = {
        name: size
        for name, size in {"batch": 16, "seq": 64}.items()
        if name in workload.program.env.table
    }
    entry = wanted.search.model_copy(update={"machine": "cpu", "sizes": sizes})
    return workload, replace(wanted, search=entry)


def under(limit: int, wanted: Strategy) -> Strategy:
    return replace(wanted, search=wanted.search.model_copy(update={"memory": limit}))


def test_the_search_knows_what_is_not_proved_even(tmp_path: Path) -> None:
    """Rows are (batch, positions): split by either they are where they were, by both together not.

    Taken as numbers, splits that must be gathered cost nothing, so whatever was found needed more
    than each preset, and under a limit below these nothing was found.
    """
    workload, wanted = unproved(tmp_path, transformer.build(GPT), "softmax_cross_entropy")
    decision = decide(wanted, workload)
    presets = [way for way in decision.ways if way.name != "found"]
    limit = int(0.95 * min(way.peak for way in presets))
    assert decide(under(limit, wanted), workload).ways[0].peak <= limit


def test_where_nothing_fits_what_may_be_declared_is_said(tmp_path: Path) -> None:
    workload, wanted = unproved(tmp_path, two_layer.build(), "mse")
    with pytest.raises(ShardingError, match="--symbol batch:divisor=4 may help"):
        decide(under(1024, wanted), workload)


def test_if_a_model_fits_nowhere_it_says_how_many_devices_would_be_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = two_layer.Config(inputs=64, hidden=256, outputs=8)
    save(two_layer.build(config), tmp_path / "m.onnx")
    workload = read_workload(tmp_path / "m.onnx", {})

    def under_limit(strategy: str, devices: int, memory: int) -> Decision:
        wanted = searching(load_strategy(strategy, devices))
        entry = {"machine": "cpu", "sizes": {"batch": 8}, "memory": memory}
        search = wanted.search.model_copy(update=entry)
        return decide(replace(wanted, search=search), workload)

    def refused(strategy: str, memory: int) -> str:
        with pytest.raises(ShardingError) as error:
            under_limit(strategy, 2, memory)
        return str(error.value)

    # Two devices need 50 KiB each, 36 KiB of them for parameters.
    limit = 28 << 10
    enough = re.search(r"; (\d+) devices would be enough, with ", refused("auto", limit))
    assert enough is not None
    assert under_limit("auto", int(enough[1]), limit).ways[0].peak <= limit
    assert "128 devices would not be enough: on 128 devices, " in refused("auto", 16)
    monkeypatch.setattr("onnxpar.search.nothing_fits.HELPS", 0.1)
    message = refused("auto", 16)
    assert "more devices do not help: on 8 devices, " in message and " are parameters" in message
    # A mesh that is given is that of a stage.
    assert "4 devices in 2 stages would be enough, with " in refused("tp=2", 48 << 10)

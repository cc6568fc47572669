"""What the documentation says that a machine can check."""

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import hybrid
import numpy as np
import onnx
import pytest
import two_layer
import typer
from _exporter import save

import onnxpar
import onnxpar_runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.cli import build_app, main
from onnxpar.ops.operator import Missing
from onnxpar.ops.table import REGISTRY
from onnxpar.strategy import Strategy
from onnxpar_runtime.launch import mpirun_environment
from onnxpar_runtime.training import trainer
from onnxpar_runtime.training.callbacks import Callback
from tests.cli import linear
from tests.decoders import encoder_decoder, growing
from tests.runtime.generation.plain import greedy
from tests.runtime.launching import mpirun

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")


def blocks(page: str) -> list[str]:
    """The YAML blocks of a page."""
    found = YAML.findall((ROOT / page).read_text(encoding="utf-8"))
    assert found, f"{page} has no YAML block"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for file, place in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / file if file else page
        assert target.exists(), file
        if place:
            assert place in places(target), f"{file}#{place}"


def places(page: Path) -> set[str]:
    """What GitHub calls the headings of a page, for links that lead there."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/reference/strategy_file.md"])
def test_strategies_shown_are_legal(page: str) -> None:
    for text in blocks(page):
        # A block that shows one key alone leaves the devices to the command line.
        devices = None if re.search(r"^(mesh|devices):", text, re.MULTILINE) else 8
        Strategy.from_text(text, devices)


def test_the_guide_shows_the_strategy_that_the_quickstart_uses() -> None:
    assert Strategy.from_text(blocks("docs/guide.md")[0]) == Strategy.from_text(
        (ROOT / "models" / "mlp.strategy.yaml").read_text(encoding="utf-8")
    )


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def test_the_reference_lists_every_option_of_every_command() -> None:
    page = (ROOT / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    commands = typer.main.get_command(build_app()).commands
    assert set(sections) == set(commands)
    for name, command in commands.items():
        inner = getattr(command, "commands", {}).values()
        params = [p for each in (command, *inner) for p in each.params]
        real = {flag for p in params for flag in (*p.opts, *p.secondary_opts)}
        real = {flag for flag in real if flag.startswith("--")} - {"--help"}
        documented = {
            option
            for line in sections[name].splitlines()
            if line.startswith("| `")
            for option in options(line.split("|")[1])
        }
        assert documented == real, name


def test_the_manifest_has_the_keys_that_the_page_lists(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "manifest.md").read_text(encoding="utf-8")
    top, program, training, pipeline = page.split("\n## ")
    directory = linear.shard(tmp_path, 2, "--symbol", "batch:divisor=2", optimizer="adamw")
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    staged = json.loads((stages(tmp_path) / "manifest.json").read_text(encoding="utf-8"))
    assert first_column(top) == {*manifest, *staged, "dialect"}
    both = encoder_decoder(tmp_path / "both")
    cached = shard_model(both, "tp=2", tmp_path / "decoder").out
    caching = json.loads((cached / "manifest.json").read_text(encoding="utf-8"))
    programs = [p for m in (manifest, staged, caching) for p in m["programs"].values()]
    kinds = {s["kind"] for p in programs for s in p["system_inputs"]}
    keys, listed = program.split("Kinds of system inputs")
    assert first_column(keys) == {key for p in programs for key in p}
    assert kinds <= {row.split()[0] for row in first_column(listed)} and "loss_weight" in kinds
    assert set(manifest["training"]) == set(staged["training"])
    assert first_column(training) == {*manifest["training"], "micro_batches"}
    named = set(re.findall(r"`(\w+)`", training.split("Kinds of states")[1]))
    assert {s["kind"] for s in manifest["training"]["states"]} <= named
    assert first_column(pipeline) == set(staged["pipeline"])


def stages(folder: Path) -> Path:
    """Shards a network for training in two stages."""
    save(hybrid.build(side=4, hidden=8), folder / "net.onnx")
    command = ["shard", str(folder / "net.onnx"), "--strategy", "pp=2", "-o", str(folder / "pp2")]
    assert main([*command, "--train", "--loss", "mae", "--optimizer", "sgd"]) == 0
    return folder / "pp2"


def first_column(text: str) -> set[str]:
    """The code in the first column of a text's tables, row by row."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    found = [re.findall(r"`([^`]+)`", row) for row in rows]
    # A kind's own field stands in brackets behind it.
    return {name for row, names in zip(rows, found, strict=True)
            for name in (names[:1] if "(" in row else names)}  # fmt: skip


def test_operators_said_to_have_no_gradient_have_none() -> None:
    page = (ROOT / "docs" / "reference" / "training.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"Common operators without a gradient are (.*?)\.\n", page, re.DOTALL)
    names = re.findall(r"`(\w+)`", listed)
    assert len(names) > 4
    for name in names:
        known = REGISTRY.find("", name, onnx.defs.onnx_opset_version())
        assert known is None or isinstance(known.gradient, Missing), name
        assert onnx.defs.has(name), name


SHOWN = ["README.md", "docs/guide.md", "docs/tutorial.md"]
FILES = ("counting.py", "ranks.py", "tiny_gpt.py", "export.py", "back.py")
LEFT_OUT = ("git ", "tools/quickstart", ". .venv", "pip ", "onnxpar view ", "export ")
"""Commands that a test cannot run: those of the environment, and what serves until Ctrl-C."""


def shell(page: str) -> list[str]:
    """The commands of a page, in order, one a line and without comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    lines = [line.partition("  #")[0].strip() for line in found.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("page", SHOWN)
def test_the_commands_shown_have_the_options_shown(page: str) -> None:
    commands = typer.main.get_command(build_app()).commands
    seen = 0
    for line in shell(page):
        words = shlex.split(line)
        if "onnxpar" not in words or line.startswith("git "):
            continue
        name, *arguments = words[words.index("onnxpar") + 1 :]
        # Fails for an option that there is not, or an argument too many or too few.
        context = typer.Context(commands[name], info_name=name)
        commands[name].parse_args(context, arguments)
        seen += 1
    assert seen >= 5


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SHOWN)
def test_the_commands_shown_work(page: str, tmp_path: Path) -> None:
    for name in ("models", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "work").mkdir()
    for kind in FILES:
        for text in python(f"python {kind}", page):
            (tmp_path / kind).write_text(text, encoding="utf-8")
    # What the README takes as given.
    np.savez(tmp_path / "in.npz", input_ids=np.arange(21).reshape(3, 7))
    program = tmp_path / "bin" / "onnxpar"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m onnxpar.cli "$@"\n')
    program.chmod(0o755)
    places = (program.parent, Path(sys.executable).parent, os.environ["PATH"])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
    environment = mpirun_environment(inherited | {"PATH": os.pathsep.join(map(str, places))})
    lines = [line for line in shell(page) if not line.startswith(LEFT_OUT)]
    done = subprocess.run(
        ["bash", "-e", "-x", "-c", "\n".join(lines)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.full
def test_the_export_shown_keeps_every_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (program,) = python("python torch", "docs/guide.md")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", program]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    capfd.readouterr()
    arguments = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "sgd"]
    assert main(["shard", "work/net.onnx", "--strategy", "dp=2", "-o", "out", *arguments]) == 0
    printed = capfd.readouterr().out
    # Three layers and two norms: 784*128 + 128*128 + 128*10 weights, 128 + 128 + 10 biases, 4*128.
    # The rate of the Dropout is a constant, which does not count.
    assert "trained       118,794 of 118,794 parameters, in 10 of 10 tensors" in printed
    assert "Dropout nodes" not in printed  # exported in training mode
    assert "notice" not in printed


@pytest.mark.full
def test_the_export_of_the_reference_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (program,) = python("python torch", "docs/reference/python.md")
    net = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10))
    exec(program, {"net": net, "onnxpar": onnxpar})
    graph = onnxpar.load("net.onnx").graph
    assert set(graph.initializers) == set(net.state_dict())
    assert [str(d) for d in graph.inputs[0].shape or ()] == ["batch", "seq"]


def python(kind: str, page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_python_shown_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(two_layer.build(), tmp_path / "two_layer.onnx")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(python("python", "docs/reference/python.md"))],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    # Columns then rows: one sum, at the end. The outputs of a batch of 6. And training: evaluation
    # and the first step have the same loss, the fifth step a smaller one.
    assert done.stdout.splitlines() == [
        "{'AllReduce': 1}",
        "(6, 16)",
        "True ('x',) 4",
        "True True (16, 16)",
    ]
    # The program for mpirun trains the directory that the last block wrote.
    (program,) = python("python mpi", "docs/reference/python.md")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    ran = mpirun(2, ["program.py"])
    assert ran.code == 0, ran.err
    loss, *shape = ran.out.split()
    assert shape == ["(16,", "16)"] and float(loss) > 0


def test_the_callbacks_shown_have_the_methods_that_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *shown, program = python("python callbacks", "docs/reference/training.md")
    compile(program, "program", "exec")
    names: dict[str, Any] = {}
    for package in ("wandb", "mlflow"):  # not needed to define the classes
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for block in shown:
        exec(block, names)
    classes = [c for c in names.values() if isinstance(c, type) and c is not Callback]
    assert len(classes) == 2 and all(issubclass(c, Callback) for c in classes)
    for method in (m for c in classes for m in vars(c).values() if inspect.isfunction(m)):
        if method.__name__ != "__init__":
            called = inspect.signature(getattr(Callback, method.__name__))
            assert list(inspect.signature(method).parameters) == list(called.parameters)


def test_the_fit_shown_has_options_of_train(monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = python("python fit", "docs/reference/python.md")
    runs = []

    def fitted(data: str, *, callbacks: Any, **options: Any) -> SimpleNamespace:
        runs.append(trainer.run_of(data, None, options))
        return SimpleNamespace(steps=0, loss=0, best_step=0)

    for name, stand_in in (
        ("init", lambda: SimpleNamespace(index=0)),
        ("guarded", lambda rank, body: body()),
        ("Trainer", lambda *_, **__: nullcontext(SimpleNamespace(fit=fitted))),
    ):
        monkeypatch.setattr(onnxpar_runtime, name, stand_in, raising=False)
    with pytest.raises(SystemExit, match=r"^0$"):
        exec(shown, {})
    assert runs[0].checkpoints.keep_best and runs[0].schedule == "cosine"


def test_the_metric_shown() -> None:
    (shown,) = python("python metric", "docs/reference/training.md")
    names: dict[str, Any] = {}
    exec(shown, names)
    metric = names["Calibration"]()
    # Probabilities of 3/4 for a right class, and of 1/2 for a wrong one.
    for scores, label in (([np.log(3), 0.0], 0), ([0.0, 0.0], 1)):
        metric.update({"logits": np.array([scores])}, {"labels": np.array([label])})
    assert metric.compute() == pytest.approx((0.25 + 0.5) / 2)


def test_the_requests_shown_run_under_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = growing(tmp_path / "model.onnx")
    shard_model(model, "tp=2", tmp_path / "llama2")
    (program,) = python("python requests", "docs/reference/python.md")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    ran = mpirun(2, ["program.py"])
    assert ran.code == 0, ran.err
    first, second = (greedy(model, [prompt], new)[0] for prompt, new in (([5, 6, 7], 3), ([8], 2)))
    # Both run at once; the second is complete first.
    ends = {("0", 2): "length", ("1", 1): "length"}
    assert sorted(line.split() for line in ran.out.splitlines()) == sorted(
        [number, str(token), ends.get((number, place), "None")]
        for number, tokens in (("0", first), ("1", second))
        for place, token in enumerate(tokens)
    )

"""Scripts that complete commands in shells, and the examples in the help."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from onnxpar.cli import COMMANDS, build_app, main
from onnxpar.cli.checkpoint import app as checkpoint
from onnxpar.cli.grouped_help import EXAMPLES, GROUPS
from onnxpar_runtime import launch
from onnxpar_runtime.generation import beams
from onnxpar_runtime.training import learning_rate

DEVICES, TRANSPORTS = "auto cpu cuda cuda:", "auto mpi nccl threads"
SOURCES = "digits npz: parquet: tokens: idx:"


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_every_command_and_option(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    for name, command in typer.main.get_command(build_app()).commands.items():
        assert re.search(rf"\b{name}\b", text)
        inner = getattr(command, "commands", {"": command}).values()
        for flag in (f for one in inner for p in one.params for f in p.opts if f[:2] == "--"):
            assert f"-l {flag[2:]}" in text if shell == "fish" else flag in text


VALUES = {
    "shard": {
        "--strategy": "dp tp= pp= replicate auto FILES",
        "--loss": "softmax_cross_entropy mse mae bce output:",
        "--optimizer": "sgd momentum adam adamw lamb",
        "--compute": "float16 bfloat16",
        "--optimizer-parallel": "0 1 2 3",
        "--recompute": "layers layers= auto=",
        "--recompute-communication": "keep recompute",
        "--dialect": "tensorrt onnxruntime",
    },
    "annotate": {"--strategy": "dp tp= pp= replicate auto FILES"},
    "plan": {
        "--strategy": "dp= tp= pp= FILES",
        "--algorithm": "recursive ilp",
        "--level": "0 1 2",
        "--machine": "cpu a100 h100 h200 FILES",
        "--stages": "auto",
        "--loss": "softmax_cross_entropy mse mae bce output:",
        "--optimizer": "sgd momentum adam adamw lamb",
        "--compute": "float16 bfloat16",
        "--optimizer-parallel": "0 1 2 3",
    },
    "inspect": {"--device": "cuda"},
    "run": {"--device": DEVICES, "--transport": TRANSPORTS},
    "generate": {
        "--early-stopping": "true false never",
        "--device": DEVICES,
        "--transport": TRANSPORTS,
    },
    "serve": {"--device": DEVICES, "--transport": TRANSPORTS},
    "train": {
        "--data": SOURCES,
        "--loss-scale": "dynamic",
        "--schedule": "constant linear cosine",
        "--eval-data": SOURCES,
        "--metric": "perplexity f1 top5",
        "--device": DEVICES,
        "--transport": TRANSPORTS,
    },
    "eval": {
        "--data": SOURCES,
        "--metric": "perplexity f1 top5",
        "--device": DEVICES,
        "--transport": TRANSPORTS,
    },
    "report": {"--machine": "cpu a100 h100 h200 FILES"},
    "completion": {"": "bash zsh fish"},
    "checkpoint": {"": "reshard merge export import"},
}
"""The words that are offered after each option; after the command itself with ""."""
CHOICES = [
    (f"{c} {o}".strip(), text) for c, options in VALUES.items() for o, text in options.items()
]


def test_the_values_are_those_that_the_runtime_takes() -> None:
    assert tuple(TRANSPORTS.split()) == launch.TRANSPORTS
    assert tuple(VALUES["train"]["--schedule"].split()) == learning_rate.KINDS
    assert {*VALUES["generate"]["--early-stopping"].split()} == {*beams._WHEN}


def test_no_option_with_values_is_forgotten() -> None:
    """A help text or placeholder that lists words belongs to an option whose values are known."""
    listed = re.compile(r"(?:[a-z0-9_]+, )+[a-z0-9_]+,? or |[a-z0-9]+ or [a-z0-9]+[:.]|0 \w+.*1 ")
    for name, command in typer.main.get_command(build_app()).commands.items():
        for one in getattr(command, "commands", {"": command}).values():
            for param in one.params:
                words = [w for w in (param.metavar or "").split("|") if w.islower()]
                listing = listed.match(getattr(param, "help", None) or "")
                if param.param_type_name == "option" and (words or listing):
                    assert param.opts[0] in VALUES[name], (name, param.opts, param.help)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script").write_text(script("bash", capsys))
    cases = {
        "sha": "shard",
        "shard --dia": "--dialect",
        "shard --dialect t": "tensorrt",
        "shard --dialect = t": "tensorrt",
        "shard --dialect =": "tensorrt onnxruntime",
        "checkpoint mer": "merge",
        "launch -n 2 -- train out --schedul": "--schedule",
        "launch -n 2 -- train out --schedule c": "constant cosine",
        "train out --transport nc": "nccl",
        "run scr": "script",
        "shard model.onnx --strategy t": "tp=",
        "plan model.onnx --strategy s": "script",
        "completion f": "fish",
    } | {f"{words} ''": text.replace("FILES", "script") for words, text in CHOICES}
    lines = [
        f"COMP_WORDS=(onnxpar {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _onnxpar; "
        'echo "${COMPREPLY[@]}"'
        for words in cases
    ]
    text = "\n".join(["set -u", ". ./script", *lines])
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    assert dict(zip(cases, done.stdout.splitlines(), strict=True)) == cases


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With stand-ins for the functions that work only while a line is edited."""
    (tmp_path / "script").write_text(script("zsh", capsys))
    stand_ins = """
      compdef() { :; }
      compset() { :; }
      _files() { found_values+=(FILES); }
      _describe() { found_values+=(${(P)2}); }
      compadd() { while [[ $1 == -* ]]; do [[ $1 == -S ]] && shift; shift; done
                  found_values+=("$@"); }"""
    cases = {f"{words} ''": text for words, text in CHOICES}
    cases["shard --dialect=t"] = cases["shard --dialect ''"]
    lines = [
        f'words=(onnxpar {words}); CURRENT=$#words; found_values=(); _onnxpar; echo "$found_values"'
        for words in cases
    ]
    text = "\n".join([stand_ins, ". ./script", *lines])
    done = subprocess.run(["zsh", "-fc", text], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    found = dict(zip(cases, done.stdout.splitlines(), strict=True))
    assert {k: {*v.split()} for k, v in found.items()} == {
        k: {*v.split()} for k, v in cases.items()
    }


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script").write_text(script("fish", capsys))
    cases = {f"{words} ": text.replace("FILES", "script") for words, text in CHOICES}
    cases["shard --dialect=t"] = "--dialect=tensorrt"
    cases["launch -n 2 -- gene"] = "generate"
    cases["launch -n 2 -- train out --schedul"] = "--schedule"
    cases["launch -n 2 -- train out --schedule c"] = "constant cosine"
    cases["launch -- train scr"] = "script"
    lines = [f'complete -C "onnxpar {words}" | cut -f 1 | string join " "' for words in cases]
    text = "\n".join(["source script", *lines])
    done = subprocess.run(
        ["fish", "--no-config", "-c", text], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""
    found = dict(zip(cases, done.stdout.splitlines(), strict=True))
    assert {k: {*v.split()} for k, v in found.items()} == {
        k: {*v.split()} for k, v in cases.items()
    }


def test_another_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    error = "onnxpar: error: completion: expected one of bash, zsh, fish, got 'tcsh'\n"
    assert capsys.readouterr().err == error


def test_every_command_is_in_a_group_and_has_an_example() -> None:
    names = [name for name, _ in COMMANDS]
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(names)
    inner = {
        f"checkpoint {info.name or info.callback.__name__}"
        for info in checkpoint.registered_commands
    }
    assert {*EXAMPLES} == {*names} | inner


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_options_that_exist(name: str) -> None:
    words = shlex.split(EXAMPLES[name].partition(" > ")[0])
    words = words[words.index("onnxpar") + 1 :]
    command, *inside = name.split()
    assert words[: 1 + len(inside)] == name.split()
    # Parses the arguments, and does nothing.
    root = typer.main.get_command(build_app(command))
    context = root.make_context("onnxpar", words)
    _, found, rest = root.resolve_command(context, [*context._protected_args, *context.args])
    made = found.make_context(command, rest, parent=context)
    if hasattr(found, "commands"):
        _, inner, rest = found.resolve_command(made, [*made._protected_args, *made.args])
        inner.make_context(name, rest, parent=made)

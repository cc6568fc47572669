"""Scripts that complete commands in shells, and the examples in the help."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from onnxpar.cli import COMMANDS, build_app, main
from onnxpar.cli.grouped_help import EXAMPLES, GROUPS


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


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script").write_text(script("bash", capsys))
    cases = {
        "sha": "shard",
        "shard --dia": "--dialect",
        "shard --dialect t": "tensorrt",
        "checkpoint mer": "merge",
        "launch -n 2 -- train out --schedul": "--schedule",
        "train out --transport nc": "nccl",
        "run scr": "script",
        "shard model.onnx --strategy ''": "dp tp= replicate auto script",
        "shard model.onnx --strategy t": "tp=",
        "plan model.onnx --strategy s": "script",
    }
    lines = [
        f"COMP_WORDS=(onnxpar {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _onnxpar; "
        'echo "${COMPREPLY[@]}"'
        for words in cases
    ]
    text = "\n".join(["set -u", ". ./script", *lines])
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stderr, done.stdout.splitlines()) == ("", list(cases.values()))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "script").write_text(script(shell, capsys))
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_another_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    error = "onnxpar: error: completion: expected one of bash, zsh, fish, got 'tcsh'\n"
    assert capsys.readouterr().err == error


def test_every_command_is_in_a_group_and_has_an_example() -> None:
    names = [name for name, _ in COMMANDS]
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(names)
    assert sorted(EXAMPLES) == sorted(names)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_options_that_exist(name: str) -> None:
    words = shlex.split(EXAMPLES[name].partition(" > ")[0])
    words = words[words.index("onnxpar") + 1 :]
    assert words[0] == name
    # Parses the arguments, and does nothing.
    root = typer.main.get_command(build_app(name))
    context = root.make_context("onnxpar", words)
    _, command, rest = root.resolve_command(context, [*context._protected_args, *context.args])
    made = command.make_context(name, rest, parent=context)
    if hasattr(command, "commands"):
        _, inner, rest = command.resolve_command(made, [*made._protected_args, *made.args])
        inner.make_context(name, rest, parent=made)

"""The help of every command: each option says what its value is, and common options come first."""

from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from typing import Annotated

import typer

from onnxpar.cli import build_app
from onnxpar.cli.options import takes_options
from onnxpar.cli.training_options import TrainingOptions
from onnxpar_format.option import Option


def commands() -> Iterator[typer.core.TyperCommand]:
    for command in typer.main.get_command(build_app()).commands.values():
        yield from getattr(command, "commands", {"": command}).values()


def test_each_value_has_a_placeholder() -> None:
    """Without one, help texts show a Python type such as `<int range>`."""
    missing = [
        f"{command.name} {param.opts[0]}"
        for command in commands()
        for param in command.params
        if param.param_type_name == "option" and not param.is_flag and param.metavar is None
    ]
    assert missing == []


def test_training_options_come_after_the_others() -> None:
    named = {command.name: command for command in commands()}
    training = [field.name for field in fields(TrainingOptions)]
    for name in ("shard", "plan"):
        own = [param.name for param in named[name].params]
        first = own.index(training[0])
        assert own[first : first + len(training)] == training
        assert {"out", "strategy", "devices", "symbol"} < {*own[:first]}


def test_results_can_be_printed_as_json() -> None:
    """But for the five commands of which docs/reference/command_line.md says why."""
    without = {
        command.name
        for command in commands()
        if not any("--json" in param.opts for param in command.params)
    }
    assert without == {"run", "serve", "train", "launch", "completion"}


def test_the_name_of_an_option_is_not_left_to_typer() -> None:
    """Typer 0.27 makes `--N` of this one."""

    def command(most_steps: Annotated[int | None, Option("Their number.", "N")] = None) -> None:
        """Does nothing."""

    (parameter,) = signature(takes_options(command)).parameters.values()
    (form,) = parameter.annotation.__metadata__
    # In an annotation Typer takes the first argument for a name, and calls it the default.
    assert form.default == "--most-steps"

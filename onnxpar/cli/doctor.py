"""`onnxpar doctor`: what this machine has, for a bug report."""

import json
from dataclasses import asdict

import typer

from onnxpar.cli.options import AsJson, takes_options
from onnxpar.cli.screen import Screen


@takes_options
def command(as_json: AsJson = False) -> None:
    """Show what this machine has, and test two ranks under mpirun.

    It shows versions, MPI, devices and limits, as text for a bug report. The exit code is 1 if
    onnxpar cannot work here.
    """
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    found = runtime.examine()
    broken = any(section.broken for section in found)
    if as_json:
        sections = [asdict(section) | {"facts": dict(section.facts)} for section in found]
        typer.echo(json.dumps({"ok": not broken, "sections": sections}, indent=2))
        raise typer.Exit(int(broken))
    screen = Screen()
    for number, section in enumerate(found):
        if number:
            screen.line()
        screen.line(section.title, style="bold")
        width = max((len(name) for name, _ in section.facts), default=0)
        for name, text in section.facts:
            screen.line(f"  {name:<{width}}  {text}")
        for problem in section.problems:
            screen.line(f"  {'error' if section.broken else 'warning'}: {problem}")
    screen.line()
    screen.line("onnxpar cannot work here" if broken else "onnxpar works here")
    raise typer.Exit(int(broken))

"""`onnxpar diagnose`: says which rank is behind after a hang or a crash."""

import json
from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import AsJson, takes_options
from onnxpar.cli.screen import Screen
from onnxpar.report.diagnosis import diagnose


@takes_options
def command(
    folder: Annotated[
        Path, typer.Argument(help="A folder with the last calls of ranks.", metavar="FOLDER")
    ],
    as_json: AsJson = False,
) -> None:
    """Show which rank is at fault after a hang or a crash.

    It is a rank for which others wait, or one that made another call than the others. Ranks write
    their last calls when they fail, at SIGUSR1, and (except those of `serve`) at SIGTERM: to the
    folder --log-dir, or to a new one in onnxpar-failed.
    """
    found = diagnose(folder)
    if as_json:
        typer.echo(json.dumps(found.json(), indent=2))
        return
    screen = Screen()
    for finding in found.findings:
        screen.note(finding)
    screen.line()
    for line in found.last:
        screen.line(line)

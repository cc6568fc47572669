"""`onnxpar diagnose`: says which rank is behind after a hang or a crash."""

import json
from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import AsJson, takes_options
from onnxpar.report.diagnosis import diagnose


@takes_options
def command(
    folder: Annotated[
        Path, typer.Argument(help="A folder with the last calls of ranks.", metavar="FOLDER")
    ],
    as_json: AsJson = False,
) -> None:
    """Show which rank is behind, or called something else, after a hang or a crash.

    Ranks write their last calls when they fail, at SIGUSR1, and (except those of `serve`) at
    SIGTERM: to the folder --log-dir, or to a new one in onnxpar-failed.
    """
    found = diagnose(folder)
    if as_json:
        typer.echo(json.dumps(found.json(), indent=2))
        return
    typer.echo("\n".join([*found.findings, "", *found.last]))

"""`onnxpar trace`: says where the time of a step went."""

import json
from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import AsJson, takes_options
from onnxpar.cli.screen import Screen
from onnxpar.report.trace_table import trace_table


@takes_options
def command(
    file: Annotated[Path, typer.Argument(help="A file that --trace has written.", metavar="FILE")],
    as_json: AsJson = False,
) -> None:
    """Show where the time of a step went, on each rank.

    The trace is written by `run`, `train`, `eval`, `generate` and `serve` with `--trace FILE`.
    """
    found = trace_table(file)
    if as_json:
        typer.echo(json.dumps(found.json(), indent=2))
        return
    screen = Screen()
    for line in found.lines():
        screen.line(line)
    screen.line()
    first, *others = found.remarks()
    screen.note(f"in milliseconds: {first}")
    for remark in others:
        screen.note(remark)

"""`onnxpar trace`: says where the time of a step went."""

import json
from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import AsJson, takes_options
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
    text = json.dumps(found.json(), indent=2) if as_json else "\n".join(found.lines())
    typer.echo(text)

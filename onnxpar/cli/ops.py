"""`onnxpar ops`: what each operator supports."""

import json
import sys
from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onnxpar.cli.options import AsJson, takes_options
from onnxpar.report.operator_table import operator_table

WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""


@takes_options
def command(
    as_json: AsJson = False,
) -> None:
    """Show the operators that can be sharded, and how."""
    rows = operator_table()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("operator", "since", "rule", "local form", "gradient"):
        table.add_column(column, overflow="fold", no_wrap=column in ("operator", "since"))
    for row in rows:
        name = f"{row.domain}::{row.op_type}" if row.domain else row.op_type
        cells = (name, str(row.since_version), row.rule, row.local, row.gradient)
        table.add_row(*map(escape, cells))
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(table)
    console.print(
        f"{len(rows)} definitions. Any other operator is replaced by ONNX's function body for it. "
        "If there is none, it is replicated, and `onnxpar inspect` names it."
    )

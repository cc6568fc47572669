"""`onnxpar ops`: what each operator supports."""

import json
from dataclasses import asdict

import typer

from onnxpar.cli.options import AsJson, takes_options
from onnxpar.cli.screen import Column, Content, Screen
from onnxpar.report.operator_table import operator_table


@takes_options
def command(
    as_json: AsJson = False,
) -> None:
    """Show the operators that can be sharded, and how."""
    rows = operator_table()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return
    screen = Screen()
    columns = (
        Column("operator", Content.NAME),
        Column("since", Content.NUMBER),
        Column("rule"),
        Column("local form", optional=True),
        Column("gradient", optional=True),
    )
    names = [f"{row.domain}::{row.op_type}" if row.domain else row.op_type for row in rows]
    cells = [
        (name, str(row.since_version), row.rule, row.local, row.gradient)
        for name, row in zip(names, rows, strict=True)
    ]
    screen.table(columns, cells)
    screen.legend()
    screen.entry(
        "definitions",
        f"{len(rows)}. Any other operator is replaced by ONNX's function body for it. If there is "
        "none, it is replicated, and `onnxpar inspect` names it.",
    )

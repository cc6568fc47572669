"""`onnxpar annotate`: stores a strategy in the model itself."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from onnxpar.api.annotate import annotate
from onnxpar.cli.describe import SHOWN, count
from onnxpar.cli.options import AsJson, Constraints, Devices, takes_options
from onnxpar.cli.shard import parse_symbols
from onnxpar.strategy.presets import OFFERED
from onnxpar_format.option import Option


@takes_options
def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The ONNX model to annotate.")],
    out: Annotated[Path, Option("The annotated model to write.", "FILE", flags=("--out", "-o"))],
    strategy: Annotated[
        str | None,
        Option(
            "Strategy file or preset, as for `shard`. Default: the model's annotations.",
            "FILE|PRESET",
            values=OFFERED,
        ),
    ] = None,
    devices: Devices = None,
    symbol: Constraints = (),
    as_json: AsJson = False,
) -> None:
    """Store a strategy in the model, as annotations.

    `shard` and other tools can read them.
    """
    done = annotate(model, strategy, out, devices=devices, symbols=parse_symbols(symbol))
    if as_json:
        typer.echo(json.dumps(asdict(done) | {"out": str(done.out)}, indent=2, ensure_ascii=False))
        return
    console = Console(soft_wrap=True, highlight=False)
    lines = [
        f"devices       {done.devices}",
        f"annotated     {done.annotated} of {count(done.nodes, 'node')}",
    ]
    if done.differing:
        shown = ", ".join(done.differing[:SHOWN])
        more = len(done.differing) - SHOWN
        lines.append(
            f"differing     ONNX cannot express the layouts of {shown}"
            f"{f' and {more} more' if more > 0 else ''}"
        )
    lines += [f"written       {done.out}", f"next          onnxpar shard {done.out} -o DIR"]
    for line in lines:
        console.print(escape(line))

"""`onnxpar report`: writes a page that shows how a model was sharded."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from onnxpar.api.report_page import report_page
from onnxpar.cli.options import AsJson, takes_options
from onnxpar.core.errors import DirectoryError
from onnxpar.core.machine import PRESETS
from onnxpar.strategy.machine_file import load_machine
from onnxpar_format.option import Option
from onnxpar_format.texts import whole


@takes_options
def command(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR [DIR]", help="One or two outputs of `onnxpar shard`."),
    ],
    out: Annotated[Path, Option("The page to write.", "FILE", flags=("--out", "-o"))] = Path(
        "report.html"
    ),
    log: Annotated[Path | None, Option("A log that `train --log` has written.", "FILE")] = None,
    trace: Annotated[Path | None, Option("A trace that `--trace` has written.", "FILE")] = None,
    machine: Annotated[
        str,
        Option(
            "The machine whose times are predicted: cpu, a100, h100, h200, or a file.",
            "NAME|FILE",
            values=tuple(PRESETS),
        ),
    ] = "cpu",
    symbol: Annotated[
        Sequence[str],
        Option("The size of a symbol that the page shows first; may be repeated.", "NAME=SIZE"),
    ] = (),
    as_json: AsJson = False,
) -> None:
    """Write a page that shows how a model was sharded.

    A browser shows it, and needs no network.
    """
    report_page(
        directories,
        out,
        sizes=_sizes(symbol),
        machine=load_machine(machine),
        log=log,
        trace=trace,
    )
    size = out.stat().st_size
    shown = json.dumps({"out": str(out), "bytes": size}, ensure_ascii=False)
    typer.echo(shown if as_json else f"{out}: {size:,} bytes")


def _sizes(texts: Sequence[str]) -> dict[str, int]:
    """Returns the sizes of symbols by name."""
    sizes = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        number = whole(size)
        if not name or number is None:
            raise DirectoryError(f"--symbol {text}: expected a size, as in batch=32")
        sizes[name] = number
    return sizes

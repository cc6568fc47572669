"""`onnxpar report`: writes a page that shows how a model was sharded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import takes_options
from onnxpar.core.errors import DirectoryError
from onnxpar.report.page_data import page_data
from onnxpar.report.write_page import page_html
from onnxpar_format.new_file import check_file, new_file
from onnxpar_format.options import Option


@takes_options
def command(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR [DIR]", help="One or two outputs of `onnxpar shard`."),
    ],
    out: Annotated[Path, Option("The page to write.", "FILE", flags=("--out", "-o"))] = Path(
        "report.html"
    ),
    symbol: Annotated[
        Sequence[str],
        Option("The size of a symbol that the page shows first; may be repeated.", "NAME=SIZE"),
    ] = (),
) -> None:
    """Write a page that shows how a model was sharded, for a browser without a network."""
    if len(directories) > 2:
        raise DirectoryError(f"expected one directory or two to compare, got {len(directories)}")
    check_file(out, DirectoryError)
    data = page_data(directories, _sizes(symbol))
    title = " and ".join(str(directory) for directory in directories)
    with new_file(out, DirectoryError) as file:
        file.write_text(page_html(data, title), encoding="utf-8")
    typer.echo(f"{out}: {out.stat().st_size:,} bytes")


def _sizes(texts: Sequence[str]) -> dict[str, int]:
    """Returns the sizes of symbols by name."""
    sizes = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise DirectoryError(f"--symbol {text}: expected a size, as in batch=32")
        sizes[name] = int(size)
    return sizes

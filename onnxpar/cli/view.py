"""`onnxpar view`: a rank's graph in Netron."""

import threading
from pathlib import Path
from typing import Annotated

import netron
import typer

from onnxpar.artifacts.directory import MANIFEST, read_manifest
from onnxpar.cli.options import Artifacts
from onnxpar.errors import ArtifactError


def command(
    directory: Artifacts,
    rank: Annotated[int, typer.Option(min=0, help="Whose graph.")] = 0,
    program: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which program. Default: model, or training_model."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Show a rank's graph in Netron until interrupted."""
    path = graph_file(directory, program, rank)
    address = netron.start(
        str(path), address=(host, port) if port else (host, None), browse=browser
    )
    typer.echo(f"{path} at http://{address[0]}:{address[1]} (stop with Ctrl-C)")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        netron.stop(address)


def graph_file(directory: Path, program: str | None, rank: int) -> Path:
    """Returns the path of a rank's graph as the manifest names it.

    Args:
        directory: The artifact directory.
        program: Which program; None for the first, which computes the model.
        rank: Whose graph.

    Raises:
        ArtifactError: No manifest, no such program or rank, or the file is missing.
    """
    manifest = read_manifest(directory)
    try:
        programs = {name: list(entry["files"]) for name, entry in manifest["programs"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{directory / MANIFEST}: not readable: {error!r}") from None
    program = next(iter(programs), "model") if program is None else program
    if program not in programs:
        raise ArtifactError(f"{directory}: no program {program!r}, it has {sorted(programs)}")
    files = programs[program]
    if rank >= len(files):
        raise ArtifactError(f"{directory}: expected a rank from 0 to {len(files) - 1}, got {rank}")
    if files[rank] is None or not (directory / files[rank]).is_file():
        raise ArtifactError(f"{directory}: the graph of rank {rank} was not written")
    return directory / str(files[rank])

"""`onnxpar view`: opens a rank's graph in Netron."""

import json
import os
import webbrowser
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from onnxpar.cli.netron_server import NetronServer
from onnxpar.cli.options import AsJson, Directory, takes_options
from onnxpar.core.errors import DirectoryError, OnnxparError
from onnxpar.emit.read_manifest import read_manifest
from onnxpar.frontend.load import read
from onnxpar.report.read_directory import blamed_on_report, read_report
from onnxpar.report.simple_graph import simple_graph
from onnxpar_format.option import Option


@takes_options
def command(
    directory: Directory,
    rank: Annotated[int, Option("The rank.", "R", minimum=0)] = 0,
    program: Annotated[
        str | None, Option("Program to show. Default: the first one that the rank runs.", "NAME")
    ] = None,
    host: Annotated[str, Option("Address to serve on.", "ADDRESS")] = "localhost",
    port: Annotated[
        int, Option("Port; 0 chooses a free one.", "PORT", minimum=0, maximum=65535)
    ] = 0,
    browser: Annotated[bool, Option("Open a browser.")] = True,
    simple: Annotated[
        bool,
        Option(
            "Show one node for each node of the model, and the collectives. Nodes that pad, mask "
            "or compute sizes are in functions, or left out.",
            flags=("--simple",),
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a rank's graph in Netron until interrupted."""
    path = graph_file(directory, program, rank)
    with TemporaryDirectory(prefix="onnxpar-view-") as folder:
        files = served_files(directory)
        if simple:
            path = simple_file(directory, path, program, Path(folder))
        try:
            server = NetronServer(path.name, {**files, path.name: path}, host, port)
        except OSError as error:
            text = f"--host {host} --port {port}: {error.strerror or error}"
            raise OnnxparError(text) from None
        with server:
            shown = json.dumps({"file": str(path), "url": server.url}, ensure_ascii=False)
            typer.echo(shown if as_json else f"{path} at {server.url} (stop with Ctrl-C)")
            if browser:
                webbrowser.open(server.url)
            with suppress(KeyboardInterrupt):
                server.serve_forever()


def served_files(directory: Path) -> dict[str, Path]:
    """Returns the files of a directory that its manifest names, without links out of it.

    Raises:
        DirectoryError: There is no readable manifest.
    """
    folder = directory.resolve()
    files = {name: (folder / name).resolve() for name in read_manifest(directory)["files"]}
    return {name: path for name, path in files.items() if path.is_relative_to(folder)}


def simple_file(directory: Path, path: Path, program: str | None, folder: Path) -> Path:
    """Writes the reduced graph of a rank's graph to a folder, and returns its path.

    Args:
        directory: The directory.
        path: The rank's graph in it.
        program: The program that the user named.
        folder: Where to write.

    Raises:
        DirectoryError: The directory has no report of how the model was sharded.
    """
    with blamed_on_report(directory):
        report = read_report(directory)
        found = read_report(directory, program=program) if program in report["programs"] else report
        graph = simple_graph(read(path), found["nodes"])
    target = folder / path.name.replace(".onnx", ".simple.onnx")
    target.write_bytes(graph.SerializeToString())
    return target


def graph_file(directory: Path, program: str | None, rank: int) -> Path:
    """Returns the path of a rank's graph as the manifest names it.

    Args:
        directory: The directory.
        program: Which program; None for the first that the rank runs. For a program that runs
            through the stages of a pipeline, the first program of the rank's stage is shown.
        rank: Rank whose graph is shown.

    Raises:
        DirectoryError: No manifest, no such program or rank, or the file is missing.
    """
    manifest = read_manifest(directory)
    programs = {name: entry["files"] for name, entry in manifest["programs"].items()}
    staged = (manifest.get("pipeline") or {"programs": {}})["programs"]
    replaced = {n: [x for e in split for x in e.values()] for n, split in staged.items()}
    count = manifest["devices"]
    known = sorted({*programs, *replaced})
    if program is not None and program not in known:
        raise DirectoryError(f"{directory}: no program {program!r}; it has {', '.join(known)}")
    if rank >= count:
        raise DirectoryError(f"{directory}: expected a rank from 0 to {count - 1}, got {rank}")
    wanted = list(programs) if program is None else [program, *replaced.get(program, ())]
    mine = {n: f[rank] for n, f in programs.items() if f[rank] is not None}
    name: str | None = next((mine[name] for name in wanted if name in mine), None)
    found = None if name is None else directory / name
    if found is None and mine:
        raise DirectoryError(
            f"{directory}: rank {rank} does not run {program!r}; it runs {sorted(mine)}"
        )
    if found is None or not os.path.isfile(found):
        raise DirectoryError(f"{directory}: the graph of rank {rank} was not written")
    return found

"""`onnxpar checkpoint`: converts checkpoints for another mesh or another program."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnxpar.cli.options import AsJson, takes_options
from onnxpar_format.options import Option

if TYPE_CHECKING:
    from onnxpar.api.runtime import Exported, Made

app = typer.Typer(no_args_is_help=True, help="Reshard, merge or export checkpoints.")

SourceFolder = Annotated[
    Path,
    typer.Argument(
        metavar="SRC", help="A checkpoint, or a folder whose last complete checkpoint is used."
    ),
]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The checkpoint to write.")]
Verify = Annotated[
    bool,
    Option(
        "Compare the SHA-256 of SRC's files, not only the checksum of each tensor.",
        flags=("--verify",),
    ),
]


@app.command()
@takes_options
def reshard(
    source: SourceFolder,
    target: Target,
    to: Annotated[Path, Option("Output of `onnxpar shard --train` for the new mesh.", "DIR")],
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Reshard a checkpoint for another mesh."""
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    _print(runtime.reshard(source, target, to, verify=verify), as_json)


@app.command()
@takes_options
def merge(
    source: SourceFolder, target: Target, verify: Verify = False, as_json: AsJson = False
) -> None:
    """Merge the shards of a checkpoint into complete tensors."""
    from onnxpar.api import runtime

    _print(runtime.merge(source, target, verify=verify), as_json)


@app.command()
@takes_options
def export(
    source: SourceFolder,
    output: Annotated[
        Path, Option("A .onnx or .safetensors file.", "FILE", flags=("-o", "--output"))
    ],
    model: Annotated[
        Path | None, Option("For .onnx: the model that was sharded and trained.", "MODEL")
    ] = None,
    tie: Annotated[
        Sequence[str], Option("For .onnx: the same --tie as for `shard`; may be repeated.", "A=B")
    ] = (),
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """Write the trained parameters to a .onnx or .safetensors file.

    The .safetensors file has them by name, for PyTorch.
    """
    from onnxpar.api import runtime

    made, exported = runtime.export_checkpoint(source, output, model, tie, verify=verify)
    if exported is None:
        _print(made, as_json)
    elif as_json:
        _print_json(exported, step=made.step)
    else:
        typer.echo(f"{exported}; after step {made.step}")


def _print(made: "Made", as_json: bool) -> None:
    """Prints which files were written."""
    if as_json:
        _print_json(made)
        return
    files = "1 file" if made.files == 1 else f"{made.files} files"
    typer.echo(
        f"{made.path}: {made.tensors} tensors in {files}, {made.bytes:,} bytes; after step "
        f"{made.step}"
    )


def _print_json(what: "Made | Exported", **more: int) -> None:
    """Prints the fields of what was written as JSON."""
    paths = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(what).items()}
    typer.echo(json.dumps(paths | more, indent=2, ensure_ascii=False))

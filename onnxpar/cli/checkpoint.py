"""`onnxpar checkpoint`: converts checkpoints for another mesh or another program."""

from pathlib import Path
from typing import Annotated

import typer

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
    typer.Option(
        "--verify", help="Compare the SHA-256 of SRC's files, not only the sum of each tensor."
    ),
]


@app.command()
def reshard(
    source: SourceFolder,
    target: Target,
    to: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Output of `onnxpar shard --train` for the new mesh."),
    ],
    verify: Verify = False,
) -> None:
    """Reshard a checkpoint for another mesh."""
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    typer.echo(runtime.reshard_checkpoint(source, target, to, verify=verify))


@app.command()
def merge(source: SourceFolder, target: Target, verify: Verify = False) -> None:
    """Merge the shards of a checkpoint into complete tensors."""
    from onnxpar.api import runtime

    typer.echo(runtime.merge_checkpoint(source, target, verify=verify))


@app.command()
def export(
    source: SourceFolder,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", help="A .onnx or .safetensors file."),
    ],
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="For .onnx: the model that was sharded and trained."),
    ] = None,
    tie: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A=B", help="For .onnx: the same --tie as for `shard`; may be repeated."
        ),
    ] = None,
    verify: Verify = False,
) -> None:
    """Write the trained parameters to a .onnx or .safetensors file.

    The .safetensors file has them by name, for PyTorch.
    """
    from onnxpar.api import runtime

    typer.echo(runtime.export_checkpoint(source, output, model, tie or (), verify=verify))

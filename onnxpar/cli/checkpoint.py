"""`onnxpar checkpoint`: other files of a checkpoint, for another mesh, another program."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Make other files of a checkpoint.")

SourceFolder = Annotated[
    Path,
    typer.Argument(metavar="SRC", help="A checkpoint, or a folder of them: the last whole one."),
]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The checkpoint to write.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Compare SHA-256 of SRC's files too, not sums alone.")
]


@app.command()
def reshard(
    source: SourceFolder,
    target: Target,
    to: Annotated[
        Path,
        typer.Option(metavar="DIR", help="What `onnxpar shard --train` wrote for the other mesh."),
    ],
    verify: Verify = False,
) -> None:
    """Write a checkpoint as the ranks of another mesh hold it."""
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    typer.echo(runtime.reshard_checkpoint(source, target, to, verify=verify))


@app.command()
def merge(source: SourceFolder, target: Target, verify: Verify = False) -> None:
    """Write a checkpoint with every tensor whole, as one device holds it."""
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
        typer.Option(metavar="MODEL", help="For .onnx: the model that was cut and trained."),
    ] = None,
    tie: Annotated[
        list[str] | None,
        typer.Option(metavar="A=B", help="For .onnx: as `shard` was given it; may be repeated."),
    ] = None,
    verify: Verify = False,
) -> None:
    """Write the trained parameters: the model with them, or by name for PyTorch."""
    from onnxpar.api import runtime

    typer.echo(runtime.export_checkpoint(source, output, model, tie or (), verify=verify))

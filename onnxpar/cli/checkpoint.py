"""`onnxpar checkpoint`: converts checkpoints for another mesh or another program."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import takes_options
from onnxpar_format.options import Option

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
) -> None:
    """Reshard a checkpoint for another mesh."""
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    typer.echo(runtime.reshard_checkpoint(source, target, to, verify=verify))


@app.command()
@takes_options
def merge(source: SourceFolder, target: Target, verify: Verify = False) -> None:
    """Merge the shards of a checkpoint into complete tensors."""
    from onnxpar.api import runtime

    typer.echo(runtime.merge_checkpoint(source, target, verify=verify))


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
) -> None:
    """Write the trained parameters to a .onnx or .safetensors file.

    The .safetensors file has them by name, for PyTorch.
    """
    from onnxpar.api import runtime

    typer.echo(runtime.export_checkpoint(source, output, model, tie, verify=verify))

"""`onnxpar run`: one run of the program on whole arrays."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `onnxpar shard` wrote.")],
    inputs: Annotated[
        Path, typer.Option(metavar="FILE", help=".npz file of whole arrays, named as the inputs.")
    ],
    outputs: Annotated[
        Path, typer.Option(metavar="FILE", help=".npz file to write, named as the outputs.")
    ],
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu or cuda.")] = "auto",
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write rank0000.log, rank0001.log, … to this folder."),
    ] = None,
    ort: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of onnxruntime; may be repeated."),
    ] = None,
    custom_ops: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A custom-op library of the model; may be repeated."),
    ] = None,
) -> None:
    """Run the program once on whole arrays: `mpirun -n N onnxpar run DIR …`."""
    from onnxpar import execute  # loads onnxruntime and MPI, which the other commands do without

    code = execute.run(
        directory,
        inputs,
        outputs,
        device=device,
        log_dir=log_dir,
        ort=ort or (),
        custom_ops=custom_ops or (),
    )
    raise typer.Exit(code)

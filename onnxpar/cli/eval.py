"""`onnxpar eval`: loss and accuracy over a source of data."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What `onnxpar shard --train` wrote.")
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="As of `onnxpar train`; of digits and idx:DIR the half that is not trained on.",
        ),
    ],
    parameters: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Trained parameters, as `onnxpar train --save` wrote them."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="B", help="Samples in a batch. Default: up to 256, as symbols allow."),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="accuracy: fail if there is none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu or cuda.")] = "auto",
    transport: Annotated[
        str, typer.Option(metavar="TRANSPORT", help="auto, mpi or threads.")
    ] = "auto",
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
    """Evaluate on a source of data: `mpirun -n N onnxpar eval DIR …`."""
    from onnxpar import execute  # loads onnxruntime and MPI, which the other commands do without

    code = execute.evaluate(
        directory,
        data,
        batch_size=batch_size,
        parameters=parameters,
        metric=metric,
        as_json=as_json,
        device=device,
        transport=transport,
        log_dir=log_dir,
        ort=ort or (),
        custom_ops=custom_ops or (),
    )
    raise typer.Exit(code)

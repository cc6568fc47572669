"""`onnxpar eval`: loss and accuracy over a source of data."""

from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import AsJson, CustomOps, Device, LogDir, Ort, TrainingArtifacts, Transport


def command(
    directory: TrainingArtifacts,
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
    as_json: AsJson = False,
    device: Device = "auto",
    transport: Transport = "auto",
    log_dir: LogDir = None,
    ort: Ort = None,
    custom_ops: CustomOps = None,
) -> None:
    """Evaluate on a source of data: `mpirun -n N onnxpar eval DIR …`."""
    # It loads onnxruntime and MPI, which the other commands do without.
    from onnxpar.api import runtime

    code = runtime.evaluate(
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

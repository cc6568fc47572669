"""`onnxpar run`: one run of the program on whole arrays."""

from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import Artifacts, CustomOps, Device, LogDir, Ort, Transport


def command(
    directory: Artifacts,
    inputs: Annotated[
        Path, typer.Option(metavar="FILE", help=".npz file of whole arrays, named as the inputs.")
    ],
    outputs: Annotated[
        Path, typer.Option(metavar="FILE", help=".npz file to write, named as the outputs.")
    ],
    device: Device = "auto",
    transport: Transport = "auto",
    log_dir: LogDir = None,
    ort: Ort = None,
    custom_ops: CustomOps = None,
) -> None:
    """Run the program once on whole arrays: `mpirun -n N onnxpar run DIR …`."""
    # It loads onnxruntime and MPI, which the other commands do without.
    from onnxpar.api import runtime

    code = runtime.run(
        directory,
        inputs,
        outputs,
        device=device,
        transport=transport,
        log_dir=log_dir,
        ort=ort or (),
        custom_ops=custom_ops or (),
    )
    raise typer.Exit(code)

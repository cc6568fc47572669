"""`onnxpar run`: runs the program once, on whole arrays."""

from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import Directory, takes_options
from onnxpar_format.option import Option
from onnxpar_format.options import DebugNan, Execution


@takes_options
def command(
    directory: Directory,
    inputs: Annotated[
        Path, Option(".npz file of whole arrays, with the names of the inputs.", "FILE")
    ],
    outputs: Annotated[Path, Option(".npz file to write, with the names of the outputs.", "FILE")],
    how: Execution,
    debug_nan: DebugNan = False,
) -> None:
    """Run the program once on whole arrays.

    Start it as `mpirun -n N onnxpar run DIR …`.
    """
    # It loads onnxruntime and MPI, which the other commands do without.
    from onnxpar.api import runtime

    raise typer.Exit(runtime.run(directory, inputs, outputs, how, debug_nan=debug_nan))

"""`onnxpar generate`: new tokens of a language model."""

import typer

from onnxpar.cli.options import Directory, takes_options
from onnxpar_format.options import Execution, GenerationRun


@takes_options
def command(directory: Directory, what: GenerationRun, how: Execution) -> None:
    """Generate tokens with a decoder that has a cache.

    Start it as `mpirun -n N onnxpar generate DIR …`.
    """
    # It loads onnxruntime and MPI, which the other commands do without.
    from onnxpar.api import runtime

    raise typer.Exit(runtime.generate(directory, what, how))

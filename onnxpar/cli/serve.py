"""`onnxpar serve`: a language model over HTTP."""

import typer

from onnxpar.cli.options import Directory, takes_options
from onnxpar_format.options import Execution, ServingRun


@takes_options
def command(directory: Directory, what: ServingRun, how: Execution) -> None:
    """Serve a decoder that has a cache, with OpenAI's endpoints for completions and chats.

    Start it as `mpirun -n N onnxpar serve DIR …`. It needs `pip install 'onnxpar[serve]'`.
    """
    # It loads onnxruntime and MPI, which the other commands do without.
    from onnxpar.api import runtime

    raise typer.Exit(runtime.serve(directory, what, how))

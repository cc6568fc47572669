"""`onnxpar serve`: a language model over HTTP."""

import typer

from onnxpar.cli.options import Directory, takes_options
from onnxpar_format.options import Execution, ServingRun


@takes_options
def command(directory: Directory, what: ServingRun, how: Execution) -> None:
    """Serve a decoder over HTTP, as OpenAI's servers do.

    The decoder must have a cache. The endpoints are those for completions and chats. Start it as
    `mpirun -n N onnxpar serve DIR …`. It needs `pip install 'onnxpar[serve]'`.
    """
    # It loads onnxruntime and MPI, which the other commands do without.
    from onnxpar.api import runtime

    raise typer.Exit(runtime.serve(directory, what, how))

"""`onnxpar launch`: mpirun under a supervisor, which restarts it after a rank has died."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import takes_options
from onnxpar_format.options import Option


@takes_options
def command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="-- train DIR …", help="The command of each rank.")
    ],
    ranks: Annotated[
        int | None,
        Option("Number of ranks. Default: as many as DIR needs.", "N", flags=("-n", "--ranks")),
    ] = None,
    retries: Annotated[int, Option("Restart up to K times when a rank fails.", "K")] = 0,
    fallback: Annotated[
        Sequence[Path],
        Option(
            "When no retries are left, continue with this directory, which was sharded for "
            "fewer ranks; may be repeated.",
            "DIR2",
        ),
    ] = (),
    mpirun: Annotated[
        Sequence[str],
        Option(
            "An option for mpirun, as in --mpirun=--bind-to --mpirun=core; may be repeated.",
            "OPTION",
        ),
    ] = (),
) -> None:
    """Train under mpirun, and restart after failures.

    Use it as `onnxpar launch -n N --retries K -- train DIR --checkpoint FOLDER …`. If a rank fails,
    all ranks stop, and training resumes from the last complete checkpoint.
    """
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    program = (sys.executable, "-m", "onnxpar.cli")
    job = runtime.Job(program, arguments, ranks, retries, fallback, mpirun)
    raise typer.Exit(runtime.supervise(job))

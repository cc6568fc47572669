"""`onnxpar launch`: mpirun under a supervisor, which restarts it after a rank has died."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="-- train DIR …", help="The command of each rank.")
    ],
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--ranks", metavar="N", help="Number of ranks. Default: as many as DIR needs."
        ),
    ] = None,
    retries: Annotated[
        int, typer.Option(metavar="K", help="Restart up to K times when a rank fails.")
    ] = 0,
    fallback: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR2",
            help="When no retries are left, continue with this directory, which was sharded for "
            "fewer ranks; may be repeated.",
        ),
    ] = None,
    mpirun: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION",
            help="An option for mpirun, as in --mpirun=--bind-to --mpirun=core; may be repeated.",
        ),
    ] = None,
) -> None:
    """Train under mpirun, and restart after failures.

    Use it as `onnxpar launch -n N --retries K -- train DIR --checkpoint FOLDER …`. If a rank fails,
    all ranks stop, and training resumes from the last complete checkpoint.
    """
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    program = (sys.executable, "-m", "onnxpar.cli")
    job = runtime.Job(program, arguments, ranks, retries, fallback or (), mpirun or ())
    raise typer.Exit(runtime.supervise(job))

"""`onnxpar launch`: mpirun under a supervisor, which restarts training after a rank has died."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from onnxpar.cli.options import takes_options
from onnxpar_format.option import Option


@takes_options
def command(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND …",
            help="The command of each rank: run, generate, serve, train or eval with DIR; or a "
            "program of your own.",
        ),
    ],
    ranks: Annotated[
        int | None,
        Option(
            "Number of ranks. Default: as many as DIR needs.",
            "N",
            flags=("-n", "--ranks"),
            minimum=1,
        ),
    ] = None,
    retries: Annotated[
        int, Option("Restart up to K times when a rank fails: `train`, or your program.", "K")
    ] = 0,
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
    keep_placement: Annotated[
        bool,
        Option(
            "Leave ranks on the machines where mpirun places them. Default: several machines get "
            "the ranks between which most is sent.",
            flags=("--keep-placement",),
        ),
    ] = False,
) -> None:
    """Start all ranks of a command, and restart training after failures.

    Use it as `onnxpar launch -- run DIR …`, or `onnxpar launch --retries K -- train DIR
    --checkpoint FOLDER …`. If a rank fails, all ranks stop, and training resumes from the last
    complete checkpoint. Programs of your own need the number of ranks: `onnxpar launch -n 4 --
    python fit.py`. `verify` runs all ranks in one process, and is started without it.
    """
    # It loads onnxruntime, which the other commands do without.
    from onnxpar.api import runtime

    program = (sys.executable, "-m", "onnxpar.cli")
    job = runtime.Job(program, arguments, ranks, retries, fallback, mpirun, keep_placement)
    raise typer.Exit(runtime.supervise(job))

"""`onnxpar train`: trains on a source of data."""

import typer

from onnxpar.cli.options import TrainingDirectory, takes_options
from onnxpar_format.options import Execution, TrainingRun


@takes_options
def command(directory: TrainingDirectory, wanted: TrainingRun, how: Execution) -> None:
    """Train a model on data.

    Start it as `mpirun -n N onnxpar train DIR …`.
    """
    # It loads onnxruntime and MPI, which the other commands do without.
    from onnxpar.api import runtime

    raise typer.Exit(runtime.train(directory, wanted, how))

"""`onnxpar eval`: loss and accuracy over a source of data."""

import typer

from onnxpar.cli.options import TrainingDirectory, takes_options
from onnxpar_format.options import EvaluationRun, Execution


@takes_options
def command(directory: TrainingDirectory, wanted: EvaluationRun, how: Execution) -> None:
    """Evaluate a model on data.

    Start it as `mpirun -n N onnxpar eval DIR …`.
    """
    # It loads onnxruntime and MPI, which the other commands do without.
    from onnxpar.api import runtime

    raise typer.Exit(runtime.evaluation(directory, wanted, how))

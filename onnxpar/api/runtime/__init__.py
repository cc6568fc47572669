"""The one seam from the transformer to the runtime: running and verifying what has been cut.

Importing this package loads onnxruntime and the collective library. So the commands import it when
they are called, and nothing else of `onnxpar` does.
"""

from onnxpar.api.runtime.checkpoints import export_checkpoint, merge_checkpoint, reshard_checkpoint
from onnxpar.api.runtime.commands import (
    evaluate,
    launch,
    parse_case,
    report_json,
    run,
    train,
    verify,
)
from onnxpar.api.runtime.functions import Call, open_program, started
from onnxpar_runtime.training.verify import TrainingCase
from onnxpar_runtime.verify import Case

__all__ = [
    "Call",
    "Case",
    "TrainingCase",
    "evaluate",
    "export_checkpoint",
    "launch",
    "merge_checkpoint",
    "open_program",
    "parse_case",
    "report_json",
    "reshard_checkpoint",
    "run",
    "started",
    "train",
    "verify",
]

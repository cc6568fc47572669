"""The seam from the transformer to the runtime: running, training, verifying.

Takes directories and the options of commands; gives exit codes and reports. Begin with
`verification`. Importing a name loads onnxruntime and the collective library, so the commands and
`onnxpar.shard` import this package when they are called. Each module is loaded when one of its
names is first used: the transformer, which `verify` needs, takes a second that every rank of
`mpirun onnxpar run` would waste.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxpar.api.export_model import Exported
    from onnxpar.api.runtime.export_checkpoint import export_checkpoint
    from onnxpar.api.runtime.functions import Call, open_program, started
    from onnxpar.api.runtime.pipeline_times import pipeline_times
    from onnxpar.api.runtime.verification import (
        dump_values,
        first_difference,
        parse_case,
        report_json,
        verify,
    )
    from onnxpar_format.options import VerifyOptions
    from onnxpar_runtime.checkpoint.reshard import Made, merge, reshard
    from onnxpar_runtime.commands import run
    from onnxpar_runtime.doctor import examine
    from onnxpar_runtime.generation.commands import generate
    from onnxpar_runtime.serving.commands import serve
    from onnxpar_runtime.supervisor import Job, supervise
    from onnxpar_runtime.training.commands import evaluation, train
    from onnxpar_runtime.verify.bisect import Bisection
    from onnxpar_runtime.verify.findings import Case, TrainingCase

__all__ = [
    "Bisection",
    "Call",
    "Case",
    "Exported",
    "Job",
    "Made",
    "TrainingCase",
    "VerifyOptions",
    "dump_values",
    "evaluation",
    "examine",
    "export_checkpoint",
    "first_difference",
    "generate",
    "merge",
    "open_program",
    "parse_case",
    "pipeline_times",
    "report_json",
    "reshard",
    "run",
    "serve",
    "started",
    "supervise",
    "train",
    "verify",
]

_HOMES = {
    "Bisection": "onnxpar_runtime.verify.bisect",
    "Call": "onnxpar.api.runtime.functions",
    "Case": "onnxpar_runtime.verify.findings",
    "Exported": "onnxpar.api.export_model",
    "Job": "onnxpar_runtime.supervisor",
    "Made": "onnxpar_runtime.checkpoint.reshard",
    "TrainingCase": "onnxpar_runtime.verify.findings",
    "VerifyOptions": "onnxpar_format.options",
    "dump_values": "onnxpar.api.runtime.verification",
    "evaluation": "onnxpar_runtime.training.commands",
    "examine": "onnxpar_runtime.doctor",
    "export_checkpoint": "onnxpar.api.runtime.export_checkpoint",
    "first_difference": "onnxpar.api.runtime.verification",
    "generate": "onnxpar_runtime.generation.commands",
    "merge": "onnxpar_runtime.checkpoint.reshard",
    "open_program": "onnxpar.api.runtime.functions",
    "pipeline_times": "onnxpar.api.runtime.pipeline_times",
    "parse_case": "onnxpar.api.runtime.verification",
    "report_json": "onnxpar.api.runtime.verification",
    "reshard": "onnxpar_runtime.checkpoint.reshard",
    "run": "onnxpar_runtime.commands",
    "serve": "onnxpar_runtime.serving.commands",
    "started": "onnxpar.api.runtime.functions",
    "supervise": "onnxpar_runtime.supervisor",
    "train": "onnxpar_runtime.training.commands",
    "verify": "onnxpar.api.runtime.verification",
}


def __getattr__(name: str) -> Any:
    """Loads a name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value

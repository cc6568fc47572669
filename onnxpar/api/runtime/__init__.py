"""The seam from the transformer to the runtime: running, training, verifying.

Takes directories and the options of commands; gives exit codes and reports. Begin with
`verification`. Importing a name loads onnxruntime and the collective library, so the commands and
`onnxpar.shard` import this package when they are called. Each module is loaded when one of its
names is first used: the transformer, which `verify` needs, takes a second that every rank of
`mpirun onnxpar run` would waste.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxpar.core.garbage import no_collection

if TYPE_CHECKING:
    from onnxpar.api.export_model import Exported
    from onnxpar.api.runtime.checkpoint_weights import export_checkpoint
    from onnxpar.api.runtime.functions import (
        Call,
        described,
        from_first_rank,
        on_all_ranks,
        open_program,
        same_call,
        share_array,
        started,
    )
    from onnxpar.api.runtime.simulated_pipeline import pipeline_times
    from onnxpar.api.runtime.verification import (
        dump_values,
        first_difference,
        parse_case,
        report_json,
        verify,
    )
    from onnxpar_format.options import VerifyOptions
    from onnxpar_runtime.checkpoint.contents import Checkpoint
    from onnxpar_runtime.checkpoint.layout import kept_tensors
    from onnxpar_runtime.checkpoint.reshard import Made, export_weights, merge, reshard
    from onnxpar_runtime.checkpoint.whole import check_weight, write_whole
    from onnxpar_runtime.commands import run
    from onnxpar_runtime.doctor import examine
    from onnxpar_runtime.generation.commands import generate
    from onnxpar_runtime.interrupts import leaving_no_folders
    from onnxpar_runtime.manifest import Manifest
    from onnxpar_runtime.serving.commands import serve
    from onnxpar_runtime.supervisor import Job, supervise
    from onnxpar_runtime.training.commands import evaluation, train
    from onnxpar_runtime.user_code import named_function, users_code
    from onnxpar_runtime.verify.bisect import Bisection
    from onnxpar_runtime.verify.findings import Case, TrainingCase

__all__ = [
    "Bisection",
    "Call",
    "Case",
    "Checkpoint",
    "Exported",
    "Job",
    "Made",
    "Manifest",
    "TrainingCase",
    "VerifyOptions",
    "check_weight",
    "described",
    "dump_values",
    "evaluation",
    "examine",
    "export_checkpoint",
    "export_weights",
    "first_difference",
    "from_first_rank",
    "generate",
    "kept_tensors",
    "leaving_no_folders",
    "merge",
    "named_function",
    "on_all_ranks",
    "open_program",
    "parse_case",
    "pipeline_times",
    "report_json",
    "reshard",
    "run",
    "same_call",
    "serve",
    "share_array",
    "started",
    "supervise",
    "train",
    "users_code",
    "verify",
    "write_whole",
]

_HOMES = {
    "Bisection": "onnxpar_runtime.verify.bisect",
    "Call": "onnxpar.api.runtime.functions",
    "Case": "onnxpar_runtime.verify.findings",
    "Checkpoint": "onnxpar_runtime.checkpoint.contents",
    "Exported": "onnxpar.api.export_model",
    "Job": "onnxpar_runtime.supervisor",
    "Made": "onnxpar_runtime.checkpoint.reshard",
    "Manifest": "onnxpar_runtime.manifest",
    "TrainingCase": "onnxpar_runtime.verify.findings",
    "VerifyOptions": "onnxpar_format.options",
    "check_weight": "onnxpar_runtime.checkpoint.whole",
    "described": "onnxpar.api.runtime.functions",
    "dump_values": "onnxpar.api.runtime.verification",
    "evaluation": "onnxpar_runtime.training.commands",
    "examine": "onnxpar_runtime.doctor",
    "export_checkpoint": "onnxpar.api.runtime.checkpoint_weights",
    "export_weights": "onnxpar_runtime.checkpoint.reshard",
    "first_difference": "onnxpar.api.runtime.verification",
    "from_first_rank": "onnxpar.api.runtime.functions",
    "generate": "onnxpar_runtime.generation.commands",
    "kept_tensors": "onnxpar_runtime.checkpoint.layout",
    "leaving_no_folders": "onnxpar_runtime.interrupts",
    "merge": "onnxpar_runtime.checkpoint.reshard",
    "named_function": "onnxpar_runtime.user_code",
    "on_all_ranks": "onnxpar.api.runtime.functions",
    "open_program": "onnxpar.api.runtime.functions",
    "pipeline_times": "onnxpar.api.runtime.simulated_pipeline",
    "parse_case": "onnxpar.api.runtime.verification",
    "report_json": "onnxpar.api.runtime.verification",
    "reshard": "onnxpar_runtime.checkpoint.reshard",
    "run": "onnxpar_runtime.commands",
    "same_call": "onnxpar.api.runtime.functions",
    "serve": "onnxpar_runtime.serving.commands",
    "share_array": "onnxpar.api.runtime.functions",
    "started": "onnxpar.api.runtime.functions",
    "supervise": "onnxpar_runtime.supervisor",
    "train": "onnxpar_runtime.training.commands",
    "users_code": "onnxpar_runtime.user_code",
    "verify": "onnxpar.api.runtime.verification",
    "write_whole": "onnxpar_runtime.checkpoint.whole",
}


def __getattr__(name: str) -> Any:
    """Loads a name (PEP 562).

    Raises:
        LaunchError: onnxruntime is missing, too old, or installed twice; `examine` reports that.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "examine":
        import_module("onnxpar_runtime.installed").check_onnxruntime()
    with no_collection():
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value

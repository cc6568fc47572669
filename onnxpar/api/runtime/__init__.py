"""The seam from the transformer to the runtime: running, training and verifying what was divided.

Takes artifact directories and the options of commands; gives exit codes and reports. Begin with
`commands`. Importing a name loads onnxruntime and the collective library, so the commands and
`onnxpar.shard` import this package when they are called. Each module is loaded when one of its
names is first used: the transformer, which `verify` needs, takes a second that every rank of
`mpirun onnxpar run` would spend in vain.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxpar.api.runtime.checkpoints import merge_checkpoint, reshard_checkpoint
    from onnxpar.api.runtime.commands import evaluate, launch, run, train
    from onnxpar.api.runtime.export_checkpoint import export_checkpoint
    from onnxpar.api.runtime.functions import Call, open_program, started
    from onnxpar.api.runtime.verification import parse_case, report_json, verify
    from onnxpar_runtime.verify.findings import Case, TrainingCase, VerifyOptions

__all__ = [
    "Call",
    "Case",
    "TrainingCase",
    "VerifyOptions",
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

_HOMES = {
    "Call": "onnxpar.api.runtime.functions",
    "Case": "onnxpar_runtime.verify.findings",
    "TrainingCase": "onnxpar_runtime.verify.findings",
    "VerifyOptions": "onnxpar_runtime.verify.findings",
    "evaluate": "onnxpar.api.runtime.commands",
    "export_checkpoint": "onnxpar.api.runtime.export_checkpoint",
    "launch": "onnxpar.api.runtime.commands",
    "merge_checkpoint": "onnxpar.api.runtime.checkpoints",
    "open_program": "onnxpar.api.runtime.functions",
    "parse_case": "onnxpar.api.runtime.verification",
    "report_json": "onnxpar.api.runtime.verification",
    "reshard_checkpoint": "onnxpar.api.runtime.checkpoints",
    "run": "onnxpar.api.runtime.commands",
    "started": "onnxpar.api.runtime.functions",
    "train": "onnxpar.api.runtime.commands",
    "verify": "onnxpar.api.runtime.verification",
}


def __getattr__(name: str) -> Any:
    """Loads a name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value

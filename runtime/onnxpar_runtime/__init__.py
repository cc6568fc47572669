"""Runs rank graphs: sessions, training and pipelines over onnxruntime, one rank each.

Takes a directory (`manifest`), data and options; gives outputs, logs and checkpoints.
Begin with `session` (a forward program) and `training` (a step); `library` loads the collectives.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxpar_runtime.installed import check_onnxruntime

# When it is loaded, onnxruntime makes a database and an identity of the device in the user's cache
# folder, in every rank. `ORT_DISABLE_TELEMETRY=0` brings them back.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from onnxpar_runtime.collectives import OpCounter, Rank, World, custom_op_library
    from onnxpar_runtime.generation.generator import Generator
    from onnxpar_runtime.group import ThreadsGroup, run_threads
    from onnxpar_runtime.launch import guarded, init
    from onnxpar_runtime.manifest import Manifest
    from onnxpar_runtime.session import Session
    from onnxpar_runtime.training.group import TrainerGroup
    from onnxpar_runtime.training.trainer import Trainer

__all__ = [
    "Generator",
    "Manifest",
    "OpCounter",
    "Rank",
    "Session",
    "ThreadsGroup",
    "Trainer",
    "TrainerGroup",
    "World",
    "custom_op_library",
    "guarded",
    "init",
    "run_threads",
]

# Imported when they are used: running a model starts faster, and the doctor, which is in this
# package, works without onnxruntime.
_HOMES = {
    "Generator": "onnxpar_runtime.generation.generator",
    "Manifest": "onnxpar_runtime.manifest",
    "OpCounter": "onnxpar_runtime.op_counter",
    "Rank": "onnxpar_runtime.collectives",
    "Session": "onnxpar_runtime.session",
    "ThreadsGroup": "onnxpar_runtime.group",
    "Trainer": "onnxpar_runtime.training.trainer",
    "TrainerGroup": "onnxpar_runtime.training.group",
    "World": "onnxpar_runtime.collectives",
    "custom_op_library": "onnxpar_runtime.library",
    "guarded": "onnxpar_runtime.launch",
    "init": "onnxpar_runtime.launch",
    "run_threads": "onnxpar_runtime.group",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562).

    Raises:
        LaunchError: onnxruntime is missing, too old, or installed twice.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_onnxruntime()
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})

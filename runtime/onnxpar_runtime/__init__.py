"""Runs rank graphs: sessions, training and pipelines over onnxruntime, one rank each.

Takes a directory (`manifest`), data and options; gives outputs, logs and checkpoints.
Begin with `session` (a forward program) and `training` (a step); `library` loads the collectives.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# When it is loaded, onnxruntime makes a database and an identity of the device in the user's cache
# folder, in every rank. `ORT_DISABLE_TELEMETRY=0` brings them back.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from onnxpar_runtime.installed import check_onnxruntime

check_onnxruntime()

from onnxpar_runtime.collectives import OpCounter, Rank, World, custom_op_library
from onnxpar_runtime.group import ThreadsGroup, run_threads
from onnxpar_runtime.launch import guarded, init
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.session import Session

if TYPE_CHECKING:
    from onnxpar_runtime.generation.generator import Generator
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

# Imported only when they are used, so that running a model starts faster.
_LAZY = {
    "Generator": "onnxpar_runtime.generation.generator",
    "Trainer": "onnxpar_runtime.training.trainer",
    "TrainerGroup": "onnxpar_runtime.training.group",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

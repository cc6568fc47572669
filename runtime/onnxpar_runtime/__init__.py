"""Running rank graphs: collectives for onnxruntime, sessions and launching."""

from onnxpar_runtime.collectives import OpCounter, Rank, World, custom_op_library
from onnxpar_runtime.group import ThreadsGroup, run_threads
from onnxpar_runtime.launch import guarded, init
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.session import Session

__all__ = [
    "Manifest",
    "OpCounter",
    "Rank",
    "Session",
    "ThreadsGroup",
    "World",
    "custom_op_library",
    "guarded",
    "init",
    "run_threads",
]

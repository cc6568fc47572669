"""Cuts ONNX models into per-rank ONNX graphs. The runtime that executes them is `onnxpar_runtime`.

Names are loaded when they are first used: the transformer takes a second to load, which every rank
of `mpirun -n 8 onnxpar run` would otherwise spend in vain.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxpar.annotating import annotate
    from onnxpar.errors import OnnxparError
    from onnxpar.functional import Sharded, shard
    from onnxpar.layout import Layout
    from onnxpar.mesh import Mesh
    from onnxpar.passes.load import load
    from onnxpar.passes.part import part
    from onnxpar.pipeline import plan
    from onnxpar.pipeline import shard as shard_model
    from onnxpar.sharding import Sharding
    from onnxpar.strategy import Strategy
    from onnxpar.symbols import Symbol
    from onnxpar.training.loss import LossKind, LossSpec
    from onnxpar.training.optimizer import OptimizerKind
    from onnxpar.training.prepare import TrainingSpec

__version__ = "0.1.0"

__all__ = [
    "Layout",
    "LossKind",
    "LossSpec",
    "Mesh",
    "OnnxparError",
    "OptimizerKind",
    "Sharded",
    "Sharding",
    "Strategy",
    "Symbol",
    "TrainingSpec",
    "annotate",
    "load",
    "part",
    "plan",
    "shard",
    "shard_model",
]

_HOMES = {
    "Layout": ("onnxpar.layout", "Layout"),
    "LossKind": ("onnxpar.training.loss", "LossKind"),
    "LossSpec": ("onnxpar.training.loss", "LossSpec"),
    "Mesh": ("onnxpar.mesh", "Mesh"),
    "OnnxparError": ("onnxpar.errors", "OnnxparError"),
    "OptimizerKind": ("onnxpar.training.optimizer", "OptimizerKind"),
    "Sharded": ("onnxpar.functional", "Sharded"),
    "Sharding": ("onnxpar.sharding", "Sharding"),
    "Strategy": ("onnxpar.strategy", "Strategy"),
    "Symbol": ("onnxpar.symbols", "Symbol"),
    "TrainingSpec": ("onnxpar.training.divide", "TrainingSpec"),
    "annotate": ("onnxpar.annotating", "annotate"),
    "load": ("onnxpar.passes.load", "load"),
    "part": ("onnxpar.passes.part", "part"),
    "plan": ("onnxpar.pipeline", "plan"),
    "shard": ("onnxpar.functional", "shard"),
    "shard_model": ("onnxpar.pipeline", "shard"),
}


def __getattr__(name: str) -> Any:
    """Loads a public name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxpar' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})

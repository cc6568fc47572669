"""Shards ONNX models into one ONNX graph per rank. `onnxpar_runtime` executes them.

Names are loaded when they are first used: the transformer takes a second to load, and the ranks of
`mpirun -n 8 onnxpar run` do not need it.
"""

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from onnxpar.core.errors import OnnxparError as OnnxparError
from onnxpar.core.version import __version__ as __version__
from onnxpar_format.texts import naming_arguments

if TYPE_CHECKING:
    from onnxpar.api.annotate import annotate
    from onnxpar.api.functional import Sharded, shard
    from onnxpar.api.pytorch.from_torch import from_torch as from_torch
    from onnxpar.api.pytorch.optimizer_state import optimizer_state_dict as optimizer_state_dict
    from onnxpar.api.pytorch.shard_module import ShardedModule as ShardedModule
    from onnxpar.api.pytorch.shard_module import shard_module as shard_module
    from onnxpar.api.pytorch.state_dict import state_dict as state_dict
    from onnxpar.api.pytorch.write_checkpoint import write_checkpoint as write_checkpoint
    from onnxpar.api.shard_model import plan
    from onnxpar.api.shard_model import shard_model as shard_model
    from onnxpar.autodiff.append_loss import LossKind, LossSpec
    from onnxpar.autodiff.optimizer import OptimizerKind
    from onnxpar.autodiff.training_program import TrainingSpec
    from onnxpar.core.layout import Layout
    from onnxpar.core.mesh import Mesh
    from onnxpar.core.sharding import Sharding
    from onnxpar.core.symbols import Symbol
    from onnxpar.frontend.load import load
    from onnxpar.frontend.model_part import part
    from onnxpar.strategy import Strategy

# Without the functions that need PyTorch: `from onnxpar import *` works where it is not installed.
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
    "Layout": ("onnxpar.core.layout", "Layout"),
    "LossKind": ("onnxpar.autodiff.append_loss", "LossKind"),
    "LossSpec": ("onnxpar.autodiff.append_loss", "LossSpec"),
    "Mesh": ("onnxpar.core.mesh", "Mesh"),
    "OptimizerKind": ("onnxpar.autodiff.optimizer", "OptimizerKind"),
    "Sharded": ("onnxpar.api.functional", "Sharded"),
    "ShardedModule": ("onnxpar.api.pytorch.shard_module", "ShardedModule"),
    "Sharding": ("onnxpar.core.sharding", "Sharding"),
    "Strategy": ("onnxpar.strategy", "Strategy"),
    "Symbol": ("onnxpar.core.symbols", "Symbol"),
    "TrainingSpec": ("onnxpar.autodiff.training_program", "TrainingSpec"),
    "annotate": ("onnxpar.api.annotate", "annotate"),
    "from_torch": ("onnxpar.api.pytorch.from_torch", "from_torch"),
    "load": ("onnxpar.frontend.load", "load"),
    "optimizer_state_dict": ("onnxpar.api.pytorch.optimizer_state", "optimizer_state_dict"),
    "part": ("onnxpar.frontend.model_part", "part"),
    "plan": ("onnxpar.api.shard_model", "plan"),
    "shard": ("onnxpar.api.functional", "shard"),
    "shard_model": ("onnxpar.api.shard_model", "shard_model"),
    "shard_module": ("onnxpar.api.pytorch.shard_module", "shard_module"),
    "state_dict": ("onnxpar.api.pytorch.state_dict", "state_dict"),
    "write_checkpoint": ("onnxpar.api.pytorch.write_checkpoint", "write_checkpoint"),
}


def __getattr__(name: str) -> Any:
    """Loads a public name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxpar' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    if isinstance(value, FunctionType):
        value = naming_arguments(OnnxparError)(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *_HOMES})

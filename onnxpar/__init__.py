"""Cuts ONNX models into per-rank ONNX graphs. The runtime that executes them is `onnxpar_runtime`."""

from onnxpar.errors import OnnxparError
from onnxpar.layout import Layout
from onnxpar.mesh import Mesh
from onnxpar.passes.load import load
from onnxpar.pipeline import plan
from onnxpar.pipeline import shard as shard_model
from onnxpar.sharding import Sharding
from onnxpar.strategy import Strategy
from onnxpar.symbols import Symbol

__version__ = "0.1.0"

__all__ = [
    "Layout",
    "Mesh",
    "OnnxparError",
    "Sharding",
    "Strategy",
    "Symbol",
    "load",
    "plan",
    "shard_model",
]

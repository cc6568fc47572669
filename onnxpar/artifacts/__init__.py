"""The output directory: one graph for each rank, weight shards, manifest."""

from onnxpar.artifacts.directory import check_target
from onnxpar.artifacts.output import write

__all__ = ["check_target", "write"]

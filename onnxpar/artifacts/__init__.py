"""The output directory: one graph for each rank, weight shards, manifest."""

from onnxpar.artifacts.output import write

__all__ = ["write"]

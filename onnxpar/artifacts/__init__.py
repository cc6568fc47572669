"""The output directory: one graph for each rank, weight shards, manifest."""

from onnxpar.artifacts.directory import check_target
from onnxpar.artifacts.file import check_file, new_file
from onnxpar.artifacts.output import write

__all__ = ["check_file", "check_target", "new_file", "write"]

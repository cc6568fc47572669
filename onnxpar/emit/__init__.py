"""The output directory: one graph for each rank, weight shards, manifest."""

from onnxpar.emit.directory import check_target
from onnxpar.emit.new_file import check_file, new_file
from onnxpar.emit.write_directory import write

__all__ = ["check_file", "check_target", "new_file", "write"]

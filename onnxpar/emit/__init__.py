"""From a program of all ranks to files: rank graphs, weight shards, manifest.

Takes partitioned models; gives a directory that appears complete or not at all.
Begin with `write_directory`. `rank_graph` makes one rank's graph, `weight_layout` decides which
file holds which shard, and `weight_files` writes these files.
"""

from onnxpar.emit.atomic_directory import check_target
from onnxpar.emit.write_directory import write

__all__ = ["check_target", "write"]

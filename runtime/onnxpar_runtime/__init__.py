"""Running rank graphs: collectives for onnxruntime, sessions and launching."""

from onnxpar_runtime.collectives import OpCounter, Rank, World, custom_op_library

__all__ = ["OpCounter", "Rank", "World", "custom_op_library"]

"""Attention, in the default domain and in onnxruntime's: by heads, batch and sequence."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

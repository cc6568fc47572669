"""Attention, in the default domain and in onnxruntime's: heads and batch are split freely, the sequence by its own form."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

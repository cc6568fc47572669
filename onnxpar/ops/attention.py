"""Attention, in the default domain and in onnxruntime's: by heads, batch and sequence."""

from onnxpar.ops import attention_contrib
from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = (*attention_contrib.DEFS,)

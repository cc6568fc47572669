"""Pooling over windows and over all of space."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

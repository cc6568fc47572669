"""Resize and Upsample."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

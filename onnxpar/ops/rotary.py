"""Rotary position embedding."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

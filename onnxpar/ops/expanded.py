"""Operators that are small programs of others: what of them is not left to their body."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

"""Sequences and optionals of tensors."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

"""Convolutions: channels, groups, the batch, and space with halo exchange."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

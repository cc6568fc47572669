"""Normalisations over groups of channels and over single instances."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

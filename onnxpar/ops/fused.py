"""Activations, normalisations and products that onnxruntime fuses (domain `com.microsoft`)."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

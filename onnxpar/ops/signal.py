"""Fourier transforms, windows and filter banks."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

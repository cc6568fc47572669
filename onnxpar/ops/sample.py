"""Sampling at computed positions: grids, regions of interest, boxes."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

"""Linear quantisation, and products and convolutions of quantised tensors."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

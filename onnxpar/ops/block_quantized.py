"""Products and look-ups with weights of few bits, in blocks along the contraction."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

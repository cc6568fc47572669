"""BatchNormalization: statistics over the batch and over all that splits it."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

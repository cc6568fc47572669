"""If, Loop and Scan: the rules of the nodes inside their bodies make theirs."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

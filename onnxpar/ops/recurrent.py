"""RNN, GRU and LSTM."""

from onnxpar.ops.registry import OpDef

DEFS: tuple[OpDef, ...] = ()

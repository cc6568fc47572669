"""The one table of all operators."""

from onnxpar.ops import elementwise, matmul
from onnxpar.ops.registry import Registry

REGISTRY = Registry.join((matmul.DEFS, elementwise.DEFS))

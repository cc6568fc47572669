"""Metadata keys with which passes mark models and nodes, for other passes and for people."""

PREFIX = "onnxpar."
"""What all of them begin with."""

GRADIENT_OF = "onnxpar.gradient_of"
"""Metadata key of a node that autodiff added: name of the node whose gradient it computes."""

VIRTUAL_STAGE = "onnxpar.virtual_stage"
"""Metadata key of a node: number of the virtual stage that it belongs to."""

RECOMPUTED_FROM = "onnxpar.recomputed_from"
"""Metadata key of a recomputed copy of a node: that node's name."""

EXPANDED_FROM = "onnxpar.expanded_from"
"""Metadata key of a node of an operator's body: name of the node that the body replaces."""
EXPANDED_OPERANDS = "onnxpar.expanded_operands"
"""Metadata key of the same node: JSON, names of the operands and results of the replaced node."""
NOT_EXPANDED = "onnxpar.not_expanded"
"""Metadata key of a node that its operator's body cannot replace: the reason."""

ANNOTATION = "onnxpar.annotation"
"""Metadata key of a model: the part of its strategy that ONNX's multi-device fields cannot express,
as JSON."""

CAPTURED = "onnxpar.captured"
"""Metadata key of a node: how many of its last operands only its bodies read."""

PART_OF = "onnxpar.part_of"
"""Metadata key of a node that computes one part of a result: name of the node that it replaces."""
PART_RESULT = "onnxpar.part_result"
"""Metadata key of the same node: index of the result of that node which it makes."""

VALUE, OVER, BEFORE, AFTER, BYTES, FOR = "value", "over", "before", "after", "bytes", "for"
"""Metadata keys of a collective, short since viewers cut them: the value that it transfers, the
mesh axes over which, its layouts before and after, the bytes that a rank sends, and who needs it.
"""

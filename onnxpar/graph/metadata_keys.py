"""Metadata keys by which the stages mark models and nodes, for one another and for people."""

GRADIENT_OF = "onnxpar.gradient_of"
"""Metadata key of a node that autodiff added: name of the node whose gradient it belongs to."""

VIRTUAL_STAGE = "onnxpar.virtual_stage"
"""Metadata key of a node: number of the virtual stage that it belongs to."""

RECOMPUTED_FROM = "onnxpar.recomputed_from"
"""Metadata key of a node that computes anew what another node has computed: that node's name."""

EXPANDED_FROM = "onnxpar.expanded_from"
"""Metadata key of a node of an operator's body: name of the node that the body replaces."""
EXPANDED_OPERANDS = "onnxpar.expanded_operands"
"""Metadata key beside it: JSON, names of the operands and results that the replaced node had."""
NOT_EXPANDED = "onnxpar.not_expanded"
"""Metadata key of a node whose operator has a body that it cannot be replaced by: the reason."""

ANNOTATION = "onnxpar.annotation"
"""Metadata key of a model: what its strategy says beyond ONNX's multi-device fields, as JSON."""

CAPTURED = "onnxpar.captured"
"""Metadata key of a node: the number of its last operands that are there for its bodies alone."""

"""Takes queries, keys and values that are packed into one operand apart, by a Split.

The packed dim holds all heads of queries, then those of keys, then those of values, so that no
shard of it has heads that belong together. If a projection makes the operand, its weight is a fused
weight like any other (`onnxpar.frontend.fused_weights`). onnxruntime-genai packs projections for
GroupQueryAttention.
"""

from copy import copy

import numpy as np
import onnx_ir as ir

from onnxpar.graph.names import names_of
from onnxpar.graph.new_nodes import constant
from onnxpar.ops.contrib_schemas import MICROSOFT

_PARTS = ("query", "key", "value")


def unpack_heads(model: ir.Model) -> bool:
    """Takes the packed operands of all attention nodes apart, in place.

    Args:
        model: The model, on which shape inference has run.

    Returns:
        Whether there were any.
    """
    graph, found = model.graph, False
    names = names_of(graph)
    for node in list(graph):
        widths = _widths(node)
        packed = node.inputs[0] if widths is not None else None
        if packed is None:
            continue
        name = names.fresh(f"{node.name}/Split")
        sizes = constant(names.fresh(f"{name}.sizes"), np.array(widths, np.int64))
        graph.register_initializer(sizes)
        parts = [
            ir.Value(name=names.fresh(f"{packed.name}.{part}"), type=copy(packed.type))
            for part in _PARTS
        ]
        axis = ir.AttrInt64("axis", -1)
        split = ir.Node("", "Split", [packed, sizes], [axis], outputs=parts, name=name)
        graph.insert_before(node, split)
        for index, value in enumerate(parts):
            node.replace_input_with(index, value)
        found = True
    return found


def _widths(node: ir.Node) -> tuple[int, int, int] | None:
    """Widths of queries, keys and values in a packed operand; None if a node has none."""
    if node.op_identifier() != (MICROSOFT, "GroupQueryAttention", ""):
        return None
    packed = len(node.inputs) > 2 and node.inputs[1] is None and node.inputs[2] is None
    value = node.inputs[0] if packed else None
    width = value.shape[-1] if value is not None and value.shape is not None else None
    heads = node.attributes.get_int("num_heads", 0)
    kv = node.attributes.get_int("kv_num_heads", 0)
    if not isinstance(width, int):
        return None
    size, rest = divmod(width, max(heads + 2 * kv, 1))
    return None if rest or not size else (heads * size, kv * size, kv * size)

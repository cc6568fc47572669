"""The width of a cache whose last dim a file leaves open, from the heads of its attention.

The builder of onnxruntime-genai names this dim `kv_cache_dim`. It is not open: keys of a head have
as many elements as its query (`com.microsoft::GroupQueryAttention`).
"""

import onnx_ir as ir

from onnxpar.ops.contrib_schemas import MICROSOFT

_PAST = (3, 4)  # keys and values, [batch, heads, past, width]


def size_caches(model: ir.Model) -> bool:
    """Replaces the symbols of such dims by numbers, in all inputs of a model.

    Args:
        model: A model whose shapes are inferred; the shapes of its inputs are changed.

    Returns:
        Whether anything was replaced.
    """
    inputs, sizes = set(model.graph.inputs), dict[str, int]()
    for node in model.graph:
        width = _width(node)
        for index in _PAST if width is not None else ():
            past = node.inputs[index] if index < len(node.inputs) else None
            if past is None or past not in inputs or past.shape is None or len(past.shape) != 4:
                continue
            dim = past.shape[3]
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None and width is not None:
                sizes[dim.value] = width
    for value in model.graph.inputs:
        dims = list(value.shape or ())
        if any(isinstance(dim, ir.SymbolicDim) and dim.value in sizes for dim in dims):
            value.shape = ir.Shape(
                [sizes.get(str(d.value), d) if isinstance(d, ir.SymbolicDim) else d for d in dims]
            )
    return bool(sizes)


def _width(node: ir.Node) -> int | None:
    """Returns the elements of a head of a node with one cache for groups of queries."""
    if node.op_identifier() != (MICROSOFT, "GroupQueryAttention", ""):
        return None
    query = node.inputs[0]
    hidden = query.shape[-1] if query is not None and query.shape is not None else None
    heads = node.attributes.get_int("num_heads", 0)
    if len(node.inputs) > 1 and node.inputs[1] is None:
        # Queries, keys and values are packed.
        heads += 2 * node.attributes.get_int("kv_num_heads", 0)
    if not isinstance(hidden, int) or heads < 1 or hidden % heads:
        return None
    return hidden // heads or None

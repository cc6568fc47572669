"""Unties scales, biases and statistics that an exporter merged without recording it.

PyTorch's tracing exporter makes one tensor of all equal initializers, such as the ones of every
LayerNormalization, or the zeros of biases and running means. If they were trained like this, layers
would share tensors that they do not share in the exported model; `untie` gives each layer its own
again. `onnxpar.parameters.restore_exported` restores files that record the parameters of each node.
"""

from collections.abc import Iterator, Sequence
from math import prod

import onnx_ir as ir

from onnxpar.core.name_patterns import listed
from onnxpar.graph.names import names_of
from onnxpar.ops.operand_roles import is_identity, is_scale_or_bias, is_statistic
from onnxpar.ops.registry import Registry
from onnxpar.parameters.origin import array_of, copy_of, is_floating, is_uniform, sizes


def untie(model: ir.Model, registry: Registry) -> tuple[str, ...]:
    """Gives scales, biases and running statistics tensors of their own if exporters merged them.

    Only tensors whose elements are all the same number, as in new layers, count as merged. If the
    exporter left an Identity in the place of a tensor, the tensor gets its name back; otherwise the
    first use keeps the name `x` and the others read the copies `x.1`, `x.2`…. The model is changed.

    Returns:
        A notice for each tensor that was untied.
    """
    graph = model.graph
    order = {id(node): i for i, node in enumerate(ir.traversal.RecursiveGraphIterator(graph))}
    names = names_of(graph, nodes=False)
    notices = []
    for name, value in list(graph.initializers.items()):
        uses = sorted(value.uses(), key=lambda use: (order[id(use[0])], use[1]))
        if len(uses) < 2 or not is_floating(value) or not _is_constant(value, uses, registry):
            continue
        copies = [copy for node, _ in uses for copy in _in_place_of(node, value, graph, registry)]
        uses = [use for use in uses if use[0].graph is not None]
        places = [(node, index) for node, index in uses if _is_place(node, index, registry)]
        # Other uses, such as an initial state, must not share a tensor with a scale or bias.
        if places and len(places) == len(uses):
            places.pop(0)
        for node, index in places:
            copy = copy_of(value, names.fresh(name))
            graph.register_initializer(copy)
            node.replace_input_with(index, copy)
            copies.append(copy)
        if copies:
            notices.append(_notice(value, copies))
    return tuple(notices)


def _in_place_of(
    node: ir.Node, value: ir.Value, graph: ir.Graph, registry: Registry
) -> Iterator[ir.Value]:
    """Replaces an Identity of an initializer, if it is a scale or bias, by a copy."""
    made = node.outputs[0]
    if not is_identity(node) or made.is_graph_output() or node.graph is not graph:
        return
    # The file may lack it.
    made.shape = value.shape
    if not any(_is_place(user, index, registry) for user, index in made.uses()):
        return
    copy = copy_of(value, made.name or "")
    made.replace_all_uses_with(copy)
    graph.remove(node, safe=True)
    graph.register_initializer(copy)
    yield copy


def _is_place(node: ir.Node, index: int, registry: Registry) -> bool:
    """Whether an operand is a layer's own: its scale, bias or running statistic."""
    return is_scale_or_bias(node, index, registry) or is_statistic(node, index, registry)


def _is_constant(value: ir.Value, uses: Sequence[tuple[ir.Node, int]], registry: Registry) -> bool:
    """Whether a tensor has more than one element, all of them the same number.

    A tensor of one element may be a constant of a formula, unless some use is a running statistic.
    """
    count = prod(sizes(value))
    if count >= 2 or (count and any(is_statistic(node, i, registry) for node, i in uses)):
        return is_uniform(value)
    return False


def _notice(value: ir.Value, copies: Sequence[ir.Value]) -> str:
    number = float(array_of(value).flat[0])
    places = [
        f"{v.name!r} at {', '.join(repr(node.name) for node in v.consumers())}"
        for v in (value, *copies)
        if v.uses()
    ]
    return (
        f"initializer {value.name!r} (all elements {number:g}) was shared by several scales, "
        "biases or statistics, because exporters merge equal tensors; each use now has its own "
        f"copy: {listed(places)}"
    )

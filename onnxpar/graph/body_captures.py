"""Bodies of control flow: the values that they capture become operands of their node.

A body reads values of the graphs around it that are not operands of its node. In the undivided
graph each such value is an operand as well, after the operator's own operands (the node is
*closed*), so that planning, differentiation and partitioning treat it like every other operand.
`open_node` drops these operands where a node is written for a runtime. Constants of bodies are
initializers of the model, and the names of values and nodes are unique in the model and all bodies.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import onnx_ir as ir

from onnxpar.graph.metadata_keys import CAPTURED
from onnxpar.graph.names import Names
from onnxpar.graph.new_nodes import identity

_GRAPH = ir.AttributeType.GRAPH


def bodies_of(node: ir.Node) -> dict[str, ir.Graph]:
    """Returns the bodies of a node, by the name of the attribute."""
    # Most nodes have no bodies, and all nodes are asked many times.
    attributes = node.attributes.data.values()
    return {a.name: a.as_graph() for a in attributes if a.type == _GRAPH}


def every_node(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """Yields nodes and those of their bodies, at any depth."""
    for node in nodes:
        yield node
        for body in bodies_of(node).values():
            yield from every_node(body)


def captured_count(node: ir.Node) -> int:
    """Returns how many of a node's last operands are captured by its bodies."""
    return int(node.metadata_props.get(CAPTURED, "0"))


def own_inputs(node: ir.Node) -> tuple[ir.Value | None, ...]:
    """Returns the operands of a node that its operator has, without those that bodies capture."""
    return tuple(node.inputs)[: len(node.inputs) - captured_count(node)]


def captured(node: ir.Node) -> tuple[ir.Value, ...]:
    """Returns the values that the bodies of a node read from outside, each once, in order."""
    found: dict[ir.Value, None] = {}
    for graph in bodies_of(node).values():
        inside = {*graph.inputs, *graph.initializers.values()}
        for inner in every_node(graph):
            inside.update(inner.outputs)
            for body in bodies_of(inner).values():
                inside |= {*body.inputs, *body.initializers.values()}
        found.update(dict.fromkeys(v for v in _read(graph) if v not in inside))
    return tuple(found)


def _read(graph: ir.Graph) -> Iterator[ir.Value]:
    """The values that the nodes of a body read, at any depth, and its results."""
    for inner in every_node(graph):
        yield from (v for v in inner.inputs if v is not None)
        for body in bodies_of(inner).values():
            yield from body.outputs
    yield from graph.outputs


def read_by(node: ir.Node) -> list[ir.Value]:
    """Returns the values that a node reads, including those that its bodies read."""
    own = [v for v in node.inputs if v is not None]
    bodies = bodies_of(node) if node.attributes else None
    return [*own, *(v for body in bodies.values() for v in _read(body))] if bodies else own


def read_instead(node: ir.Node, old: ir.Value, new: ir.Value) -> None:
    """Makes a node, and its bodies at any depth, read a value in place of another one."""
    for place, value in enumerate(node.inputs):
        if value is old:
            node.replace_input_with(place, new)
    for body in bodies_of(node).values() if node.attributes else ():
        for inner in body:
            read_instead(inner, old, new)
        for place, value in enumerate(body.outputs):
            if value is old:
                body.outputs[place] = new


def lift_constants(model: ir.Model) -> None:
    """Moves the initializers of all bodies to the model and makes all names unique."""
    graphs = [g for g in model.graphs() if g is not model.graph]
    if not graphs:
        return
    values = Names(v.name for v in (*model.graph.inputs, *model.graph.initializers.values()))
    values.reserve(v.name for node in model.graph for v in node.outputs)
    names = Names(node.name for node in model.graph)
    for graph in graphs:
        for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
            if value.name:
                value.name = values.fresh(value.name)
        for name, value in list(graph.initializers.items()):
            graph.initializers.pop(name)
            value.name = values.fresh(name)
            model.graph.register_initializer(value)
        for node in graph:
            node.name = names.fresh(node.name or f"{graph.name or 'body'}/{node.op_type}")


def hand_on_results(model: ir.Model) -> None:
    """Inserts an Identity before each result that a body has twice or does not compute itself."""
    for graph in model.graphs():
        if graph is not model.graph:
            _hand_on(graph)


def _hand_on(graph: ir.Graph) -> None:
    made = {v for node in graph if node.inputs for v in node.outputs}
    for index, value in enumerate(list(graph.outputs)):
        if value in made and value not in list(graph.outputs)[:index]:
            continue
        node = identity(value, f"{value.name}.result")
        graph.append(node)
        graph.outputs[index] = node.outputs[0]


def close(graph: ir.Graph) -> None:
    """Closes each node with bodies, at any depth: appends the captured values to its operands."""
    for node in graph:
        bodies = bodies_of(node)
        if not bodies:
            continue
        for body in bodies.values():
            close(body)
        close_node(node)


def uncapture(graph: ir.Graph) -> None:
    """Undoes `close`."""
    for node in every_node(graph):
        _drop_captured(node)


def _drop_captured(node: ir.Node) -> None:
    count = captured_count(node)
    if count:
        node.resize_inputs(len(node.inputs) - count)
        node.metadata_props.pop(CAPTURED)


def close_node(node: ir.Node) -> None:
    """Appends to the operands of one node the values that its bodies, which are closed, capture.

    Captured operands that the node already has keep their places, even if they are no longer read.
    """
    count = captured_count(node)
    known = list(node.inputs)[len(node.inputs) - count :]
    new = [value for value in captured(node) if value not in known]
    first = len(node.inputs)
    node.resize_inputs(first + len(new))
    for index, value in enumerate(new):
        node.replace_input_with(first + index, value)
    if count + len(new):
        node.metadata_props[CAPTURED] = str(count + len(new))


def open_node(
    node: ir.Node, inputs: Sequence[ir.Value | None]
) -> tuple[list[ir.Value | None], dict[str, ir.Attr]]:
    """Returns the operands and attributes of a closed node without the captured values.

    Args:
        node: The node; it is not changed.
        inputs: The replacement of each of its operands, including captured ones. The bodies, which
            are copied, read the replacements.
    """
    count = captured_count(node)
    own = len(node.inputs) - count
    change = {
        old: new
        for old, new in zip(list(node.inputs)[own:], list(inputs)[own:], strict=True)
        if old is not None and new is not None
    }
    attributes = {
        a.name: ir.Attr(a.name, a.type, opened(a.as_graph(), change.get)) if a.type == _GRAPH else a
        for a in node.attributes.values()
    }
    return list(inputs)[:own], attributes


def opened(graph: ir.Graph, change: Callable[[ir.Value], ir.Value | None]) -> ir.Graph:
    """Returns a copy of a body with some outer values replaced, in which no node is closed."""
    copy = graph.clone(allow_outer_scope_values=True)
    _open(copy, change)
    return copy


def _open(graph: ir.Graph, change: Callable[[ir.Value], ir.Value | None]) -> None:
    for node in graph:
        for body in bodies_of(node).values():
            _open(body, change)
        _drop_captured(node)
        for index, value in enumerate(node.inputs):
            new = change(value) if value is not None else None
            if new is not None:
                node.replace_input_with(index, new)
    for index, value in enumerate(list(graph.outputs)):
        new = change(value)
        if new is not None:
            graph.outputs[index] = new


def inline_constant_branches(
    model: ir.Model, decided: Callable[[ir.Node], ir.Graph | None]
) -> None:
    """Replaces nodes that choose between bodies, if the choice is constant, by the chosen body.

    Args:
        model: The model; it is changed.
        decided: Returns the body that a node certainly runs; None if there is none.
    """
    for graph in list(model.graphs()):
        while any(_inline(graph, node, decided) for node in list(graph)):
            pass


def _inline(graph: ir.Graph, node: ir.Node, decided: Callable[[ir.Node], ir.Graph | None]) -> bool:
    body = decided(node) if node.graph is graph else None
    if body is None:
        return False
    for value in list(body.initializers.values()):
        body.initializers.pop(value.name or "")
        graph.register_initializer(value)
    nodes = list(body)
    results = list(body.outputs)
    body.outputs.clear()
    body.remove(nodes)
    graph.insert_before(node, nodes)
    for old, new in zip(list(node.outputs), results, strict=True):
        if new.producer() not in nodes:
            same = identity(new, "", f"{node.name}/Identity")
            graph.insert_before(node, [same])
            new = same.outputs[0]
        new.name, new.type, new.shape = old.name, old.type or new.type, None
        old.name = f"{old.name}.replaced"
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return True

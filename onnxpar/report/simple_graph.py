"""A rank's graph reduced for people: one node for each node of the model, and the collectives.

A local form pads, masks and computes sizes. Its nodes become the body of a function that has the
name and operator of the model's node; a viewer shows the body on demand. Nodes that only compute
sizes on the host are left out, and so are the tokens that order the collectives. The result is for
viewers: it cannot be run.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import onnx

from onnxpar.facts.host_nodes import HOST, LAYER
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import BACKGROUND_INPUTS, COORD_PREFIX, SYMBOL_PREFIX
from onnxpar.graph.metadata_keys import OVER

Json = dict[str, Any]
_SYSTEM = (SYMBOL_PREFIX, COORD_PREFIX, *BACKGROUND_INPUTS)
_CONSTANT = "onnxpar.const"
SCHEDULE = "onnxpar.schedule/"
_TOKEN_TYPE = onnx.TensorProto.UINT8
_Row = list[onnx.NodeProto]


def simple_graph(model: onnx.ModelProto, nodes: Sequence[Json]) -> onnx.ModelProto:
    """Returns a rank's graph reduced for people.

    Args:
        model: The rank's graph, without weights; it is not changed.
        nodes: The nodes of the undivided program (`nodes` of a report).
    """
    operators = {node["name"]: node["op_type"] for node in nodes}
    graph = model.graph
    hidden = _hidden(graph)
    reads: dict[str, int] = {}
    for node in graph.node:
        for name in _read(node):
            reads[name] = reads.get(name, 0) + 1
    for output in graph.output:
        reads[output.name] = reads.get(output.name, 0) + 1
    simple = onnx.ModelProto()
    simple.CopyFrom(model)
    del simple.graph.node[:]
    for owner, row in _rows(graph.node, operators, hidden):
        inside = {name: 0 for node in row for name in node.output}
        for node in row:
            for name in _read(node):
                if name in inside:
                    inside[name] += 1
        results = [n for n, own in inside.items() if reads.get(n, 0) > own and n not in hidden]
        operands = [n for node in row for n in _read(node) if n not in inside and n not in hidden]
        shown = simple.graph.node.add()
        shown.CopyFrom(row[-1])
        del shown.input[:], shown.output[:]
        shown.input.extend(dict.fromkeys(operands))
        shown.output.extend(results or [name for name in row[-1].output if name][:1])
        if len(row) > 1:
            _fold(simple, shown, row, owner, operators[owner])
        elif _communicates(row[0]):
            shown.op_type = _title(row[0])
    used = {name for node in simple.graph.node for name in node.input}
    made = {name for node in simple.graph.node for name in node.output} | used
    for values in (simple.graph.input, simple.graph.initializer, simple.graph.value_info):
        kept = [value for value in values if value.name in made]
        del values[:]
        values.extend(kept)
    return simple


def _rows(
    nodes: Sequence[onnx.NodeProto], operators: Mapping[str, str], hidden: set[str]
) -> Iterator[tuple[str, _Row]]:
    """Yields consecutive nodes that belong to one node of the model, with its name.

    A row of consecutive nodes never makes a cycle, since nodes are in topological order.
    """
    owner, row = "", _Row()
    for node in nodes:
        if all(name in hidden for name in node.output if name) or _adds_up(node):
            continue
        own = "" if _communicates(node) else owner_of(node.name, operators)
        if row and own != owner:
            yield owner, row
            row = []
        owner = own
        row.append(node)
        if not own:
            yield own, row
            row = []
    if row:
        yield owner, row


def owner_of(name: str, nodes: Container[str]) -> str:
    """Returns the node of the model to whose local form a rank's node belongs; "" for none."""
    while name and name not in nodes:
        name = name.rpartition("/")[0]
    return name


def _fold(
    model: onnx.ModelProto, shown: onnx.NodeProto, row: _Row, owner: str, op_type: str
) -> None:
    """Makes a node the call of a function that has the nodes of a row."""
    # A collective may divide the nodes of one node of the model.
    count = sum(f.domain.partition("#")[0] == owner for f in model.functions)
    domain = owner + (f"#{count + 1}" if count else "")
    function = model.functions.add(name=op_type, domain=domain)
    function.input.extend(shown.input)
    function.output.extend(shown.output)
    function.node.extend(row)
    function.opset_import.extend(model.opset_import)
    model.opset_import.add(domain=domain, version=1)
    del shown.attribute[:]
    shown.name, shown.op_type, shown.domain = owner, op_type, domain


def _hidden(graph: onnx.GraphProto) -> set[str]:
    """Returns the values that are not shown: sizes, coordinates, constants of ours, tokens."""
    hidden = {value.name for value in graph.input if value.name.startswith(_SYSTEM)}
    hidden |= {t.name for t in graph.initializer if t.name.startswith(_CONSTANT)}
    types = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
    results = {value.name for value in graph.output}
    for node in graph.node:
        host = any(p.key == LAYER and p.value == HOST for p in node.metadata_props)
        for name in node.output:
            token = _communicates(node) and types.get(name) == _TOKEN_TYPE
            if (host or token) and name not in results:
                hidden.add(name)
    return hidden


def _communicates(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and any(a.name == "group" for a in node.attribute)


def _title(node: onnx.NodeProto) -> str:
    """Returns what a collective does: its kind, the mesh axes, and whether it only starts."""
    texts = {p.key: p.value for p in node.metadata_props}
    kinds = [a.s.decode() for a in node.attribute if a.name == "op"]
    kind = kinds[0] if kinds else node.op_type
    over = f" over {texts[OVER]}" if OVER in texts else ""
    return f"{kind}{over}" + (f" ({node.op_type.lower()})" if kinds else "")


def _adds_up(node: onnx.NodeProto) -> bool:
    """Whether a node of the schedule works on all gradients at once, but does not communicate."""
    return node.name.startswith(SCHEDULE) and not _communicates(node)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Returns the values that a node reads, also those that its bodies read."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _read(inner)

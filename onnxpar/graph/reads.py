"""What a node reads."""

import onnx_ir as ir


def read_by(node: ir.Node) -> list[ir.Value]:
    """Returns the values that a node reads, those captured by its subgraphs included."""
    values = [v for v in node.inputs if v is not None]
    for attribute in node.attributes.values():
        if attribute.type != ir.AttributeType.GRAPH:
            continue
        graph = attribute.as_graph()
        for inner in ir.traversal.RecursiveGraphIterator(graph):
            values += [v for v in inner.inputs if v is not None]
        values += list(graph.outputs)
    return values

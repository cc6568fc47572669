"""Copies of whole models."""

import onnx_ir as ir

_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def copied(model: ir.Model) -> ir.Model:
    """Returns a copy of a model, with nodes and values of its own.

    Shapes, types, attributes and tensors are those of the model. `ir.Model.clone` takes one and a
    half times as long; only it copies bodies, functions and layouts in the model.
    """
    graph = model.graph
    if model.functions or any(map(_has_more, graph)):
        return model.clone()
    known: dict[ir.Value | None, ir.Value | None] = {None: None}

    def copy_of(value: ir.Value) -> ir.Value:
        made = ir.Value(
            name=value.name,
            type=value.type,
            shape=value.shape,
            doc_string=value.doc_string,
            const_value=value.const_value,
        )
        if value.metadata_props:
            made.metadata_props.update(value.metadata_props)
        if value.meta:
            made.meta.update(value.meta)
        known[value] = made
        return made

    inputs = [copy_of(value) for value in graph.inputs]
    initializers = [known.get(value) or copy_of(value) for value in graph.initializers.values()]
    nodes = []
    for node in graph:
        made = ir.Node(
            node.domain,
            node.op_type,
            [known[value] for value in node.inputs],
            node.attributes.data,
            overload=node.overload,
            outputs=[copy_of(value) for value in node.outputs],
            version=node.version,
            name=node.name,
            doc_string=node.doc_string,
            metadata_props=dict(node.metadata_props),
        )
        if node.meta:
            made.meta.update(node.meta)
        nodes.append(made)
    new = ir.Graph(
        inputs,
        [value for old in graph.outputs if (value := known[old]) is not None],
        nodes=nodes,
        initializers=initializers,
        doc_string=graph.doc_string,
        opset_imports=dict(graph.opset_imports),
        name=graph.name,
        metadata_props=dict(graph.metadata_props),
    )
    new.meta.update(graph.meta)
    return ir.Model(
        new,
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        domain=model.domain,
        model_version=model.model_version,
        doc_string=model.doc_string,
        metadata_props=dict(model.metadata_props),
        device_configurations=model.device_configurations,
    )


def _has_more(node: ir.Node) -> bool:
    """Whether a node has bodies, or layouts that name values."""
    attributes = node.attributes.data.values()
    return bool(node.device_configurations) or any(a.type in _BODIES for a in attributes)

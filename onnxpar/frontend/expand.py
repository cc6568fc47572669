"""Replaces nodes by their bodies: calls of functions, operators without a rule, and gradients.

The nodes of a body are named `<node>/<inner name>` and take the place of the node. Their metadata
names that node, so that a strategy for it applies to them. The results of the body get the names of
the node's results.
"""

from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.core.errors import ModelError
from onnxpar.core.symbols import SymbolTable, dim_str, symbols_of
from onnxpar.frontend.upgrade import upgrade_graph
from onnxpar.graph.body_captures import every_node, read_by
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.graph.metadata_keys import NOT_EXPANDED
from onnxpar.graph.names import Names, names_of
from onnxpar.graph.new_nodes import identity
from onnxpar.graph.node_view import NodeView, default_opset
from onnxpar.graph.shapes import read_shapes, shapes
from onnxpar.ops.body_node import (
    BodyNode,
    adopt_opset,
    fill_defaults,
    has_schema_body,
    origin,
    schema_body,
)
from onnxpar.ops.elementwise.cast import fold_casts
from onnxpar.ops.inference import inference
from onnxpar.ops.old_node import OPSET
from onnxpar.ops.operator import ByBody, OpDef, expanded
from onnxpar.ops.registry import Registry
from onnxpar.ops.sequence.sequence import fold_sequences

MAX_DEPTH = 16
"""The most levels of bodies within bodies; those of ONNX have three."""


def inline_functions(model: ir.Model, registry: Registry) -> None:
    """Replaces every call of a function of the model by its body. The model is changed.

    A function of an older opset is brought to that of the model first. No function may call itself:
    `limits.check_calls` refuses those that do.

    Raises:
        ModelError: A function takes a graph, or is written for another opset in which
            one of its operators has another meaning.
    """
    if not model.functions:
        return
    opset = default_opset(model.opset_imports)
    for function in model.functions.values():
        version = default_opset(function.opset_imports, opset)
        if version < opset:
            upgrade_graph(function.graph, version, min(opset, OPSET), registry, {})
            function.opset_imports[""] = max(version, min(opset, OPSET))
        adopt_opset(function, opset)
        for domain, version in function.opset_imports.items():
            model.opset_imports.setdefault(domain, version)
    nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
    names = names_of(model.graph)
    while calls := [node for node in nodes if node.op_identifier() in model.functions]:
        nodes = []
        for node in calls:
            if not node.name:
                node.name = names.fresh(node.op_type)
            nodes += every_node(
                _by_function(model, node, model.functions[node.op_identifier()], names)
            )
    model.functions.clear()


def expand_unknown(
    model: ir.Model,
    registry: Registry,
    infer: Callable[[], None],
    table: Callable[[], SymbolTable],
) -> None:
    """Replaces every node whose operator has a body and no rule. The model is changed.

    Sequences whose length and positions are known are replaced by their elements too. A node that
    cannot be replaced stays and is replicated; its metadata has the reason.

    Args:
        model: The model, on which shape inference has run.
        registry: The operators that have rules.
        infer: Runs shape inference again.
        table: Returns the symbols of the model's inputs.
    """
    opset = default_opset(model.opset_imports)
    for _ in range(MAX_DEPTH):
        changed, failed = fold_sequences(model, registry), False
        # Our bodies are emitted with shapes; the shapes of ONNX's bodies are inferred afterwards.
        builder: GlobalBuilder | None = None
        nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
        unknown = [
            (n, d)
            for n in nodes
            if (d := registry.definition(n, model.opset_imports)) is None or d.rule is expanded
        ]
        names = names_of(model.graph)
        for node, definition in unknown:
            try:
                ours = definition is not None and definition.body is not None
                # The builder does not know the shapes in bodies of control flow.
                if definition is not None and ours and node.graph is model.graph:
                    if builder is None:
                        env = shapes(model, table())
                        builder = GlobalBuilder.over(model.graph, opset, env)
                    try:
                        _by_our_body(node, definition, builder)
                    except ModelError as error:
                        if not has_schema_body(node, opset):
                            raise
                        node.metadata_props[NOT_EXPANDED] = str(error)
                        _by_schema(model, node, opset, names)
                elif has_schema_body(node, opset):
                    _by_schema(model, node, opset, names)
                else:
                    continue
                changed = True
            except ModelError as error:
                node.metadata_props.setdefault(NOT_EXPANDED, str(error))
                failed = True
        if changed or failed:
            common.RemoveUnusedNodesPass()(model)
        if not changed:
            return
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        infer()


def expand_by_body(
    model: ir.Model,
    registry: Registry,
    builder: GlobalBuilder,
    variables: Iterable[ir.Value],
    end: ir.Value,
) -> None:
    """Replaces the nodes between variables and `end` whose gradient is that of their body.

    Args:
        model: The model; its graph is changed.
        registry: The operators.
        builder: A builder over its graph; it knows the shapes of all values, and of new ones.
        variables: The values by which `end` is differentiated.
        end: The value that is differentiated.

    Raises:
        ModelError: A shape or a constant that a body needs is unknown.
    """
    opset = builder.opset
    for _ in range(MAX_DEPTH):
        nodes = [
            (node, definition)
            for node in _between(model.graph, variables, end)
            if (definition := registry.definition(node, model.opset_imports)) is not None
            and isinstance(definition.gradient, ByBody)
        ]
        if not nodes:
            return
        names = names_of(model.graph)
        for node, definition in nodes:
            if definition.body is not None:
                _by_our_body(node, definition, builder)
            else:
                _infer(model, _by_schema(model, node, opset, names), builder, registry)


def _between(graph: ir.Graph, variables: Iterable[ir.Value], end: ir.Value) -> list[ir.Node]:
    """The nodes on paths from variables to `end`, in their order."""
    varying = set(variables)
    for node in graph:
        if any(v in varying for v in read_by(node)):
            varying.update(node.outputs)
    reaching = {end}
    for node in reversed(graph):
        if any(out in reaching for out in node.outputs):
            reaching.update(read_by(node))
    return [n for n in graph if any(out in varying and out in reaching for out in n.outputs)]


# -- the two kinds of bodies -----------------------------------------------------------------------


def _by_our_body(node: ir.Node, definition: OpDef, builder: GlobalBuilder) -> None:
    assert definition.body is not None
    view = NodeView(node, builder.env, builder.opset)
    kept = builder.scope, builder.metadata, builder.before
    builder.scope, builder.metadata, builder.before = view.name, origin(node), node
    try:
        results = list(definition.body(BodyNode(view, builder)))
        _replace(node, results, builder)
    finally:
        builder.scope, builder.metadata, builder.before = kept


def _by_schema(model: ir.Model, node: ir.Node, opset: int, names: Names) -> list[ir.Node]:
    """Replaces a node by ONNX's body of it; the shapes of the new nodes are not yet known."""
    function = schema_body(node, opset)
    fill_defaults(node, opset)
    return _by_function(model, node, function, names)


def _by_function(
    model: ir.Model, node: ir.Node, function: ir.Function, names: Names
) -> list[ir.Node]:
    """Replaces a node by the body of a function; the shapes of the new nodes are not yet known."""
    # The body is inlined with operands of its own, all different even if two operands are equal.
    operands = [
        None if v is None else ir.Value(name=f"operand.{i}", type=v.type, shape=v.shape)
        for i, v in enumerate(node.inputs)
    ]
    call = ir.Node(
        function.domain,
        function.name,
        operands,
        node.attributes.values(),
        overload=function.overload,
        num_outputs=len(node.outputs),
    )
    for index, value in enumerate(call.outputs):
        value.name = f"result.{index}"
    scratch = ir.Model(
        ir.Graph(
            [v for v in operands if v is not None],
            call.outputs,
            nodes=[call],
            opset_imports=dict(model.opset_imports),
        ),
        ir_version=model.ir_version,
        functions=[function],
    )
    try:
        common.InlinePass()(scratch)
    except (ValueError, ir.passes.PreconditionError) as error:
        raise ModelError(f"node {node.name!r} ({node.op_type}): {error}") from error
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(scratch)
    fold_casts(scratch.graph)
    made = list(scratch.graph)
    results: list[ir.Value | None] = list(scratch.graph.outputs)
    constants = [v for v in scratch.graph.initializers.values() if v.uses()]
    scratch.graph.outputs.clear()
    scratch.graph.initializers.clear()
    scratch.graph.remove(made)
    assert node.graph is not None
    for value in constants:
        value.name = names.fresh(f"{node.name}/{value.name}")
        node.graph.register_initializer(value)
    for inner in every_node(made):
        inner.metadata_props.update(origin(node))
        inner.name = names.fresh(f"{node.name}/{_title(inner)}")
        for value in inner.outputs:
            if value.name:
                value.name = names.fresh(f"{node.name}/{value.name}")
    node.graph.insert_before(node, made)
    for operand, own in zip(operands, node.inputs, strict=True):
        if operand is not None and own is not None:
            ir.convenience.replace_all_uses_with(operand, own)
            results = [own if result is operand else result for result in results]
    _replace(node, results, None)
    return made


def _title(inner: ir.Node) -> str:
    """The name of a node of a body; InlinePass gives `node…` to those without one."""
    name = inner.name or ""
    return inner.op_type if not name or name.startswith("node") else name


def _replace(
    node: ir.Node, results: Sequence[ir.Value | None], builder: GlobalBuilder | None
) -> None:
    """Replaces the results of a node by others, which get their names, and removes the node."""
    graph = node.graph
    assert graph is not None
    taken: set[ir.Value | None] = set(node.inputs)
    for index, (old, new) in enumerate(zip(node.outputs, results, strict=False)):
        if new is None or not old.name or not (old.uses() or old.is_graph_output()):
            continue
        if new in taken or new.producer() is None:
            # An operand, or equal to another result: it needs its own name.
            same = identity(new, "", f"{node.name}/same.{index}")
            same.metadata_props.update(origin(node))
            if builder is not None and new.name in builder.shapes:
                builder.shapes[old.name] = builder.shapes[new.name]
            graph.insert_before(node, same)
            new = same.outputs[0]
        elif builder is not None:
            for known in (builder.shapes, builder.contents):
                if new.name in known:
                    known[old.name] = known.pop(new.name)
        taken.add(new)
        name, old.name = old.name, f"{old.name}.replaced"
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        new.name = name
        new.type = new.type or old.type
        new.shape = new.shape or old.shape
    graph.remove(node, safe=True)


# -- shapes in ONNX's bodies, if inference does not run again ------------------------------------


def _infer(
    model: ir.Model, nodes: Sequence[ir.Node], builder: GlobalBuilder, registry: Registry
) -> None:
    """Infers the shapes of new nodes, in their order, from those of the values they read."""
    context = ShapeInferenceContext(model.opset_imports)
    sizes = {size for shape in builder.shapes.values() for size in shape}
    context.reserve_symbol_names({name for size in sizes for name in symbols_of(size)})
    read = {v for node in nodes for v in read_by(node)}
    _note(builder, [v for v in read if v.is_initializer()])
    for value in read:
        items = builder.contents.get(value.name or "")
        if items is not None and value.const_value is None:
            data = [d if isinstance(d, int) else ir.SymbolicDim(dim_str(d)) for d in items]
            context.set_symbolic_value(value, data)
    functions = inference(registry).functions
    for node in nodes:
        infer = functions.get(node.domain, node.op_type, version=builder.opset)
        if infer is not None:
            infer(context, node)
    _note(builder, [out for node in nodes for out in node.outputs])


def _note(builder: GlobalBuilder, values: Iterable[ir.Value]) -> None:
    """Stores the inferred shapes and contents of values in a builder."""
    found = read_shapes(values, builder.table)
    builder.shapes.update(found.shapes)
    builder.contents.update(found.contents)

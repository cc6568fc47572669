"""Shape inference of bodies: which dims of states stay the same, and how many steps there are.

`onnx-shape-inference` assumes that a loop's state has the same shape in every step, and that a loop
always takes its greatest number of steps. Here, a dim of a state is unknown if a step changes it,
and so is the number of steps of a loop that a condition may end. Operands that are only captured by
a body are left out.
"""

from collections.abc import Sequence

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.core.symbols import as_dim, symbols_of
from onnxpar.graph.body_captures import own_inputs
from onnxpar.ops.operand_roles import is_identity
from onnxpar.ops.slots import Library

Size = int | ir.SymbolicDim


def infer_loop(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Loop: the dims of states that a step does not change, and the trip count if it is certain."""
    body = node.attributes["body"].as_graph()
    initial = own_inputs(node)[2:]
    for value in body.inputs[:2]:
        value.shape = ir.Shape([])
    _settle(library, context, body, initial, body.inputs[2:], body.outputs[1:])
    _put_states(context, node, initial, body.outputs[1:])
    count = trip_count(context, node)
    for out, made in zip(
        node.outputs[len(initial) :], body.outputs[1 + len(initial) :], strict=True
    ):
        _put_stacked(context, out, made, 0, count)


def infer_scan(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Scan (since opset 9): the dims of states that a step does not change."""
    body = node.attributes["body"].as_graph()
    operands = own_inputs(node)
    scanned = node.attributes["num_scan_inputs"].as_int()
    states = len(operands) - scanned
    axes = _axes(node, "scan_input_axes", scanned)
    count: Size | None = None
    for value, inner, axis in zip(operands[states:], body.inputs[states:], axes, strict=True):
        if value is not None and value.shape is not None:
            dims = list(value.shape)
            length = dims.pop(axis)
            count = length if count is None or isinstance(length, int) else count
            inner.shape = ir.Shape(dims)
            inner.type = inner.type or value.type
        else:
            inner.shape = None
    _settle(
        library,
        context,
        body,
        operands[:states],
        body.inputs[:states],
        body.outputs[:states],
    )
    _put_states(context, node, operands[:states], body.outputs[:states])
    axes = _axes(node, "scan_output_axes", len(node.outputs) - states)
    for out, made, axis in zip(node.outputs[states:], body.outputs[states:], axes, strict=True):
        _put_stacked(context, out, made, axis, count)


def trip_count(context: ShapeInferenceContext, node: ir.Node) -> Size | None:
    """The number of steps of a Loop; None if it is unknown or a condition may end the loop."""
    first = node.inputs[0]
    known = None if first is None else context.get_symbolic_value(first)
    if known is None or len(known) != 1 or not runs_through(node):
        return None
    count: Size = known[0]
    return count


def runs_through(node: ir.Node) -> bool:
    """Whether no condition can end a Loop before its trip count."""
    body = node.attributes["body"].as_graph()
    start, value = node.inputs[1], body.outputs[0]
    while (maker := value.producer()) is not None and is_identity(maker):
        source = maker.inputs[0]
        assert source is not None
        value = source
    if value is not body.inputs[1] and not _is_true(value):
        return False
    return start is None or _is_true(start)


def _is_true(value: ir.Value) -> bool:
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.size == 1 and bool(tensor.numpy().item())


def _axes(node: ir.Node, name: str, count: int) -> list[int]:
    attribute = node.attributes.get(name)
    return [0] * count if attribute is None else list(attribute.as_ints())


def _settle(
    library: Library,
    context: ShapeInferenceContext,
    body: ir.Graph,
    initial: Sequence[ir.Value | None],
    entering: Sequence[ir.Value],
    leaving: Sequence[ir.Value],
) -> None:
    """Infers a body again and again, with dims of states unknown that a step changed."""
    for value, inner in zip(initial, entering, strict=True):
        inner.shape = None if value is None or value.shape is None else ir.Shape(value.shape)
        if value is not None and inner.type is None:
            inner.type = value.type
    while True:
        _clear(body)
        library.infer_body(context, body, warn_on_missing=False)
        changed = False
        for inner, after in zip(entering, leaving, strict=False):
            if inner.shape is None:
                continue
            if after.shape is None or len(after.shape) != len(inner.shape):
                inner.shape, changed = None, True
                continue
            dims = [
                one if str(one) == str(other) else context.new_symbolic_dim()
                for one, other in zip(inner.shape, after.shape, strict=True)
            ]
            old = [_unknown(context, d) for d in inner.shape]
            if any(
                str(a) != str(b) and not o for a, b, o in zip(dims, inner.shape, old, strict=True)
            ):
                changed = True
                inner.shape = ir.Shape(dims)
        if not changed:
            return


def _clear(graph: ir.Graph) -> None:
    for node in ir.traversal.RecursiveGraphIterator(graph):
        for value in node.outputs:
            value.shape = None
            value.metadata_props.clear()


def _unknown(context: ShapeInferenceContext, dim: Size) -> bool:
    """Whether nothing is known of a dim except that it depends on data."""
    if isinstance(dim, int):
        return False
    return dim.value is None or any(
        context.is_generated_symbol(name) for name in symbols_of(as_dim(dim.value))
    )


def _put_states(
    context: ShapeInferenceContext,
    node: ir.Node,
    initial: Sequence[ir.Value | None],
    leaving: Sequence[ir.Value],
) -> None:
    for out, value, made in zip(node.outputs, initial, leaving, strict=False):
        out.type = out.type or made.type or (value.type if value is not None else None)
        if made.shape is None:
            continue
        given = None if value is None or value.shape is None else list(value.shape)
        dims = [
            d
            if not _unknown(context, d) or (given is not None and str(given[i]) == str(d))
            else context.new_symbolic_dim()
            for i, d in enumerate(made.shape)
        ]
        out.shape = ir.Shape(dims)


def _put_stacked(
    context: ShapeInferenceContext, out: ir.Value, made: ir.Value, axis: int, count: Size | None
) -> None:
    out.type = out.type or made.type
    if made.shape is None:
        return
    dims = [context.new_symbolic_dim() if _unknown(context, d) else d for d in made.shape]
    at = axis if axis >= 0 else axis + len(dims) + 1
    dims.insert(at, context.new_symbolic_dim() if count is None else count)
    out.shape = ir.Shape(dims)

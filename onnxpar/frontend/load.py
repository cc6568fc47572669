"""Reading a model and bringing it into the one form that the later stages take.

Afterwards: nodes are in topological order and have different names, functions are inlined,
constants are initializers, initializers are no graph inputs, every dim of an input has a name or a
size, and the shape of every value is inferred as an expression in those names.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from onnx_shape_inference import (
    SYM_DATA_KEY,
    OpUsageError,
    ShapeInferenceError,
)

from onnxpar.core.errors import ModelError
from onnxpar.core.symbols import Symbol, SymbolTable, as_dim, dim_symbol, symbols_of
from onnxpar.frontend.check_nodes import check_inferred, check_operators
from onnxpar.frontend.expand import expand_unknown, inline_functions
from onnxpar.frontend.fold_constants import fold_constants
from onnxpar.frontend.upgrade import upgrade_model
from onnxpar.graph.body_captures import (
    close,
    hand_on_results,
    inline_constant_branches,
    lift_constants,
    uncapture,
)
from onnxpar.graph.metadata_keys import ANNOTATION
from onnxpar.graph.names import Names
from onnxpar.ops.attention.packed_heads import unpack_heads
from onnxpar.ops.control.inference import BRANCHES, is_decided
from onnxpar.ops.inference import inference
from onnxpar.ops.old_node import OPSET
from onnxpar.ops.registry import Registry
from onnxpar.ops.size_limits import least_sizes, size_limits
from onnxpar.ops.table import REGISTRY

MIN_OPSET = 7


def load(path: str | Path) -> ir.Model:
    """Reads an ONNX file; weights in external files stay there until they are needed.

    Raises:
        ModelError: The file is missing, is not an ONNX model, or its graph has a cycle.
    """
    return in_memory(read(path), path)


def read(path: str | Path) -> onnx.ModelProto:
    """Reads an ONNX file as it is, without the external files of its weights.

    Raises:
        ModelError: The file is missing or is not an ONNX model.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ModelError(f"the model {str(path)!r} {what}")
    with _readable(path):
        proto = onnx.load(path, load_external_data=False)
        _check_text(proto, f"{str(path)!r} is not a readable ONNX model: model")
        return proto


def in_memory(proto: onnx.ModelProto, path: str | Path) -> ir.Model:
    """Returns a model read from `path`, which shares its weights with the file's content.

    Raises:
        ModelError: It is not a model.
    """
    library = logging.getLogger("onnx_ir")
    level = library.level
    # It warns of what is reported elsewhere as an error.
    library.setLevel(logging.ERROR)
    try:
        with _readable(Path(path)):
            model = ir.from_proto(proto)
            ir.external_data.set_base_dir(model.graph, Path(path).parent)
    finally:
        library.setLevel(level)
    if not model.opset_imports or not (len(model.graph) or len(model.graph.outputs)):
        raise ModelError(f"{str(path)!r} is not an ONNX model: it has no graph or no opset")
    return model


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what the block raises of a malformed file into a ModelError."""
    try:
        yield
    except (
        DecodeError,
        ir.serde.SerdeError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OSError,
    ) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = " ".join(str(cause).split())
        raise ModelError(f"{str(path)!r} is not a readable ONNX model: {text}") from error


def _check_text(message: Message, place: str) -> None:
    """Raises ModelError where a string is not UTF-8, which protobuf gives as bytes.

    Fields of bytes, such as the data of weights, are not read.
    """
    found = _bad_text(message)
    if found is not None:
        where, item = found
        raise ModelError(f"{place}{where}: expected text in UTF-8, got {item!r}")


def _bad_text(message: Message) -> tuple[str, bytes] | None:
    """Returns the first such string and where it is; places are named only then."""
    for name, repeated, nested in _text_fields(message.DESCRIPTOR):
        if not repeated and not message.HasField(name):
            continue
        items = getattr(message, name)
        for index, item in enumerate(items if repeated else (items,)):
            found = _bad_text(item) if nested else ("", item) if isinstance(item, bytes) else None
            if found is not None:
                place = f".{name}[{index}]" if repeated else f".{name}"
                return place + found[0], found[1]
    return None


@cache
def _text_fields(kind: Descriptor) -> tuple[tuple[str, bool, bool], ...]:
    """Returns the fields that are or hold text: name, whether repeated, whether messages."""
    return tuple(
        (field.name, field.is_repeated, field.type == field.TYPE_MESSAGE)
        for field in kind.fields
        if field.type in (field.TYPE_STRING, field.TYPE_MESSAGE)
    )


def normalise(model: ir.Model, registry: Registry = REGISTRY) -> ir.Model:
    """Returns the model in the form described in the module's text; the argument is used up.

    Args:
        model: As it was read.
        registry: The table of operators; nodes of others are replaced by their bodies.

    Raises:
        ModelError: The graph is not valid: a cycle, an input nobody makes, an unknown version, a
            node that no runtime could run.
    """
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx"))
    if opset is None and not any(n.domain in ("", "ai.onnx") for n in model.graph.all_nodes()):
        # A model of other domains alone need not import it; the nodes that are added are of it.
        opset = model.opset_imports[""] = OPSET
    if opset is None or opset < MIN_OPSET:
        raise ModelError(f"expected an opset version of at least {MIN_OPSET}, got {opset}")
    if opset > onnx.defs.onnx_opset_version():
        newest = onnx.defs.onnx_opset_version()
        raise ModelError(f"expected an opset version of at most {newest}, got {opset}")
    name_nodes(model.graph)
    # They are of the whole model, and have been read.
    model.device_configurations = ()
    model.metadata_props.pop(ANNOTATION, None)
    for node in model.graph.all_nodes():
        node.device_configurations = ()
    check_operators(model, opset)
    _check_edges(model)
    try:
        model.graph.sort()
    except ValueError as error:
        raise ModelError(f"the graph has a cycle: {_cycle(model.graph)}") from error
    hand_on_results(model)
    inline_functions(model, registry)
    opset = upgrade_model(model, opset, registry)
    weights = {
        value
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.dtype is not None and value.dtype.is_floating_point()
    }
    for step in (
        common.RemoveInitializersFromInputsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.RemoveUnusedNodesPass(),
    ):
        model = step(model).model
    inline_constant_branches(model, BRANCHES)
    lift_constants(model)
    fold_constants(model, opset, weights, registry)
    unpack_heads(model)
    _name_nodes(model.graph)
    _name_dims(model.graph)
    _infer(model, opset, registry)

    def changed() -> None:
        uncapture(model.graph)
        inline_constant_branches(model, BRANCHES)
        lift_constants(model)
        _infer(model, opset, registry)

    # Types and sizes are known now, and with them what CastLike makes, and which branch is taken.
    if fold_constants(model, opset, weights, registry) or any(
        map(is_decided, model.graph.all_nodes())
    ):
        changed()
        model = common.RemoveUnusedNodesPass()(model).model
    expand_unknown(model, registry, changed, lambda: symbol_table(model, {}, registry))
    return model


def _infer(model: ir.Model, opset: int, registry: Registry) -> None:
    """Infers all shapes anew and checks each node on them."""
    inputs = set(model.graph.inputs)
    declared: dict[ir.Value, ir.Shape] = {}
    uncapture(model.graph)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for output in node.outputs:
            if output not in inputs:
                if output.shape is not None:
                    declared[output] = output.shape
                output.shape = None
                output.metadata_props.pop(SYM_DATA_KEY, None)
                if output.dtype == ir.DataType.UNDEFINED:
                    output.type = None
    # Models declare names for output dims that differ from what follows from the inputs; the
    # inferred expressions are the ones that splits can be reasoned about with. Nor does the library
    # adopt names: it takes long over sizes that are quotients, and finds nothing that is used.
    library = logging.getLogger("onnx_shape_inference")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        inference(registry).infer_shapes(model)
    except (ShapeInferenceError, OpUsageError, ValueError) as error:
        if "inference failed for" in str(error):
            # That says no reason; ONNX's own inference does.
            check_inferred(model, opset)
        raise ModelError(f"shape inference failed: {error}") from error
    finally:
        library.setLevel(level)
    close(model.graph)
    check_inferred(model, opset)
    for value, shape in declared.items():
        if value.shape is None:
            value.shape = _declared(value, shape)


def _declared(value: ir.Value, shape: ir.Shape) -> ir.Shape:
    """The shape that the model declares: its numbers, and sizes that depend on data otherwise."""
    return ir.Shape(
        [d if isinstance(d, int) else f"{value.name}.{axis}" for axis, d in enumerate(shape)]
    )


def _check_edges(model: ir.Model) -> None:
    graph = model.graph
    known = {id(v) for v in graph.inputs} | {id(v) for v in graph.initializers.values()}
    for node in graph:
        known |= {id(out) for out in node.outputs}
    for node in graph:
        for index, value in enumerate(node.inputs):
            if value is not None and id(value) not in known:
                raise ModelError(
                    f"node {node.name!r} ({node.op_type}): input {index} ({value.name!r}) is "
                    f"not defined by a node, input or initializer"
                )
    for value in graph.outputs:
        if id(value) not in known:
            raise ModelError(f"output {value.name!r} is not computed by a node")
    for name, value in graph.initializers.items():
        if value.const_value is None:
            raise ModelError(f"initializer {name!r} has no data")
        _check_tensor(name, value.const_value)


def _check_tensor(name: str, tensor: ir.TensorProtocol) -> None:
    """Checks that a tensor has as much data as its shape says; external data is not looked at."""
    if tensor.dtype == ir.DataType.UNDEFINED:
        raise ModelError(f"initializer {name!r} has no element type")
    shape = [d for d in tensor.shape if isinstance(d, int)]
    if any(d < 0 for d in shape):
        raise ModelError(f"initializer {name!r} has the shape {shape}")
    if isinstance(tensor, ir.TensorProtoTensor):
        raw = tensor.raw
        if raw.HasField("raw_data") and len(raw.raw_data) != tensor.nbytes:
            raise ModelError(
                f"initializer {name!r}: expected {tensor.nbytes} bytes for "
                f"{tensor.dtype.name.lower()}{shape}, got {len(raw.raw_data)}"
            )


def _cycle(graph: ir.Graph) -> str:
    """Names the nodes of one cycle."""
    state: dict[ir.Node, int] = {}
    for root in graph:
        path: list[ir.Node] = []
        stack = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                state[node] = 2
                path.pop()
                continue
            if state.get(node) == 2:
                continue
            if state.get(node) == 1:
                names = [n.name or n.op_type for n in path[path.index(node) :]]
                return " <- ".join(repr(n) for n in [*names, names[0]])
            state[node] = 1
            path.append(node)
            stack.append((node, True))
            for before in node.predecessors():
                if state.get(before) == 1:
                    names = [n.name or n.op_type for n in path[path.index(before) :]]
                    return " <- ".join(repr(n) for n in [*names, names[0]])
                if before not in state:
                    stack.append((before, False))
    return "unknown nodes"


def _name(node: ir.Node) -> str:
    return node.name or (f"{node.op_type}_{node.outputs[0].name}" if node.outputs else "node")


def name_nodes(graph: ir.Graph) -> None:
    """Names nodes without a name, since messages name nodes."""
    for node in graph:
        node.name = _name(node)


def _name_nodes(graph: ir.Graph) -> None:
    names = Names()
    for node in graph:
        node.name = names.fresh(_name(node))


def _name_dims(graph: ir.Graph) -> None:
    for what, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            if isinstance(value.type, ir.SequenceType | ir.OptionalType | ir.SparseTensorType):
                raise ModelError(f"{what} {value.name!r}: expected a tensor, got {value.type}")
    for value in graph.inputs:
        if value.shape is None:
            raise ModelError(f"input {value.name!r} has no shape: its rank must be known")
        if value.dtype in (None, ir.DataType.UNDEFINED):
            raise ModelError(f"input {value.name!r} has no element type")
        if value.dtype == ir.DataType.STRING:
            raise ModelError(f"input {value.name!r} has text elements, which ranks cannot receive")
        for dim in value.shape:
            text = "" if isinstance(dim, int) else dim.value or ""
            # `9**9**9` is a name to `as_dim`, but a number to shape inference, which computes it.
            if "**" in text and as_dim(text) == dim_symbol(text):
                raise ModelError(f"input {value.name!r} has the dim {text!r}, which is not a size")
        value.shape = ir.Shape(
            [
                d if isinstance(d, int) or d.value is not None else f"{value.name}.{axis}"
                for axis, d in enumerate(value.shape)
            ]
        )


def symbol_table(
    model: ir.Model, constraints: Mapping[str, Symbol], registry: Registry = REGISTRY
) -> SymbolTable:
    """Returns the symbols of a model's inputs, with constraints of the user's and the model's own.

    Raises:
        ModelError: A constraint is on a name that no input dim has.
    """
    names: list[str] = []
    for value in model.graph.inputs:
        for dim in value.shape or ():
            if not isinstance(dim, int):
                names += [n for n in sorted(symbols_of(as_dim(dim.value))) if n not in names]
    for name in constraints:
        if name not in names:
            raise ModelError(f"symbol {name!r}: no input of the model has it; there are {names}")
    found = {name: constraints.get(name, Symbol()) for name in names}
    for name, most in size_limits(model.graph, registry).items():
        symbol = found.get(name)
        if symbol is not None and symbol.min < most and not symbol.min < symbol.max <= most:
            found[name] = replace(symbol, max=most)
    for name, least in least_sizes(model.graph, registry).items():
        symbol = found.get(name)
        if symbol is not None and symbol.min < least:
            with suppress(ValueError):  # Where the user's own constraints admit no such size.
                found[name] = replace(symbol, min=least)
    return SymbolTable(found)

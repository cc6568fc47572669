"""Reads a model and brings it into the normal form that later passes take.

In this form, nodes are in topological order and have unique names, functions are inlined, constants
are initializers, initializers are not graph inputs, every dim of an input has a name or a size, and
the shape of every value is inferred as an expression in these names.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from google.protobuf.message import DecodeError
from onnx_shape_inference import (
    SYM_DATA_KEY,
    OpUsageError,
    ShapeInferenceError,
)

from onnxpar.core.errors import ModelError, short
from onnxpar.core.name_patterns import nearest
from onnxpar.core.symbols import Symbol, SymbolTable, as_dim, symbols_of
from onnxpar.core.symbols.formula_limits import MAX_DIMS
from onnxpar.frontend.check_nodes import check_inferred, check_operators
from onnxpar.frontend.check_proto import check_proto
from onnxpar.frontend.expand import expand_unknown, inline_functions
from onnxpar.frontend.fold_constants import fold_constants
from onnxpar.frontend.limits import check_calls, check_dim, check_nesting
from onnxpar.frontend.quiet import quiet
from onnxpar.frontend.upgrade import upgrade_model
from onnxpar.graph.body_captures import (
    close,
    every_node,
    hand_on_results,
    inline_constant_branches,
    lift_constants,
    uncapture,
)
from onnxpar.graph.metadata_keys import ANNOTATION, PREFIX
from onnxpar.graph.names import Names
from onnxpar.graph.state_names import grown_dims, state_pairs
from onnxpar.ops.attention.cache_width import size_caches
from onnxpar.ops.attention.packed_heads import unpack_heads
from onnxpar.ops.control.decided import decided_body
from onnxpar.ops.inference import inference
from onnxpar.ops.old_node import OPSET
from onnxpar.ops.registry import Registry
from onnxpar.ops.size_limits import least_sizes, size_limits
from onnxpar.ops.table import REGISTRY

MIN_OPSET = 7
_MOST = 2**31 - 1
"""Bytes of a model's file, without external files."""
_SMALL = 1 << 14
"""Bytes of integers that are read with the model."""


def load(path: str | Path) -> ir.Model:
    """Reads an ONNX file; weights in external files are read when they are needed.

    Raises:
        ModelError: The file is missing or is not an ONNX model, or its opset is too old or too new.
    """
    return in_memory(read(path), path)


def read(path: str | Path) -> onnx.ModelProto:
    """Reads the proto of an ONNX file, without the external files of its weights.

    Raises:
        ModelError: The file is missing or is not an ONNX model.
    """
    path = Path(path)
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        what = "is a directory" if path.is_dir() else what
        raise ModelError(f"the model {str(path)!r} {what}")
    size = path.stat().st_size
    if size > _MOST:
        raise ModelError(
            f"the model {str(path)!r}: expected at most {_MOST} bytes, which is the limit of "
            f"protobuf (store larger weights in external files), got {size}"
        )
    with _readable(path):
        proto = onnx.load(path, load_external_data=False)
        check_proto(proto, path)
        return proto


def in_memory(proto: onnx.ModelProto, path: str | Path) -> ir.Model:
    """Returns the model of a proto that was read from `path`; the two share their weights.

    Raises:
        ModelError: The proto is not a model, or its opset is too old or too new.
    """
    with quiet("onnx_ir"), _readable(Path(path)):
        model = ir.from_proto(proto)
        ir.external_data.set_base_dir(model.graph, Path(path).parent)
        _settle_external(model)
    _refuse_hard_links(model, path)
    if not model.opset_imports or not (len(model.graph) or len(model.graph.outputs)):
        raise ModelError(f"{str(path)!r} is not an ONNX model: it has no graph or no opset")
    if not model.graph.outputs:
        raise ModelError(f"the model {str(path)!r} has no outputs: expected at least one")
    _opset_of(model, f"the model {str(path)!r}: ")
    _drop_marks(model)
    return model


def _settle_external(model: ir.Model) -> None:
    """Reads small integers, such as shapes, and gives other weights the file behind their link.

    ONNX's inference and the passes read the former. onnx_ir reads no file outside the model's
    folder, such as those of Hugging Face's cache, which `check_proto` has allowed.
    """
    for value in (v for graph in model.graphs() for v in graph.initializers.values()):
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        if os.path.islink(tensor.path):
            folder, name = os.path.split(os.path.realpath(tensor.path))
            tensor = value.const_value = ir.ExternalTensor(
                name, tensor.offset, tensor.length, tensor.dtype,
                shape=tensor.shape, name=tensor.name or "", base_dir=folder,
            )  # fmt: skip
        small = tensor.dtype == ir.DataType.INT64 and tensor.nbytes <= _SMALL
        if small and os.path.isfile(tensor.path):
            # A file that is too short is reported if it is needed.
            with suppress(OSError, ValueError):
                value.const_value = ir.Tensor(tensor.numpy().copy(), name=tensor.name)


def _refuse_hard_links(model: ir.Model, path: str | Path) -> None:
    """Refuses files of weights that have other names (hard links), which may be anywhere.

    Rank graphs are not read here; `verify` gives their weights a second name for a while.

    Raises:
        ModelError: A file has several names; gives the initializer.
    """
    known = set()
    for value in (v for graph in model.graphs() for v in graph.initializers.values()):
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.path in known:
            continue
        known.add(tensor.path)
        names = os.stat(tensor.path).st_nlink if os.path.isfile(tensor.path) else 1
        if names > 1:
            raise ModelError(
                f"{str(path)!r}: initializer {short(tensor.name)}: expected external files in the "
                f"folder of the model, got {short(str(tensor.location))}, which has {names} names "
                "(hard links); use a copy of it"
            )


def _drop_marks(model: ir.Model) -> None:
    """Drops metadata with which passes mark nodes and values: in a file, nothing vouches for it."""
    for graph in (*model.graphs(), *(f.graph for f in model.functions.values())):
        marked: list[ir.Node | ir.Value] = [*graph.inputs, *graph.initializers.values()]
        for node in graph:
            marked += [node, *node.outputs]
        for item in marked:
            for key in [k for k in item.metadata_props if k.startswith(PREFIX)]:
                del item.metadata_props[key]
            item.metadata_props.pop(SYM_DATA_KEY, None)


def _opset_of(model: ir.Model, owner: str = "") -> int:
    """Returns the version of ONNX's operators that a model imports.

    Args:
        model: The model.
        owner: Begins the message of an error; names the model's file, if there is one.

    Raises:
        ModelError: The version is too old or too new.
    """
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx"))
    if opset is None and not any(n.domain in ("", "ai.onnx") for n in model.graph.all_nodes()):
        # A model of other domains need not import the default one.
        return OPSET
    if opset is None or opset < MIN_OPSET:
        raise ModelError(f"{owner}expected an opset version of at least {MIN_OPSET}, got {opset}")
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise ModelError(f"{owner}expected an opset version of at most {newest}, got {opset}")
    return opset


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns the exceptions that a malformed file causes into a ModelError."""
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


def normalise(model: ir.Model, registry: Registry = REGISTRY) -> ir.Model:
    """Returns the model in the form that the module's docstring describes.

    Args:
        model: The model as it was read; it is changed, and must not be used afterwards.
        registry: The table of operators; nodes of other operators are replaced by their bodies.

    Raises:
        ModelError: The graph is not valid: a cycle, an undefined input, an unknown version, a node
            that no runtime could run.
    """
    opset = _opset_of(model)
    if not {"", "ai.onnx"} & model.opset_imports.keys():
        model.opset_imports[""] = opset  # for the nodes that are added
    name_nodes(model.graph)
    # The annotation has been read, and does not apply to the model that is made here.
    model.device_configurations = ()
    model.metadata_props.pop(ANNOTATION, None)
    for node in model.graph.all_nodes():
        node.device_configurations = ()
    check_nesting(model.graph)
    check_calls(model)
    check_operators(model, opset)
    _check_edges(model)
    try:
        model.graph.sort()
    except ValueError as error:
        raise ModelError(f"the graph has a cycle: {_cycle(model)}") from error
    hand_on_results(model)
    inline_functions(model, registry)
    check_nesting(model.graph)  # Functions have bodies too.
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
    decided = partial(decided_body, registry=registry)
    inline_constant_branches(model, decided)
    lift_constants(model)
    fold_constants(model, opset, weights, registry)
    _make_names_unique(model.graph)
    _name_dims(model.graph)
    _infer(model, opset, registry)

    def changed() -> None:
        uncapture(model.graph)
        inline_constant_branches(model, decided)
        lift_constants(model)
        _infer(model, opset, registry)

    # Types and sizes are known now, and with them the widths of caches, the results of CastLike and
    # the branches taken.
    folded = fold_constants(model, opset, weights, registry)
    sized, unpacked = size_caches(model), unpack_heads(model)
    if sized or unpacked or folded or any(map(decided, model.graph.all_nodes())):
        changed()
        model = common.RemoveUnusedNodesPass()(model).model
    expand_unknown(model, registry, changed, lambda: symbol_table(model, {}, registry))
    return model


def _infer(model: ir.Model, opset: int, registry: Registry) -> None:
    """Infers all shapes again and checks each node with them."""
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
    # The names that models declare for output dims are dropped, since proofs need the inferred
    # expressions. The library does not adopt names either: that is slow for quotients, and finds
    # nothing that is used.
    types = {
        value: value.dtype
        for value in model.graph.outputs
        if isinstance(value.type, ir.TensorType) and value.producer() is not None
    }
    for value in types:
        value.type = None
    try:
        with quiet("onnx_shape_inference"):
            inference(registry).infer_shapes(model)
    except (ShapeInferenceError, OpUsageError, ValueError) as error:
        if "inference failed for" in str(error):
            # This message has no reason; ONNX's own inference gives one.
            check_inferred(model, opset)
        raise ModelError(f"shape inference failed: {error}") from error
    close(model.graph)
    check_inferred(model, opset)
    for value, shape in declared.items():
        if value.shape is None:
            value.shape = _declared(value, shape)
    for value, dtype in types.items():
        assert dtype is not None
        if value.dtype is None:
            value.dtype = dtype
        elif value.dtype != dtype:
            raise ModelError(
                f"output {value.name!r}: expected {value.dtype}, which its node gives, got {dtype} "
                "as its declared type"
            )


def _declared(value: ir.Value, shape: ir.Shape) -> ir.Shape:
    """The numbers of the declared shape; other dims get the names of sizes that depend on data."""
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
    """Checks that a tensor has as much data as its shape requires; external data is not read."""
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


def _cycle(model: ir.Model) -> str:
    """Names the nodes of one cycle, each before a node whose result it reads."""
    for graph in model.graphs():
        # A node also waits for what its bodies read.
        before = {node: {p for n in every_node([node]) for p in n.predecessors()} for node in graph}
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            cycle: list[ir.Node] = error.args[1]
            return " <- ".join(repr(node.name or node.op_type) for node in reversed(cycle))
    return "unknown nodes"


def _name(node: ir.Node) -> str:
    return node.name or (f"{node.op_type}_{node.outputs[0].name}" if node.outputs else "node")


def name_nodes(graph: ir.Graph) -> None:
    """Names nodes that have no name, for messages."""
    for node in graph:
        node.name = _name(node)


def _make_names_unique(graph: ir.Graph) -> None:
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
            raise ModelError(f"input {value.name!r} has no shape: its number of dims must be known")
        if len(value.shape) > MAX_DIMS:
            raise ModelError(
                f"input {value.name!r}: expected at most {MAX_DIMS} dims, got {len(value.shape)}"
            )
        if value.dtype in (None, ir.DataType.UNDEFINED):
            raise ModelError(f"input {value.name!r} has no element type")
        if value.dtype == ir.DataType.STRING:
            raise ModelError(f"input {value.name!r} has text elements, which ranks cannot receive")
        for dim in value.shape:
            if not isinstance(dim, int) and dim.value is not None:
                check_dim(f"input {value.name!r}", dim.value)
        value.shape = ir.Shape(
            [
                d if isinstance(d, int) or d.value is not None else f"{value.name}.{axis}"
                for axis, d in enumerate(value.shape)
            ]
        )


def symbol_table(
    model: ir.Model,
    constraints: Mapping[str, Symbol],
    registry: Registry = REGISTRY,
    states: Mapping[str, str] | None = None,
) -> SymbolTable:
    """Returns the symbols of a model's inputs, with the constraints of the user and of the model.

    A dim along which a state grows may be empty, unless the user constrains its symbol.

    Args:
        model: The model.
        constraints: The user's constraints.
        registry: The table of operators.
        states: States that the user names, output by input.

    Raises:
        ModelError: A constraint is for a name that no input dim has.
    """
    names: list[str] = []
    for value in model.graph.inputs:
        for dim in value.shape or ():
            if not isinstance(dim, int):
                names += [n for n in sorted(symbols_of(as_dim(dim.value))) if n not in names]
    for name in constraints:
        if name not in names:
            raise ModelError(
                f"symbol {name!r}: expected a symbol of the model's inputs{nearest(name, names)}"
            )
    empty = _empty_at_first(model.graph, states)
    found = {
        name: constraints.get(name, Symbol(min=0) if name in empty else Symbol()) for name in names
    }
    for name, most in size_limits(model.graph, registry).items():
        symbol = found.get(name)
        if symbol is not None and symbol.min < most and not symbol.min < symbol.max <= most:
            found[name] = replace(symbol, max=most)
    for name, least in least_sizes(model.graph, registry).items():
        symbol = found.get(name)
        if symbol is not None and 0 < symbol.min < least:
            with suppress(ValueError):  # The user's own constraints may exclude such a size.
                found[name] = replace(symbol, min=least)
    return SymbolTable(found)


def _empty_at_first(graph: ir.Graph, states: Mapping[str, str] | None) -> set[str]:
    """Returns the symbols of dims along which states grow, if no other input has them as a dim."""
    grown = grown_dims(graph, state_pairs(graph, states))
    found: set[str] = set()
    others: set[str] = set()
    for value in graph.inputs:
        for dim, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value:
                (found if grown.get(value.name or "") == dim else others).add(size.value)
    return found - others

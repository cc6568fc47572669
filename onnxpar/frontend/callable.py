"""Objects that can be called as a model: functions, models, parts of models; their boundary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import onnx
import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.frontend.model_part import COLLECTIVES, own_model
from onnxpar.graph.new_nodes import identity

IR_VERSION = 10
"""The IR version of the model of a function; it allows every supported opset."""


@runtime_checkable
class Exportable(Protocol):
    """A function that can return its model, such as those of onnxscript.

    Only the method is required, so that onnxscript need not be installed.
    """

    def to_model_proto(self) -> Any:
        """Returns the model, with the functions that it calls."""


@dataclass(frozen=True)
class Source:
    """An object that can be called as a model.

    Attributes:
        name: Its name in messages.
        inputs: Names of the inputs.
        shapes: Declared dims of each input, sizes or expressions; None if they are those of a call.
        dtypes: Declared element type of each input; None if it is that of a call.
        outputs: Names of the outputs.
        parameters: Names of the initializers.
        make: Returns a new model at each call.
    """

    name: str
    inputs: tuple[str, ...]
    shapes: tuple[tuple[int | str | None, ...] | None, ...]
    dtypes: tuple[ir.DataType | None, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    make: Callable[[], ir.Model]


def source_of(fn: object) -> Source:
    """Returns an object as a `Source`.

    Args:
        fn: A function of onnxscript or an `ir.Function`, whose dims are those of each call; or a
            model, its proto, its path or PyTorch's `ONNXProgram`, with declared dims.

    Raises:
        ModelError: It is something else, has attributes without a value, or is already sharded.
    """
    declared = False
    program = getattr(fn, "model", None)
    if isinstance(program, ir.Model):  # the ONNXProgram of `torch.onnx.export`
        fn = program
    if isinstance(fn, ir.Function):
        name, make = fn.name, partial(_function_model, fn)
    elif isinstance(fn, ir.Model | onnx.ModelProto | str | Path):
        name = str(fn) if isinstance(fn, str | Path) else fn.graph.name or "model"
        declared, make = True, partial(own_model, fn)
    elif isinstance(fn, Exportable):
        proto = _exported(fn)
        name, make = proto.graph.name, partial(own_model, proto)
    else:
        way = "only a graph can be sharded"
        if hasattr(fn, "state_dict"):
            way = "use onnxpar.shard_module(module, args), or export it with onnxpar.from_torch"
        raise ModelError(
            "shard: expected an onnxscript function, an onnx_ir.Function, a model, its path or "
            f"a part of it, got {type(fn).__name__}; {way}"
        )
    model = make()
    _check_not_sharded(model, name)
    inputs = [v for v in model.graph.inputs if v.name not in model.graph.initializers]
    return Source(
        name,
        tuple(v.name or "" for v in inputs),
        tuple(_dims(v) if declared else None for v in inputs),
        tuple(v.dtype if declared else None for v in inputs),
        tuple(v.name or "" for v in model.graph.outputs),
        tuple(model.graph.initializers),
        make,
    )


def _exported(fn: Exportable) -> onnx.ModelProto:
    try:
        proto = fn.to_model_proto()
    except ValueError as error:
        raise ModelError(f"shard: {error}") from None
    if not isinstance(proto, onnx.ModelProto):
        raise ModelError(f"shard: expected to_model_proto() to give a ModelProto, got {proto!r}")
    return proto


def _function_model(function: ir.Function) -> ir.Model:
    for attribute in function.attributes.values():
        raise ModelError(
            f"shard: function {function.name!r}: expected a function of tensors only, got the "
            f"attribute {attribute.name!r}; call the function from another one that gives it a "
            f"value"
        )
    return ir.Model(function.clone().graph, ir_version=IR_VERSION)


def _dims(value: ir.Value) -> tuple[int | str | None, ...] | None:
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def _check_not_sharded(model: ir.Model, name: str) -> None:
    graphs = [model.graph, *(f.graph for f in model.functions.values())]
    for graph in graphs:
        for node in ir.traversal.RecursiveGraphIterator(graph):
            if node.domain == COLLECTIVES:
                raise ModelError(
                    f"shard: {name!r} has the collective {node.op_type} (node {node.name!r}): "
                    f"it is already sharded, and shard cannot be nested; give all strategies in "
                    f"one call"
                )


def typed(
    model: ir.Model,
    names: Sequence[str],
    shapes: Sequence[Sequence[int | str]],
    dtypes: Sequence[ir.DataType],
) -> None:
    """Sets the shapes and element types of the inputs of a model, in place.

    Declared shapes and types of other values are removed, since they follow from the inputs.
    """
    by_name = {v.name: v for v in model.graph.inputs}
    for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
        by_name[name].shape = ir.Shape(shape)
        by_name[name].type = ir.TensorType(dtype)
    for value in model.graph.outputs:
        if value.producer() is not None:
            value.shape, value.type = None, None


@dataclass(frozen=True)
class Gates:
    """Identities at the boundary of a model, which can have a strategy.

    Attributes:
        inputs: For some inputs, by number, the node after the input.
        made: For some outputs, by number, the node that has the layout of the computed value.
        outputs: The last node before each output.
    """

    inputs: dict[int, str]
    made: dict[int, str]
    outputs: tuple[str, ...]


def add_gates(
    model: ir.Model, names: Sequence[str], behind: Sequence[int], made: Sequence[int]
) -> Gates:
    """Adds Identities at the boundary of a model, in place.

    Args:
        model: The model.
        names: Names of its inputs.
        behind: Numbers of the inputs that get a node.
        made: Numbers of the outputs that get a node before the last one.
    """
    graph = model.graph
    by_name = {v.name: v for v in graph.inputs}
    inputs = {}
    for index in behind:
        value = by_name[names[index]]
        uses = tuple(value.uses())
        gate = _gate(value, f"shard/in/{value.name}")
        for use in uses:
            use.node.replace_input_with(use.idx, gate.outputs[0])
        for position, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[position] = gate.outputs[0]
        first = next(iter(graph), None)
        if first is None:
            graph.append(gate)
        else:
            graph.insert_before(first, gate)
        inputs[index] = gate.name or ""
    laid, outputs = {}, []
    for index, value in enumerate(tuple(graph.outputs)):
        if index in made:
            gate = _gate(value, f"shard/made/{index}")
            graph.append(gate)
            laid[index], value = gate.name or "", gate.outputs[0]
        gate = _gate(value, f"shard/out/{index}")
        graph.append(gate)
        graph.outputs[index] = gate.outputs[0]
        outputs.append(gate.name or "")
    return Gates(inputs, laid, tuple(outputs))


def _gate(value: ir.Value, name: str) -> ir.Node:
    return identity(value, name, name)

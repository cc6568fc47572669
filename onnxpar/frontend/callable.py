"""What can be called as a model: functions, models and parts of models, and their boundary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import onnx
import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.frontend.model_part import COLLECTIVES, whole_model
from onnxpar.graph.new_nodes import identity

IR_VERSION = 10
"""Of the model that is made of a function: every opset that is supported may stand in it."""


@runtime_checkable
class Exportable(Protocol):
    """A function that knows its model, such as those of onnxscript.

    The form alone is asked for, so that onnxscript is needed by those only who have such functions.
    """

    def to_model_proto(self) -> Any:
        """Returns the model, with the functions that it calls."""


@dataclass(frozen=True)
class Source:
    """What is sharded when it is called.

    Attributes:
        name: What it is called in messages.
        inputs: Names of the inputs.
        shapes: Declared dims of each input, sizes or expressions; None where calls say them.
        dtypes: Declared element type of each input, None where calls say it.
        outputs: Names of the outputs.
        parameters: Names of the initializers.
        make: Returns the model, a new one at each call.
    """

    name: str
    inputs: tuple[str, ...]
    shapes: tuple[tuple[int | str | None, ...] | None, ...]
    dtypes: tuple[ir.DataType | None, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    make: Callable[[], ir.Model]


def source_of(fn: object) -> Source:
    """Returns what `fn` is.

    Args:
        fn: A function of onnxscript or an `ir.Function`, whose dims calls say; or a model, its
            proto or its path, whose declared dims hold.

    Raises:
        ModelError: It is something else, has attributes without a value, or is already sharded.
    """
    if isinstance(fn, ir.Function):
        name, function, declared = fn.name, fn, False

        def make() -> ir.Model:
            return _function_model(function)

    elif isinstance(fn, ir.Model | onnx.ModelProto | str | Path):
        given: ir.Model | onnx.ModelProto | str | Path = fn
        name = str(fn) if isinstance(fn, str | Path) else fn.graph.name or "model"
        declared = True

        def make() -> ir.Model:
            return whole_model(given)

    elif isinstance(fn, Exportable):
        proto, declared = _exported(fn), False
        name = proto.graph.name

        def make() -> ir.Model:
            return ir.from_proto(proto)

    else:
        raise ModelError(
            "shard: expected an onnxscript function, an onnx_ir.Function, a model, its path or "
            f"a part of it, got {type(fn).__name__}; only a graph can be sharded"
        )
    model = make()
    _check_undivided(model, name)
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
    graph = function.clone().graph
    version = IR_VERSION
    return ir.Model(graph, ir_version=version)


def _dims(value: ir.Value) -> tuple[int | str | None, ...] | None:
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def _check_undivided(model: ir.Model, name: str) -> None:
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
    """Gives the inputs of a model their shapes and element types, in place.

    What functions declare of other values is dropped: it follows from the inputs.
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
    """The nodes at the boundary of a model: each hands one value on and can be given a strategy.

    Attributes:
        inputs: By number of the input, the node behind it.
        made: By number of the output, the node that lays it out as it is made.
        outputs: The node through which each output leaves.
    """

    inputs: dict[int, str]
    made: dict[int, str]
    outputs: tuple[str, ...]


def add_gates(
    model: ir.Model, names: Sequence[str], behind: Sequence[int], made: Sequence[int]
) -> Gates:
    """Puts nodes at the boundary of a model, in place.

    Args:
        model: The model.
        names: Names of its inputs.
        behind: Numbers of the inputs that get a node.
        made: Numbers of the outputs that get a node besides the one through which they leave.
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

"""Checks what a model's file says before anything else reads it, in one pass over its messages.

Text must be UTF-8, names must fit into a line, the version must be known, sizes must not be
negative, a node must not give an attribute twice, no two values may have one name, and the files of
weights must be in the folder of the model. What the operators require is checked later.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from onnxpar.core.errors import ModelError, short

_PROSE = ("doc_string", "value", "producer_name", "producer_version")
"""The fields of text that may have several lines; `value` is that of metadata."""
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that end a text, move the cursor of a terminal, or begin a new line."""


def check_proto(proto: onnx.ModelProto, path: Path) -> None:
    """Checks a model that was read from a file.

    Args:
        proto: The model.
        path: Its file.

    Raises:
        ModelError: It is not as the docstring of the module says; names the file and the node.
    """
    if not 0 <= proto.ir_version <= onnx.IR_VERSION:
        raise ModelError(
            f"{str(path)!r}: expected an ir_version of 0 to {onnx.IR_VERSION}, the newest that the "
            f"installed onnx knows, got {proto.ir_version}"
        )
    found = _functions_fault(proto) or _outputs_fault(proto) or _fault(proto, "model", "", path)
    if found is not None:
        raise ModelError(f"{str(path)!r}: {found}")


def external_locations(proto: onnx.ModelProto) -> list[str]:
    """Returns the names of a model's external files, sorted."""
    tensors = (m for m in _messages(proto) if isinstance(m, onnx.TensorProto))
    return sorted(
        {
            entry.value
            for tensor in tensors
            if tensor.data_location == onnx.TensorProto.EXTERNAL
            for entry in tensor.external_data
            if entry.key == "location"
        }
    )


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for name, repeated, nested in _text_fields(message.DESCRIPTOR):
        if nested and (repeated or message.HasField(name)):
            items = getattr(message, name)
            for item in items if repeated else (items,):
                yield from _messages(item)


def _fault(message: Message, place: str, owner: str, path: Path) -> str | None:
    """Returns what is wrong with a message or with those in it; None if nothing is.

    Fields of bytes, such as the data of weights, are not read.

    Args:
        message: The message.
        place: Where it is, as fields and indices.
        owner: What it belongs to, as messages name it: a node, a tensor, a value.
        path: The file.
    """
    kind = message.DESCRIPTOR.name
    if kind in _NAMED:
        owner = _NAMED[kind](message, owner)
    if kind in _CHECKS:
        found = _CHECKS[kind](message, path)
        if found is not None:
            return f"{owner}: {found}" if owner else found
    for name, repeated, nested in _text_fields(message.DESCRIPTOR):
        if not repeated and not message.HasField(name):
            continue
        items = getattr(message, name)
        for index, item in enumerate(items if repeated else (items,)):
            where = f"{place}.{name}[{index}]" if repeated else f"{place}.{name}"
            found = _fault(item, where, owner, path) if nested else _text_fault(name, item, where)
            if found is not None:
                return found
    return None


def _text_fault(field: str, text: str | bytes, where: str) -> str | None:
    """Protobuf returns strings that are not UTF-8 as bytes."""
    if isinstance(text, bytes):
        return f"{where}: expected text in UTF-8, got {text!r}"
    if field not in _PROSE and _CONTROL.search(text):
        return f"{where}: expected a name without control characters, got {text!r}"
    return None


@cache
def _text_fields(kind: Descriptor) -> tuple[tuple[str, bool, bool], ...]:
    """Returns the fields of text and of messages: name, whether repeated, whether messages."""
    return tuple(
        (field.name, field.is_repeated, field.type == field.TYPE_MESSAGE)
        for field in kind.fields
        if field.type in (field.TYPE_STRING, field.TYPE_MESSAGE)
    )


def _node_fault(node: Any, path: Path) -> str | None:
    if len(node.attribute) < 2:
        return None
    name, count = Counter(attribute.name for attribute in node.attribute).most_common(1)[0]
    return f"expected attribute {short(name)} once, got it {count} times" if count > 1 else None


def _functions_fault(model: Any) -> str | None:
    names = Counter((f.domain, f.name, f.overload) for f in model.functions)
    for (domain, name, _), count in names.items():
        if count > 1:
            return f"expected one function {short(f'{domain}::{name}')}, got {count}"
    return None


def _outputs_fault(model: Any) -> str | None:
    # A run returns results by name. Bodies return them by position.
    for name, count in Counter(value.name for value in model.graph.output).items():
        if count > 1:
            return f"expected one output {short(name)}, got {count}"
    return None


def _graph_fault(graph: Any, path: Path) -> str | None:
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        return (
            f"initializer {short(name)}: sparse initializers are not supported: expected all "
            "elements, as in 'initializer', got 'sparse_initializer'"
        )
    inputs = [value.name for value in graph.input]
    known = set(inputs)  # An initializer may be the default value of an input.
    weights = [tensor.name for tensor in graph.initializer if tensor.name not in known]
    return _names_fault(inputs, graph.node, weights)


def _names_fault(inputs: Iterable[str], nodes: Any, weights: Iterable[str] = ()) -> str | None:
    """Says which name two values of a graph or a function have."""
    first: dict[str, str] = {}
    for what, names in (
        ("an input", inputs),
        ("an initializer", weights),
        *((f"a result of node {short(n.name)} ({n.op_type})", n.output) for n in nodes),
    ):
        for name in filter(None, names):
            if name in first:
                return f"expected one value {short(name)}, got {first[name]} and {what}"
            first[name] = what
    return None


def _function_fault(function: Any, path: Path) -> str | None:
    twice = _names_fault(function.input, function.node)
    if twice is not None:
        return twice
    made = {name for node in function.node for name in node.output} | set(function.input)
    missing = next((name for name in function.output if name not in made), None)
    return None if missing is None else f"no node makes the output {short(missing)}"


def _dim_fault(dim: Any, path: Path) -> str | None:
    # Some exporters write -1 for a size that is not known, and it is read as that.
    if dim.dim_value < -1:
        return f"expected dims of at least 0, or -1 for an unknown size, got {dim.dim_value}"
    return None


def _dims_fault(tensor: Any, path: Path) -> str | None:
    if any(size < 0 for size in tensor.dims):
        return f"expected dims of at least 0, got {short([*tensor.dims])}"
    return None


def _tensor_fault(tensor: Any, path: Path) -> str | None:
    found = _dims_fault(tensor, path)
    if found is not None:
        return found
    for entry in tensor.external_data:
        text = entry.value
        if entry.key in ("offset", "length") and not (
            text.isdecimal() and len(text) < 20 and int(text) < 2**63
        ):
            return (
                f"external data: expected a number of bytes as {entry.key!r}, below 2**63, got "
                f"{short(text)}"
            )
        if entry.key == "location" and tensor.data_location == onnx.TensorProto.EXTERNAL:
            if _CONTROL.search(text):
                return f"expected a file's name without control characters, got {short(text)}"
            outside = _outside(text, path)
            if outside is not None:
                return outside
    return None


def _outside(location: str, path: Path) -> str | None:
    """Says whether the file of a weight is one that the model's author cannot have meant.

    A foreign model must not make other files of this machine part of its weights. Links may stay
    in the folder of the model. If the model's file is itself a link, as in the cache of Hugging
    Face, they may also lead to the folder that this link leads to.
    """
    if os.path.isabs(location) or ".." in Path(location).parts:
        return f"expected external files in the folder of the model, got {short(location)}"
    real = os.path.realpath(path.parent / location)
    folders = {os.path.realpath(path.parent), os.path.dirname(os.path.realpath(path))}
    if not any(Path(real).is_relative_to(folder) for folder in folders):
        return (
            f"expected external files in the folder of the model, got {short(location)}, a link "
            f"that leads to {real}"
        )
    return None


def _named_tensor(tensor: Any, owner: str) -> str:
    return f"{owner}: tensor {short(tensor.name)}" if owner else f"initializer {short(tensor.name)}"


_NAMED: Mapping[str, Callable[[Any, str], str]] = {
    "NodeProto": lambda node, owner: f"node {short(node.name)} ({node.op_type})",
    "FunctionProto": lambda function, owner: (
        f"function {short(f'{function.domain}::{function.name}')}"
    ),
    "ValueInfoProto": lambda value, owner: f"value {short(value.name)}",
    "TensorProto": _named_tensor,
    "SparseTensorProto": lambda sparse, owner: _named_tensor(sparse.values, owner),
}
_CHECKS: Mapping[str, Callable[[Any, Path], str | None]] = {
    "GraphProto": _graph_fault,
    "NodeProto": _node_fault,
    "FunctionProto": _function_fault,
    "Dimension": _dim_fault,
    "SparseTensorProto": _dims_fault,
    "TensorProto": _tensor_fault,
}

"""Changes to a message of protobuf, above all to a model."""

from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz.hostile.values import INTS, SURROGATE, TEXTS, change_bytes

DIMS = (
    "batch%0", "batch*batch", "batch/2", "-batch", "batch-batch", "max(batch,seq)",
    "floor(batch/3)",
    "batch**8", "2*batch+1", "batch//0", "seq", "1/0", "4", "-4", "0", "a.b", "a b", "batch%seq",
    "Max(batch, 1/0)", "(batch", "batch**-1", "mod(batch,0)", "ceil(batch/2)*2", "batch.real",
    "batch[0]", "floor()", "max()", "Min()", "mod(batch)", "floor(batch,2)", "sqrt(batch)",
    "*".join(["9" * 18] * 3), "batch*" + "*".join(["9" * 18] * 3), "batch;seq", "1e400*batch",
    "3-5",
)  # fmt: skip
"""Dims that are expressions, some of them without a value."""
KEYS = (
    "location", "offset", "length", "checksum", "onnxpar.captured", "onnxpar.plan", "virtual_stage",
    "expanded_from", "pkg.onnx_shape_inference.sym_data", "pkg.torch.onnx.original_node_name",
)  # fmt: skip
"""Keys that readers know."""
_WHOLE = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
}


@cache
def _operators() -> tuple[tuple[str, str], ...]:
    schemas = onnx.defs.get_all_schemas()
    known = sorted({(s.domain, s.name) for s in schemas if s.domain == ""})
    return (
        *known,
        ("com.microsoft", "Gelu"),
        ("com.microsoft", "MatMulNBits"),
        ("onnxpar", "AllReduce"),
    )


def messages(root: Message) -> Iterator[Message]:
    """A message, and all messages in it."""
    waiting = [root]
    while waiting:
        found = waiting.pop()
        yield found
        for field, value in found.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                waiting += list(value) if field.is_repeated else [value]


def change_message(root: Message, draw: Random) -> None:
    """Changes a field of a message, or of a message in it."""
    every = list(messages(root))
    chosen = draw.choice(every)
    kind = draw.randrange(10)
    if isinstance(root, onnx.ModelProto) and kind < 5 and root.graph.node:
        _change_model(root, draw)
        return
    fields = [f for f, _ in chosen.ListFields()]
    if kind == 5 or not fields:
        fields = list(chosen.DESCRIPTOR.fields)
    if fields:
        _change_field(chosen, draw.choice(fields), every, draw)


def _change_field(
    owner: Message, field: FieldDescriptor, every: list[Message], draw: Random
) -> None:
    kind = draw.randrange(6)
    if kind == 0:
        owner.ClearField(field.name)
        return
    value: Any = getattr(owner, field.name)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        alike = [m for m in every if m.DESCRIPTOR is field.message_type and m is not owner]
        source = draw.choice(alike) if alike and kind < 5 else None
        copied = None if source is None else source.SerializeToString()
        target = value.add() if field.is_repeated else value
        if field.is_repeated and kind == 1 and len(value) > 1:
            target = value[draw.randrange(len(value))]
        if copied is None:
            target.SetInParent()
        elif len(copied) < 100_000:
            target.ParseFromString(copied)
        if field.is_repeated and kind == 2:
            del value[draw.randrange(len(value))]
        return
    made = _scalar(field, draw)
    if not field.is_repeated:
        setattr(owner, field.name, made)
    elif kind == 1 and len(value):
        del value[draw.randrange(len(value)) :]
    elif kind == 2 and len(value):
        value[draw.randrange(len(value))] = made
    else:
        value.extend([made] * draw.choice((1, 1, 2, 70)))


def _scalar(field: FieldDescriptor, draw: Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        made = draw.choice((draw.choice(TEXTS), draw.choice(DIMS), draw.choice(KEYS)))
        return made.replace(SURROGATE, "?")
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.choice((b"", b"\xff" * 9, draw.randbytes(16), b"x" * 100_000))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return draw.choice([v.number for v in field.enum_type.values])
    if field.type in _WHOLE:
        low, high = _WHOLE[field.type]
        return draw.choice([n for n in (*INTS, *range(30)) if low <= n <= high])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    return draw.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))


def _change_model(model: onnx.ModelProto, draw: Random) -> None:
    graph = model.graph
    node = draw.choice(graph.node)
    # Text that an earlier change made invalid is read as bytes, and cannot be written.
    every = [n for each in graph.node for n in (*each.input, *each.output)]
    names = [n for n in every if isinstance(n, str)] or ["x"]
    kind = draw.randrange(11)
    if kind == 0:
        node.domain, node.op_type = draw.choice(_operators())
    elif kind == 1 and node.input:
        node.input[draw.randrange(len(node.input))] = draw.choice((*names, "", "ghost"))
    elif kind == 2:
        node.input.extend([draw.choice((*names, ""))] * draw.choice((1, 2, 30)))
    elif kind == 3:
        del node.input[draw.randrange(len(node.input) + 1) :]
    elif kind == 4:
        dims = [
            d
            for info in (*graph.input, *graph.output, *graph.value_info)
            for d in info.type.tensor_type.shape.dim
        ]
        if dims:
            draw.choice(dims).dim_param = draw.choice(DIMS)
    elif kind == 5 and graph.initializer:
        tensor = draw.choice(graph.initializer)
        if tensor.raw_data:
            tensor.raw_data = change_bytes(tensor.raw_data, draw)
        if tensor.dims and draw.random() < 0.5:
            tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice(INTS[:17])
    elif kind == 6 and graph.initializer:
        tensor = draw.choice(graph.initializer)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        if draw.random() < 0.8:
            tensor.ClearField("raw_data")
        for key in ("location", "offset", "length"):
            texts = (*TEXTS[:12], "model.onnx", "0", "-1", "64", str(2**70), ".")
            tensor.external_data.add(key=key, value=draw.choice(texts))
    elif kind == 7:
        _nest(node, graph, draw)
    elif kind == 8:
        node.output.extend([draw.choice((*names, "", "extra"))])
    elif kind == 9:
        graph.node.insert(draw.randrange(len(graph.node)), draw.choice(graph.node))
    else:
        node.metadata_props.add(key=draw.choice(KEYS), value=draw.choice(TEXTS))


def _nest(node: onnx.NodeProto, graph: onnx.GraphProto, draw: Random) -> None:
    """Gives a node a body, or bodies inside one another."""
    body = onnx.GraphProto()
    body.CopyFrom(graph)
    for _ in range(draw.choice((1, 2, 12, 120))):
        inner = onnx.GraphProto(name="body")
        outer = inner.node.add(op_type=draw.choice(("If", "Loop", "Scan", "Relu")))
        outer.output.append("z")
        if body.ByteSize() > 200_000:
            break
        outer.attribute.add(name="body", type=onnx.AttributeProto.GRAPH).g.CopyFrom(body)
        body = inner
    name = draw.choice(("then_branch", "else_branch", "body", "g"))
    if name != "g":
        node.op_type = draw.choice(("If", "Loop", "Scan", "SequenceMap"))
    node.attribute.add(name=name, type=onnx.AttributeProto.GRAPH).g.CopyFrom(body)

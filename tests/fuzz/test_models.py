"""Malformed models: a clear error or a complete directory, and nothing else.

Every case draws from a seed of its own; `ONNXPAR_FUZZ_SEED` shifts them all, `ONNXPAR_FULL` runs
many more. A failure names the seed of its case.
"""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from google.protobuf.message import Message
from onnx import TensorProto, numpy_helper

from onnxpar.api.shard_model import shard_model
from onnxpar.core.errors import OnnxparError
from tests.tiers import FULL

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
CASES = 2000 if FULL else 40

HEAD = '<ir_version: 10, opset_import: ["": 20]>\n'
NET = """
net (float[batch, 8] x) => (float[batch, 4] y)
<float[8, 16] up, float[16] bias, float[16, 4] down>
{
    a = MatMul(x, up)
    b = Add(a, bias)
    c = Relu(b)
    d = MatMul(c, down)
    y = Softmax<axis = -1>(d)
}
"""
SHAPES = """
net (float[batch, seq, 8] x, int64[batch, seq] ids) => (float[batch, m, 8] y, float[k, 4] z)
<float[10, 8] table, float[8] scale, float[8] shift>
{
    e = Gather<axis = 0>(table, ids)
    s = Add(x, e)
    n = LayerNormalization<axis = -1>(s, scale, shift)
    two = Constant<value = int64[2] {-1, 4}>()
    z = Reshape(n, two)
    t = Transpose<perm = [1, 0, 2]>(n)
    y = Transpose<perm = [1, 0, 2]>(t)
}
"""


def model(text: str) -> onnx.ModelProto:
    """A model with weights of a fixed seed for each of its declared initializers."""
    proto = onnx.parser.parse_model(HEAD + text)
    rng = np.random.default_rng(0)
    graph = proto.graph
    made = {name for node in graph.node for name in node.output}
    for info in list(graph.value_info):
        if info.name not in made:
            shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
            values = rng.standard_normal(shape).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(values, info.name))
            graph.value_info.remove(info)
    onnx.checker.check_model(proto)
    return proto


MODELS = {"net": model(NET), "shapes": model(SHAPES)}


def attempt(folder: Path, data: bytes, strategy: str = "dp=2,tp=2") -> str:
    """Shards a file; returns the error's text, or '' where it was sharded.

    Any exception but ours, and anything left half written, fails the test.
    """
    path = folder / "model.onnx"
    path.write_bytes(data)
    try:
        shard_model(path, strategy, folder / "out")
    except OnnxparError as error:
        assert {p.name for p in folder.iterdir()} == {"model.onnx"}
        assert str(error).strip()
        return str(error)
    assert {p.name for p in folder.iterdir()} == {"model.onnx", "out"}
    assert (folder / "out" / "manifest.json").is_file()
    return ""


@pytest.mark.parametrize("name", MODELS)
def test_the_models_themselves_are_sharded(tmp_path: Path, name: str) -> None:
    assert attempt(tmp_path, MODELS[name].SerializeToString()) == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\n" * 100,
        b"hello, world\n",
        b"\x89PNG\r\n\x1a\n" + bytes(64),
        b"PK\x03\x04" + bytes(64),
        b'{"irVersion": "8", "graph": {}}',
        b"\xff" * 1000,
        bytes(range(256)) * 16,
        onnx.TensorProto(dims=[2], data_type=1, raw_data=bytes(8)).SerializeToString(),
        onnx.ModelProto(ir_version=10).SerializeToString(),
        onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="g")).SerializeToString(),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_model_is_refused(tmp_path: Path, data: bytes) -> None:
    assert "model.onnx" in attempt(tmp_path, data)


@pytest.mark.parametrize("name", MODELS)
def test_text_that_is_no_text(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """Protobuf gives a string that is not UTF-8 as bytes, wherever it stands in the model."""
    proto = onnx.ModelProto()
    proto.CopyFrom(MODELS[name])
    proto.producer_name, proto.domain, proto.doc_string = "producer", "some.domain", "a model"
    proto.graph.doc_string = "a graph"
    proto.metadata_props.add(key="author", value="nobody")
    proto.opset_import.add(domain="other.domain", version=1)
    for index, node in enumerate(proto.graph.node):
        node.name, node.doc_string = f"node{index}", f"doc{index}"
    data = proto.SerializeToString()
    words = set(strings(proto))
    assert {"net", "node0", "a graph", "author", "nobody", "batch", "other.domain"} <= words
    for word in sorted(words):
        # Behind the length that a string of protobuf begins with.
        old = bytes([len(word)]) + word.encode()
        assert old in data
        text = attempt(tmp_path_factory.mktemp("text"), data.replace(old, old[:-1] + b"\xf4"))
        assert "UTF-8" in text, f"{word!r}: {text}"


def strings(message: Message) -> Iterator[str]:
    """Every string of a protobuf message that is not empty."""
    for field, value in message.ListFields():
        for item in value if field.is_repeated else [value]:
            if isinstance(item, Message):
                yield from strings(item)
            elif isinstance(item, str) and item:
                yield item


@pytest.mark.parametrize("character", ["\0", "\n", "\x1b", "\x85", "\u2028"])
def test_control_characters_in_names(tmp_path: Path, character: str) -> None:
    """They would end or change lines of messages and logs; texts for people may have them."""
    text = f"a{character}b"
    for change in (
        lambda g: setattr(g.node[0], "name", text),
        lambda g: g.node[0].output.__setitem__(0, text),
        lambda g: g.node[0].input.__setitem__(0, text),
        lambda g: setattr(g.input[0], "name", text),
        lambda g: setattr(g.output[0], "name", text),
        lambda g: setattr(g.initializer[0], "name", text),
        lambda g: setattr(g.input[0].type.tensor_type.shape.dim[0], "dim_param", text),
        lambda g: setattr(g.node[0], "op_type", text),
    ):
        proto = onnx.ModelProto()
        proto.CopyFrom(MODELS["net"])
        change(proto.graph)
        found = attempt(tmp_path, proto.SerializeToString())
        assert f"expected a name without control characters, got {text!r}" in found
    proto = onnx.ModelProto()
    proto.CopyFrom(MODELS["net"])
    proto.graph.node[0].doc_string = proto.graph.doc_string = text
    proto.metadata_props.add(key="notes", value=text)
    assert attempt(tmp_path, proto.SerializeToString()) == ""


@pytest.mark.parametrize("name", MODELS)
def test_truncated_anywhere(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    data = MODELS[name].SerializeToString()
    # Protobuf has no end mark: some prefixes are models of their own, which may be sharded.
    draw = random.Random(SEED)
    for length in sorted(draw.sample(range(len(data)), min(CASES // 2, len(data)))):
        try:
            attempt(tmp_path_factory.mktemp("sharded"), data[:length])
        except Exception as error:
            raise AssertionError(f"truncated to {length} bytes: {error!r}") from error


@pytest.mark.parametrize("name", MODELS)
def test_flipped_bytes(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    original = MODELS[name].SerializeToString()
    for seed in range(SEED, SEED + CASES):
        draw = random.Random(seed)
        data = bytearray(original)
        for _ in range(draw.choice([1, 1, 2, 8])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            attempt(tmp_path_factory.mktemp("flip"), bytes(data))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def drop_node(proto: onnx.ModelProto, draw: random.Random) -> None:
    del proto.graph.node[draw.randrange(len(proto.graph.node))]


def drop_weight(proto: onnx.ModelProto, draw: random.Random) -> None:
    del proto.graph.initializer[draw.randrange(len(proto.graph.initializer))]


def other_operator(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = draw.choice(proto.graph.node)
    node.op_type = draw.choice(
        ["Relu", "MatMul", "Conv", "If", "Reshape", "Concat", "Split", "Nope", "", "Slice", "Where"]
    )


def other_domain(proto: onnx.ModelProto, draw: random.Random) -> None:
    draw.choice(proto.graph.node).domain = draw.choice(["com.microsoft", "onnxpar", "x" * 1000])


def other_input(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = draw.choice(proto.graph.node)
    names = ["", "ghost", *(n for m in proto.graph.node for n in [*m.input, *m.output])]
    if node.input and draw.random() < 0.7:
        node.input[draw.randrange(len(node.input))] = draw.choice(names)
    else:
        node.input.append(draw.choice(names))


def other_output(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = draw.choice(proto.graph.node)
    node.output[0] = draw.choice(["", "y", "x", "extra", draw.choice(proto.graph.node).output[0]])


def fewer_inputs(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = draw.choice(proto.graph.node)
    del node.input[draw.randrange(len(node.input) + 1) :]


def other_shape(proto: onnx.ModelProto, draw: random.Random) -> None:
    tensor = draw.choice(proto.graph.initializer)
    tensor.dims[0] = draw.choice([0, 1, 3, -1, 1 << 40, (1 << 63) - 1])


def other_data(proto: onnx.ModelProto, draw: random.Random) -> None:
    tensor = draw.choice(proto.graph.initializer)
    tensor.raw_data = tensor.raw_data[: draw.randrange(len(tensor.raw_data))]


def other_type(proto: onnx.ModelProto, draw: random.Random) -> None:
    kinds = [0, TensorProto.STRING, TensorProto.INT64, TensorProto.INT4, 99, TensorProto.BFLOAT16]
    draw.choice(proto.graph.initializer).data_type = draw.choice(kinds)


def other_input_shape(proto: onnx.ModelProto, draw: random.Random) -> None:
    tensor = draw.choice(proto.graph.input).type.tensor_type
    dim = draw.choice(tensor.shape.dim)
    kind = draw.randrange(5)
    if kind == 0:
        tensor.ClearField("shape")
    elif kind == 1:
        dim.dim_value = draw.choice([0, -3, 1 << 62])
    elif kind == 2:
        dim.dim_param = draw.choice(["", "a+", "1/0", "batch*batch", "9**9**9", "é", "a b"])
    elif kind == 3:
        dim.Clear()
    else:
        tensor.elem_type = draw.choice([0, 8, 77])


def other_attribute(proto: onnx.ModelProto, draw: random.Random) -> None:
    node = draw.choice(proto.graph.node)
    if not node.attribute:
        node.attribute.append(onnx.helper.make_attribute("axis", draw.choice([-9, 0, 7])))
        return
    attribute = draw.choice(node.attribute)
    kind = draw.randrange(4)
    if kind == 0:
        attribute.i = draw.choice([-9, 99, 1 << 62])
    elif kind == 1:
        attribute.type = draw.choice([0, 1, 2, 3, 4, 5, 7])
    elif kind == 2:
        attribute.name = draw.choice(["", "axes", "perm", "to"])
    else:
        attribute.ints.extend([5, -5])


def external(proto: onnx.ModelProto, draw: random.Random) -> None:
    tensor = draw.choice(proto.graph.initializer)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    places = ["missing.bin", "../model.onnx", "/etc/passwd", "", ".", "model.onnx", "\x00"]
    for key, value in (
        ("location", draw.choice(places)),
        ("offset", draw.choice(["0", "-1", "1000000", "x", str(1 << 70)])),
        ("length", draw.choice(["0", "-1", "512", "x", str(1 << 70)])),
    ):
        if draw.random() < 0.8:
            tensor.external_data.add(key=key, value=value)


def opsets(proto: onnx.ModelProto, draw: random.Random) -> None:
    if draw.random() < 0.5:
        proto.opset_import[0].version = draw.choice([0, -1, 1, 6, 7, 8, 12, 99, 1 << 40])
    else:
        proto.opset_import[0].domain = draw.choice(["ai.onnx", "other"])
    if draw.random() < 0.3:
        proto.ir_version = draw.choice([0, 1, 3, 4, 99])


def cycle(proto: onnx.ModelProto, draw: random.Random) -> None:
    reading = [node for node in proto.graph.node if node.input]
    draw.choice(reading).input[0] = proto.graph.node[-1].output[0]


def twice(proto: onnx.ModelProto, draw: random.Random) -> None:
    graph = proto.graph
    rows = draw.choice([graph.node, graph.initializer, graph.input, graph.output])
    rows.append(draw.choice(rows))


def no_ends(proto: onnx.ModelProto, draw: random.Random) -> None:
    del (proto.graph.output if draw.random() < 0.5 else proto.graph.input)[:]


MUTATIONS: tuple[Callable[[onnx.ModelProto, random.Random], None], ...] = (
    drop_node,
    drop_weight,
    other_operator,
    other_domain,
    other_input,
    other_output,
    fewer_inputs,
    other_shape,
    other_data,
    other_type,
    other_input_shape,
    other_attribute,
    external,
    opsets,
    cycle,
    twice,
    no_ends,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_damaged_graphs(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    mutation: Callable[[onnx.ModelProto, random.Random], None],
) -> None:
    for seed in range(SEED, SEED + CASES // 10):
        draw = random.Random(f"{mutation.__name__} {seed}")
        proto = onnx.ModelProto()
        proto.CopyFrom(MODELS[name])
        mutation(proto, draw)
        try:
            attempt(
                tmp_path_factory.mktemp("bad"),
                proto.SerializeToString(),
                draw.choice(["dp=2,tp=2", "tp=3", "dp=4"]),
            )
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_a_cycle_is_named(tmp_path: Path) -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(MODELS["net"])
    proto.graph.node[0].input[0] = "c"
    assert "cycle" in attempt(tmp_path, proto.SerializeToString())

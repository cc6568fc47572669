"""Random small networks in layers, as data: any layer can be left out, so a failure can be shrunk.

A network begins with rows, sequences, tokens or images and ends in logits, a prediction or a loss
of its own. Between them, every layer keeps the shape of what it gets. Weights are about 1 / sqrt of
the terms of a sum, so values stay near 1 whatever the number of layers.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod, sqrt

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxpar.core.symbols import Dim, dim_symbol
from tests.random_builder import F32, I64, OPSET, Program

ROWS, SEQUENCE, TOKENS, IMAGE = "rows", "sequence", "tokens", "image"
STARTS = (ROWS, SEQUENCE, TOKENS, IMAGE)
VOCABULARY, CLASSES, POSITIONS = 12, 6, 16
CROSS_ENTROPY, OWN_LOSS = "softmax_cross_entropy", "output:loss"
LOSSES = (CROSS_ENTROPY, CROSS_ENTROPY, "mse", "mae", "bce", OWN_LOSS)


@dataclass(frozen=True)
class Layer:
    """A layer.

    Attributes:
        kind: Its kind, a key of `LAYERS`.
        seed: What it draws its form and its weights from.
        residual: Whether its operand is added to its result.
    """

    kind: str
    seed: int
    residual: bool


@dataclass(frozen=True)
class Network:
    """A network.

    Attributes:
        start: One of `STARTS`.
        width: The width of rows and sequences, and the channels of images; even.
        height: Height and breadth of images.
        layers: The layers.
        loss: As `shard --loss` takes it.
        pooled: Whether a sequence ends in one result instead of one for each position.
    """

    start: str
    width: int
    height: int
    layers: tuple[Layer, ...]
    loss: str
    pooled: bool


class Drawn:
    """A graph that is being built, with what a layer draws from.

    Args:
        program: The graph.
        network: What is built.
    """

    def __init__(self, program: Program, network: Network) -> None:
        self.program, self.network, self.draw = program, network, random.Random(0)
        self.first = ""
        """The operand of the first layer."""

    @property
    def form(self) -> str:
        """Rows, sequence or image."""
        return SEQUENCE if self.network.start == TOKENS else self.network.start

    @property
    def width(self) -> int:
        return self.network.width

    def op(self, op_type: str, *inputs: str, **attributes: object) -> str:
        return self.program.op(op_type, *inputs, **attributes)[0]

    def flag(self, chance: float = 0.5) -> bool:
        return self.draw.random() < chance

    def weight(self, shape: Sequence[int], terms: int, around: float = 0.0) -> str:
        """Returns a new parameter."""
        rng = np.random.default_rng(self.draw.randrange(1 << 30))
        name = self.program.name("w")
        data = around + rng.standard_normal(shape) / sqrt(terms)
        tensor = numpy_helper.from_array(np.asarray(data, np.float32), name)
        self.program.initializers.append(tensor)
        return name

    def number(self, value: float) -> str:
        return self.program.const(value, F32)

    def activation(self, x: str) -> str:
        kinds = ["Relu", "Tanh", "Sigmoid", "Gelu", "Elu", "HardSwish", "Mish", "Softplus", "Erf"]
        return self.op(self.draw.choice(kinds), x)

    def linear(self, x: str, inner: int, outer: int) -> str:
        """Returns a product of the last dim with a weight."""
        made = self.op("MatMul", x, self.weight([inner, outer], inner))
        return self.op("Add", made, self.weight([outer], 4)) if self.flag(0.7) else made

    def channels_second(self, make: Callable[[str], str], x: str) -> str:
        """Returns what is made of [batch, width, ...], in the form of `x`."""
        if self.form != SEQUENCE:
            return make(x)
        return self.op("Transpose", make(self.op("Transpose", x, perm=[0, 2, 1])), perm=[0, 2, 1])

    def channels_last(self, make: Callable[[str], str], x: str) -> str:
        """Returns what is made of [..., width], in the form of `x`."""
        if self.form != IMAGE:
            return make(x)
        made = make(self.op("Transpose", x, perm=[0, 2, 3, 1]))
        return self.op("Transpose", made, perm=[0, 3, 1, 2])


# -- layers of any form --------------------------------------------------------------------------


def linear(d: Drawn, x: str) -> str:
    return d.channels_last(lambda y: d.activation(d.linear(y, d.width, d.width)), x)


def feed_forward(d: Drawn, x: str) -> str:
    hidden = d.draw.choice([d.width, 2 * d.width, 10])

    def made(y: str) -> str:
        return d.linear(d.activation(d.linear(y, d.width, hidden)), hidden, d.width)

    return d.channels_last(made, x)


def layer_norm(d: Drawn, x: str) -> str:
    bias = [d.weight([d.width], 9)] if d.flag(0.7) else []

    def made(y: str) -> str:
        scale = d.weight([d.width], 9, 1.0)
        return d.op("LayerNormalization", y, scale, *bias, axis=-1, epsilon=0.1)

    return d.channels_last(made, x)


def rms_by_hand(d: Drawn, x: str) -> str:
    def made(y: str) -> str:
        mean = d.op("ReduceMean", d.op("Mul", y, y), d.program.const([-1]), keepdims=1)
        size = d.op("Sqrt", d.op("Add", mean, d.number(0.1)))
        return d.op("Mul", d.op("Div", y, size), d.weight([d.width], 9, 1.0))

    return d.channels_last(made, x)


def batch_norm(d: Drawn, x: str) -> str:
    """In either form: exporters write that of inference, which training replaces."""
    width = d.width
    statistics = [d.weight([width], 9), d.weight([width], 9, 1.0)]
    tensor = next(t for t in d.program.initializers if t.name == statistics[1])
    tensor.CopyFrom(numpy_helper.from_array(np.abs(numpy_helper.to_array(tensor)), tensor.name))
    operands = [d.weight([width], 9, 1.0), d.weight([width], 9), *statistics]
    training = d.flag()

    def made(y: str) -> str:
        if training:
            outputs = d.program.op(
                "BatchNormalization", y, *operands, outputs=3, training_mode=1, epsilon=0.1,
                momentum=d.draw.choice([0.9, 0.5]),
            )  # fmt: skip
            return outputs[0]
        return d.op("BatchNormalization", y, *operands, epsilon=0.1)

    return d.channels_second(made, x)


def dropout(d: Drawn, x: str) -> str:
    operands = [d.number(d.draw.choice([0.1, 0.5]))] if d.flag(0.8) else [""]
    if d.flag():
        name = d.program.name("c")
        d.program.initializers.append(numpy_helper.from_array(np.array(True), name))
        operands.append(name)
    return d.op("Dropout", x, *(operands if any(operands) else []))


def gated(d: Drawn, x: str) -> str:
    def made(y: str) -> str:
        both = d.linear(y, d.width, 2 * d.width)
        left, right = d.program.op("Split", both, outputs=2, axis=-1, num_outputs=2)
        return d.op("Mul", left, d.op(d.draw.choice(["Sigmoid", "Tanh"]), right))

    return d.channels_last(made, x)


def masked(d: Drawn, x: str) -> str:
    condition = d.op("Less", x, d.number(d.draw.uniform(-0.6, 0.6)))
    return d.op("Where", condition, x, d.op("Mul", x, d.number(0.25)))


def scaled(d: Drawn, x: str) -> str:
    """Multiplies by one number that is trained."""
    return d.op("Mul", x, d.weight(d.draw.choice([[], [1]]), 9, 1.0))


def slopes(d: Drawn, x: str) -> str:
    return d.channels_last(lambda y: d.op("PRelu", y, d.weight([d.width], 9, 0.25)), x)


def softmax_gate(d: Drawn, x: str) -> str:
    gate = d.channels_last(lambda y: d.op("Softmax", y, axis=-1), x)
    return d.op("Mul", d.op("Mul", x, gate), d.number(float(d.width)))


def from_start(d: Drawn, x: str) -> str:
    """Reads the operand of the first layer: in a pipeline, it skips stages."""
    return d.op("Add", x, d.op("Mul", d.first, d.number(0.5)))


def experts(d: Drawn, x: str) -> str:
    """Mixes a few products by a softmax."""
    count, width = d.draw.choice([2, 3, 4]), d.width

    def made(y: str) -> str:
        dims = "bs"[: {ROWS: 1, SEQUENCE: 2}.get(d.form, 3)] if d.form != IMAGE else "bhv"
        weight = d.weight([count, width, width], width)
        products = d.op("Einsum", y, weight, equation=f"{dims}w,ewo->{dims}eo")
        gate = d.op("Softmax", d.op("MatMul", y, d.weight([width, count], width)), axis=-1)
        return d.op("Einsum", products, gate, equation=f"{dims}eo,{dims}e->{dims}o")

    return d.channels_last(made, x)


def norm_of_groups(d: Drawn, x: str) -> str:
    """InstanceNormalization of the two halves of the channels: GroupNorm as exporters write it."""
    shape = d.op("Shape", x)
    flat = d.op("Reshape", x, d.program.const([0, 2, -1]))
    ones = [d.program.const([1.0, 1.0], F32), d.program.const([0.0, 0.0], F32)]
    made = d.op("Reshape", d.op("InstanceNormalization", flat, *ones, epsilon=0.1), shape)
    tail = [1, 1] if d.form == IMAGE else []
    made = d.op("Mul", made, d.weight([d.width, *tail], 9, 1.0))
    return d.op("Add", made, d.weight([d.width, *tail], 9))


# -- sequences -----------------------------------------------------------------------------------


def attention(d: Drawn, x: str) -> str:
    heads = 2
    size = d.width // heads
    split = d.program.const([0, 0, heads, size])
    one = d.flag(0.4)
    if one:
        joint = d.linear(x, d.width, 3 * d.width)
        parts = d.program.op("Split", joint, outputs=3, axis=-1, num_outputs=3)
    else:
        parts = [d.linear(x, d.width, d.width) for _ in range(3)]
    q, k, v = (d.op("Reshape", part, split) for part in parts)
    q, v = (d.op("Transpose", y, perm=[0, 2, 1, 3]) for y in (q, v))
    scores = d.op("MatMul", q, d.op("Transpose", k, perm=[0, 2, 3, 1]))
    scores = d.op("Mul", scores, d.number(1 / sqrt(size)))
    if d.flag():
        length = d.op("Gather", d.op("Shape", x), d.program.const(1))
        steps = d.op("Range", d.program.const(0), length, d.program.const(1))
        later = d.op("Less", d.op("Unsqueeze", steps, d.program.const([1])), steps)
        scores = d.op("Where", later, d.number(-1e9), scores)
    weights = d.op("Softmax", scores, axis=-1)
    weights = dropout(d, weights) if d.flag(0.3) else weights
    mixed = d.op("Transpose", d.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    return d.linear(d.op("Reshape", mixed, d.program.const([0, 0, d.width])), d.width, d.width)


def positions(d: Drawn, x: str) -> str:
    table = d.weight([POSITIONS, d.width], 4)
    length = d.op("Shape", x, start=1, end=2)
    ends = [d.program.const([0]), length, d.program.const([0])]
    return d.op("Add", x, d.op("Slice", table, *ends))


def rolled(d: Drawn, x: str) -> str:
    p = d.program
    last = d.op("Slice", x, p.const([-1]), p.const([1 << 40]), p.const([1]))
    rest = d.op("Slice", x, p.const([0]), p.const([-1]), p.const([1]))
    return d.op("Concat", last, rest, axis=1)


def cumulative(d: Drawn, x: str) -> str:
    return d.op("Tanh", d.op("CumSum", x, d.program.const(1)))


def recurrent(d: Drawn, x: str) -> str:
    kind, width = d.draw.choice(["LSTM", "GRU", "RNN"]), d.width
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    operands = [d.weight([1, gates * width, width], 2 * width) for _ in range(2)]
    operands += [d.weight([1, 2 * gates * width], 9)] if d.flag(0.7) else []
    steps = d.op("Transpose", x, perm=[1, 0, 2])
    extra = {"linear_before_reset": 1} if kind == "GRU" and d.flag() else {}
    made = d.op(kind, steps, *operands, hidden_size=width, **extra)
    return d.op("Transpose", d.op("Squeeze", made, d.program.const([1])), perm=[1, 0, 2])


def convolution_of_sequence(d: Drawn, x: str) -> str:
    return d.channels_second(lambda y: _convolution(d, y, [3]), x)


# -- images --------------------------------------------------------------------------------------


def convolution(d: Drawn, x: str) -> str:
    size = d.draw.choice([1, 3, 3])
    return _convolution(d, x, [size, size])


def _convolution(d: Drawn, x: str, kernel: Sequence[int]) -> str:
    groups = d.draw.choice([1, 1, 2, d.width])
    inner = d.width // groups
    operands = [d.weight([d.width, inner, *kernel], inner * prod(kernel))]
    operands += [d.weight([d.width], 4)] if d.flag(0.7) else []
    pads = [size // 2 for size in kernel] * 2
    made = d.op("Conv", x, *operands, group=groups, pads=pads, kernel_shape=list(kernel))
    return d.activation(made)


def pool(d: Drawn, x: str) -> str:
    kind = d.draw.choice(["MaxPool", "AveragePool"])
    return d.op(kind, x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1])


def squeeze_and_excite(d: Drawn, x: str) -> str:
    mean = d.op("ReduceMean", x, d.program.const([2, 3]), keepdims=0)
    gate = d.op("Sigmoid", d.linear(mean, d.width, d.width))
    return d.op("Mul", x, d.op("Unsqueeze", gate, d.program.const([2, 3])))


def smaller_and_back(d: Drawn, x: str) -> str:
    sizes = d.op("Shape", x)
    operands = [d.weight([d.width, d.width, 2, 2], 4 * d.width)]
    made = d.op("Conv", x, *operands, strides=[2, 2], kernel_shape=[2, 2])
    mode = d.draw.choice(["nearest", "linear"])
    extra = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return d.op("Resize", made, "", "", sizes, mode=mode, **(extra if mode == "nearest" else {}))


LayerMaker = Callable[[Drawn, str], str]
_ANY: tuple[LayerMaker, ...] = (
    linear, feed_forward, layer_norm, rms_by_hand, batch_norm, batch_norm, dropout, dropout, gated,
    masked, scaled, slopes, softmax_gate, from_start, experts,
)  # fmt: skip
_OF_FORM: dict[str, tuple[LayerMaker, ...]] = {
    ROWS: (norm_of_groups,),
    SEQUENCE: (attention, attention, attention, positions, rolled, cumulative, recurrent,
               convolution_of_sequence),
    IMAGE: (convolution, convolution, convolution, pool, squeeze_and_excite, smaller_and_back,
            norm_of_groups),
}  # fmt: skip
_OF_FORM[TOKENS] = _OF_FORM[SEQUENCE]
LAYERS = {make.__name__: make for makers in (_ANY, *_OF_FORM.values()) for make in makers}


def drawn_network(draw: random.Random) -> Network:
    """Returns a random network."""
    start = draw.choice(STARTS)
    makers = (*_ANY, *_OF_FORM[start])
    layers = tuple(
        Layer(draw.choice(makers).__name__, draw.randrange(1 << 30), draw.random() < 0.5)
        for _ in range(draw.randint(1, 6))
    )
    width, height = draw.choice([4, 6, 8]), draw.choice([4, 6, 8])
    return Network(start, width, height, layers, draw.choice(LOSSES), draw.random() < 0.5)


def model_of(network: Network) -> onnx.ModelProto:
    """Returns the ONNX model of a network, with the symbols `batch` and `seq`."""
    program = Program(random.Random(0), F32)
    d = Drawn(program, network)
    batch, seq = dim_symbol("batch"), dim_symbol("seq")
    shapes: dict[str, tuple[Dim, ...]] = {
        ROWS: (batch, network.width),
        SEQUENCE: (batch, seq, network.width),
        TOKENS: (batch, seq),
        IMAGE: (batch, network.width, network.height, network.height),
    }
    dtype = I64 if network.start == TOKENS else F32
    x = program.add("x", shapes[network.start], dtype).name
    names = [d if isinstance(d, int) else str(d) for d in shapes[network.start]]
    if network.start == TOKENS:
        x = d.op("Gather", d.weight([VOCABULARY, network.width], 1), x)
    d.first = x
    for layer in network.layers:
        d.draw = random.Random(layer.seed)
        made = LAYERS[layer.kind](d, x)
        x = d.op("Add", x, made) if layer.residual else made
    result = _head(d, x)
    graph = helper.make_graph(
        program.nodes,
        "network",
        [helper.make_tensor_value_info("x", dtype, names)],
        [helper.make_tensor_value_info(name, F32, [None] * rank) for name, rank in result],
        program.initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def _head(d: Drawn, x: str) -> list[tuple[str, int]]:
    """Adds what follows the last layer; returns the outputs, each with its rank."""
    d.draw = random.Random(d.network.width)
    rank = 2
    if d.form == IMAGE:
        x = d.op("Flatten", d.op("GlobalAveragePool", x))
    elif d.form == SEQUENCE and d.network.pooled:
        x = d.op("ReduceMean", x, d.program.const([1]), keepdims=0)
    elif d.form == SEQUENCE:
        rank = 3
    logits = d.linear(x, d.width, CLASSES)
    if d.network.loss != OWN_LOSS:
        return [(logits, rank)]
    mean = d.op("ReduceMean", d.op("Softplus", logits), keepdims=0)
    d.program.nodes.append(helper.make_node("Identity", [mean], ["loss"], name="loss"))
    return [(logits, rank), ("loss", 0)]

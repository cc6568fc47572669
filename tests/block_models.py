"""Blocks of networks as exporters write them: a Llama, a mixture of experts, a residual network.

Weights are random and seeded; sizes are the least at which every split is even on four devices.
"""

import numpy as np
import onnx
import onnx_ir as ir

Array = np.ndarray
HIDDEN, HEADS, GROUPS, HEAD, WIDE, VOCAB = 32, 8, 4, 4, 64, 256


class _Writer:
    """Collects nodes in ONNX's text form, and the weights they read."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.lines: list[str] = []
        self.weights: dict[str, Array] = {}
        self.constants: dict[str, Array] = {}

    def weight(self, name: str, *shape: int) -> str:
        self.weights[name] = (self.rng.standard_normal(shape) * 0.2).astype(np.float32)
        return name

    def const(self, name: str, value: object, dtype: type = np.int64) -> str:
        self.constants[name] = np.asarray(value, dtype)
        return name

    def add(self, *lines: str) -> None:
        self.lines += lines

    def model(self, inputs: str, outputs: str, opset: int = 20) -> ir.Model:
        text = f"g ({inputs}) => ({outputs}) {{ {' '.join(self.lines)} }}"
        graph = onnx.parser.parse_graph(text)
        # Nodes, as exporters write them: an initializer of floats would be trained.
        constants = [
            onnx.helper.make_node("Constant", [], [n], value=onnx.numpy_helper.from_array(a))
            for n, a in self.constants.items()
        ]
        nodes = [*constants, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        for name, array in self.weights.items():
            graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        model = onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10
        )
        return ir.from_proto(model)


def llama(layers: int = 2, seed: int = 0) -> ir.Model:
    """`ids` [batch, seq] -> `logits` [batch, seq, VOCAB].

    Root-mean-square norms written out, rotary positions, grouped queries (HEADS over GROUPS
    key/value heads, repeated by Expand), SwiGLU, no biases.
    """
    w = _Writer(seed)
    w.const("eps", 1e-5, np.float32)
    w.const("two", 2, np.float32)
    w.const("scale", 1 / np.sqrt(HEAD), np.float32)
    w.const("masked", np.finfo(np.float32).min, np.float32)
    w.const("zero", 0), w.const("one", 1)
    w.const("zeros", 0, np.float32)
    w.const("last", [-1]), w.const("first", [0]), w.const("second", [1]), w.const("third", [2])
    w.const("q_heads", [0, 0, HEADS, HEAD]), w.const("kv_heads", [0, 0, GROUPS, HEAD])
    w.const("merged", [0, 0, HIDDEN])
    w.const("rate", 100.0 ** -np.arange(0, 1, 2 / HEAD), np.float32)
    w.const("repeated", [1, 1, HEADS // GROUPS, 1, 1])
    w.const("heads_again", [0, HEADS, -1, HEAD])
    w.const("far", [2**62]), w.const("half", [HEAD // 2])
    w.weight("embed", VOCAB, HIDDEN)
    w.add(
        "x0 = Gather(embed, ids)",
        "shape = Shape(ids)",
        "seq = Gather(shape, one)",
        "places = Range(zero, seq, one)",
        "column = Unsqueeze(places, second)",
        "row = Unsqueeze(places, first)",
        "hidden = Less(column, row)",
        "mask = Where(hidden, masked, zeros)",
        "place = Cast<to = 1>(column)",
        "angles = Mul(place, rate)",
        "both = Concat<axis = -1>(angles, angles)",
        "cos = Cos(both)",
        "sin = Sin(both)",
    )
    x = "x0"
    for i in range(layers):
        x = _llama_layer(w, f"l{i}_", x)
    x = _rms_norm(w, "last_norm", x)
    w.weight("head", HIDDEN, VOCAB)
    w.add(f"logits = MatMul({x}, head)")
    return w.model("int64[batch, seq] ids", f"float[batch, seq, {VOCAB}] logits")


def _rms_norm(w: _Writer, p: str, x: str) -> str:
    w.weight(f"{p}_scale", HIDDEN)
    w.add(
        f"{p}_squares = Pow({x}, two)",
        f"{p}_mean = ReduceMean<keepdims = 1>({p}_squares, last)",
        f"{p}_lifted = Add({p}_mean, eps)",
        f"{p}_root = Sqrt({p}_lifted)",
        f"{p}_inverse = Reciprocal({p}_root)",
        f"{p}_normal = Mul({x}, {p}_inverse)",
        f"{p}_out = Mul({p}_normal, {p}_scale)",
    )
    return f"{p}_out"


def _rotate(w: _Writer, p: str, x: str) -> str:
    w.add(
        f"{p}_front = Slice({x}, first, half, last)",
        f"{p}_back = Slice({x}, half, far, last)",
        f"{p}_minus = Neg({p}_back)",
        f"{p}_turned = Concat<axis = -1>({p}_minus, {p}_front)",
        f"{p}_a = Mul({x}, cos)",
        f"{p}_b = Mul({p}_turned, sin)",
        f"{p}_rotated = Add({p}_a, {p}_b)",
    )
    return f"{p}_rotated"


def _heads(w: _Writer, p: str, x: str, count: int, target: str) -> str:
    w.weight(f"{p}_weight", HIDDEN, count * HEAD)
    w.add(
        f"{p}_flat = MatMul({x}, {p}_weight)",
        f"{p}_split = Reshape({p}_flat, {target})",
        f"{p}_heads = Transpose<perm = [0, 2, 1, 3]>({p}_split)",
    )
    return f"{p}_heads"


def _repeated(w: _Writer, p: str, x: str) -> str:
    w.add(
        f"{p}_unit = Unsqueeze({x}, third)",
        f"{p}_more = Expand({p}_unit, repeated)",
        f"{p}_all = Reshape({p}_more, heads_again)",
    )
    return f"{p}_all"


def _llama_layer(w: _Writer, p: str, x: str) -> str:
    normal = _rms_norm(w, f"{p}norm1", x)
    q = _rotate(w, f"{p}q", _heads(w, f"{p}q", normal, HEADS, "q_heads"))
    k = _rotate(w, f"{p}k", _heads(w, f"{p}k", normal, GROUPS, "kv_heads"))
    v = _heads(w, f"{p}v", normal, GROUPS, "kv_heads")
    k, v = _repeated(w, f"{p}kr", k), _repeated(w, f"{p}vr", v)
    w.weight(f"{p}o_weight", HIDDEN, HIDDEN)
    w.add(
        f"{p}kt = Transpose<perm = [0, 1, 3, 2]>({k})",
        f"{p}raw = MatMul({q}, {p}kt)",
        f"{p}scaled = Mul({p}raw, scale)",
        f"{p}scores = Add({p}scaled, mask)",
        f"{p}shares = Softmax<axis = -1>({p}scores)",
        f"{p}mixed = MatMul({p}shares, {v})",
        f"{p}back = Transpose<perm = [0, 2, 1, 3]>({p}mixed)",
        f"{p}flat = Reshape({p}back, merged)",
        f"{p}attended = MatMul({p}flat, {p}o_weight)",
        f"{p}x = Add({x}, {p}attended)",
    )
    normal = _rms_norm(w, f"{p}norm2", f"{p}x")
    w.weight(f"{p}gate", HIDDEN, WIDE), w.weight(f"{p}up", HIDDEN, WIDE)
    w.weight(f"{p}down", WIDE, HIDDEN)
    w.add(
        f"{p}g = MatMul({normal}, {p}gate)",
        f"{p}open = Sigmoid({p}g)",
        f"{p}silu = Mul({p}g, {p}open)",
        f"{p}u = MatMul({normal}, {p}up)",
        f"{p}inner = Mul({p}silu, {p}u)",
        f"{p}fed = MatMul({p}inner, {p}down)",
        f"{p}out = Add({p}x, {p}fed)",
    )
    return f"{p}out"


def mixture(experts: int = 4, capacity: int = 8, wide: int = 1024, seed: int = 0) -> ir.Model:
    """`x` [groups, tokens, HIDDEN] -> `y` of the same shape: one layer of experts, one a token.

    GShard's dense form (Lepikhin et al., 2020): each group of tokens has `capacity` places with
    every expert; a token goes to its best expert's next free place of its group, one that finds
    none is passed over. Tokens meet places in two products with a one-hot tensor [groups, tokens,
    experts, places]. Without a loss of its own it has no gradient at the choice of the expert.
    """
    w = _Writer(seed)
    w.weight("enter", HIDDEN, HIDDEN), w.weight("router", HIDDEN, experts)
    w.weight("up", experts, HIDDEN, wide), w.weight("down", experts, wide, HIDDEN)
    w.const("values", [0, 1], np.float32), w.const("along", 1)
    w.const("experts", experts), w.const("capacity", capacity)
    w.const("last", [-1])
    w.add(
        "h = MatMul(x, enter)",
        "scores = MatMul(h, router)",
        "shares = Softmax<axis = -1>(scores)",
        "best = ArgMax<axis = -1, keepdims = 0>(shares)",
        "chosen = OneHot<axis = -1>(best, experts, values)",
        "counted = CumSum<exclusive = 1>(chosen, along)",
        "mine = Mul(counted, chosen)",
        "place = ReduceSum<keepdims = 0>(mine, last)",
        "slot = Cast<to = 7>(place)",
        "places = OneHot<axis = -1>(slot, capacity, values)",
        "weighted = Mul(shares, chosen)",
        'sent = Einsum<equation = "gte,gtc->gtec">(chosen, places)',
        'back = Einsum<equation = "gte,gtc->gtec">(weighted, places)',
        'packed = Einsum<equation = "gtec,gth->gech">(sent, h)',
        'wide = Einsum<equation = "gech,ehf->gecf">(packed, up)',
        "active = Relu(wide)",
        'made = Einsum<equation = "gecf,efh->gech">(active, down)',
        'y = Einsum<equation = "gtec,gech->gth">(back, made)',
    )
    kind = f"float[groups, tokens, {HIDDEN}]"
    return w.model(f"{kind} x", f"{kind} y")


CHANNELS = 8


def residual(blocks: int = 2, seed: int = 0) -> ir.Model:
    """`image` [batch, 3, 16, 16] -> `logits` [batch, 10]: ResNet's basic blocks, as evaluated.

    Convolution, BatchNormalization, Relu, twice, and what entered added (He et al., 2015); a
    MaxPool before the blocks, a mean over all places and a linear layer behind them.
    """
    w = _Writer(seed)
    w.const("places", [2, 3])
    x = _convolved(w, "stem", "image", 3, 3)
    w.add(f"pooled = MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>({x})")
    x = "pooled"
    for i in range(blocks):
        first = _convolved(w, f"b{i}_first", x, CHANNELS, 3)
        second = _convolved(w, f"b{i}_second", first, CHANNELS, 3, last=True)
        w.add(f"b{i}_sum = Add({second}, {x})", f"b{i}_out = Relu(b{i}_sum)")
        x = f"b{i}_out"
    w.weight("head", 10, CHANNELS), w.weight("head_bias", 10)
    w.add(
        f"mean = ReduceMean<keepdims = 0>({x}, places)",
        "logits = Gemm<transB = 1>(mean, head, head_bias)",
    )
    return w.model("float[batch, 3, 16, 16] image", "float[batch, 10] logits")


def _convolved(w: _Writer, p: str, x: str, channels: int, size: int, last: bool = False) -> str:
    w.weight(f"{p}_kernel", CHANNELS, channels, size, size)
    for name in ("scale", "bias", "mean"):
        w.weight(f"{p}_{name}", CHANNELS)
    w.weights[f"{p}_var"] = w.rng.uniform(0.5, 2, CHANNELS).astype(np.float32)
    pad = ", ".join([str(size // 2)] * 4)
    operands = ", ".join(f"{p}_{n}" for n in ("conv", "scale", "bias", "mean", "var"))
    w.add(
        f"{p}_conv = Conv<pads = [{pad}]>({x}, {p}_kernel)",
        f"{p}_norm = BatchNormalization({operands})",
        *([] if last else [f"{p}_out = Relu({p}_norm)"]),
    )
    return f"{p}_norm" if last else f"{p}_out"

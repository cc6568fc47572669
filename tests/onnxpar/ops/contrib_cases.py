"""Small nodes of onnxruntime's contrib operators and of attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.onnxpar.ops.op_harness import Array, Case


def drawn(shape: tuple[int, ...], dtype: type, seed: int = 0) -> Array:
    """Bytes, or numbers between 0.1 and 1, as scales are."""
    rng = np.random.default_rng(seed)
    if issubclass(dtype, np.integer):
        return rng.integers(0, 256, shape).astype(dtype)
    return rng.uniform(0.1, 1, shape).astype(dtype)


def contrib(
    call: str,
    inputs: Mapping[str, str],
    consts: Mapping[str, Array] | None = None,
    **more: Any,
) -> Case:
    """A node of the domain com.microsoft: `y = Gelu(x)`."""
    result, operator = call.split(" = ")
    text = f"{result} = com.microsoft.{operator}"
    return Case(text, inputs, consts or {}, **more)


def _nbits(
    bits: int, columns: int, rows: int, block: int, *, flat: bool = False
) -> dict[str, Array]:
    blocks = -(-columns // block)
    scales = drawn((rows, blocks), np.float32, 1)
    return {
        "b": drawn((rows, blocks, block * bits // 8), np.uint8),
        "s": scales.reshape(-1) if flat else scales,
        "z": drawn((rows, -(-blocks * bits // 8)), np.uint8, 2),
        "f": drawn((rows, blocks), np.float32, 3) * 8,
    }


def _take(made: Mapping[str, Array], names: str) -> dict[str, Array]:
    return {name: made[name] for name in names}


_BIAS = {"c": drawn((6,), np.float32, 4)}
_NF = _nbits(4, 64, 6, 16)
_N64 = "K=64, N=6, bits=4, block_size=16"

# Sums of 64 products of numbers up to 30 cancel; 1e-5 of the greatest result is 80 ulp.
QUANTISED = (
    contrib(f"y = MatMulNBits<{_N64}>(a, b, s)", {"a": "float[N,64]"}, _take(_NF, "bs")),
    contrib(f"y = MatMulNBits<{_N64}>(a, b, s)", {"a": "float[N,2,64]"}, _take(_NF, "bs")),
    contrib(f"y = MatMulNBits<{_N64}>(a, b, s, z)", {"a": "float[N,64]"}, _take(_NF, "bsz")),
    contrib(f"y = MatMulNBits<{_N64}>(a, b, s, f)", {"a": "float[N,64]"}, _take(_NF, "bsf")),
    contrib(
        f'y = MatMulNBits<{_N64}>(a, b, s, "", "", c)',
        {"a": "float[N,64]"},
        _take(_NF, "bs") | _BIAS,
    ),
    contrib(
        "y = MatMulNBits<K=48, N=6, bits=4, block_size=16>(a, b, s)",
        {"a": "float[N,48]"},
        _take(_nbits(4, 48, 6, 16, flat=True), "bs"),
    ),
    # Zero points of three blocks end in the middle of a byte, and 40 columns in that of a block.
    contrib(
        "y = MatMulNBits<K=48, N=6, bits=4, block_size=16>(a, b, s, z)",
        {"a": "float[N,48]"},
        _take(_nbits(4, 48, 6, 16), "bsz"),
    ),
    contrib(
        "y = MatMulNBits<K=40, N=6, bits=4, block_size=16>(a, b, s)",
        {"a": "float[N,40]"},
        _take(_nbits(4, 40, 6, 16), "bs"),
    ),
    contrib(
        "y = MatMulNBits<K=48, N=5, bits=8, block_size=16>(a, b, s)",
        {"a": "float[N,48]"},
        _take(_nbits(8, 48, 5, 16), "bs"),
    ),
    contrib(
        "y = MatMulBnb4<K=48, N=6, block_size=16, quant_type=1>(a, b, s)",
        {"a": "float[N,48]"},
        {"b": drawn((144,), np.uint8), "s": drawn((18,), np.float32)},
    ),
    contrib(
        "y = GatherBlockQuantized<block_size=16>(b, i, s)",
        {"i": "int64[N]"},
        {"b": drawn((7, 32), np.uint8), "s": drawn((7, 4), np.float32)},
    ),
    contrib(
        "y = GatherBlockQuantized<block_size=16, quantize_axis=2>(b, i, s, z)",
        {"i": "int64[N,2]"},
        {
            "b": drawn((7, 3, 32), np.uint8),
            "s": drawn((7, 3, 4), np.float32),
            "z": drawn((7, 3, 2), np.uint8),
        },
    ),
)


def _ints(*values: int, dtype: type = np.int64) -> Array:
    return np.array(values, dtype)


_ANGLES = np.outer(np.arange(9), [1.0, 0.3]).astype(np.float32)
_CACHES = {"c": np.cos(_ANGLES), "s": np.sin(_ANGLES)}
_TURNS = {"c": "float[N,4,2]", "s": "float[N,4,2]"}
_PLACES = np.arange(20).reshape(5, 4) * 3 % 9

ROTARY = (
    *(
        Case(
            f"y = RotaryEmbedding<num_heads=3, interleaved={turned}>(x, c, s, p)",
            {"x": "float[N,4,12]", "p": "int64[N,4]"},
            _CACHES,
            {"p": _PLACES},
            opset=23,
        )
        for turned in (0, 1)
    ),
    Case("y = RotaryEmbedding(x, c, s)", {"x": "float[N,3,4,4]", **_TURNS}, opset=23),
    Case(
        "y = RotaryEmbedding<num_heads=3, rotary_embedding_dim=4>(x, c, s)",
        {"x": "float[N,4,18]", **_TURNS},
        opset=23,
    ),
    contrib(
        "y = RotaryEmbedding(x, p, c, s)",
        {"x": "float[N,4,12]", "p": "int64[N,4]"},
        _CACHES,
        feeds={"p": _PLACES},
    ),
    contrib(
        "y = RotaryEmbedding<interleaved=1>(x, p, c, s)",
        {"x": "float[N,3,7,4]"},
        {**_CACHES, "p": _ints(2)},
    ),
    contrib(
        "y = RotaryEmbedding<num_heads=3, rotary_embedding_dim=4>(x, p, c, s)",
        {"x": "float[N,7,18]"},
        {**_CACHES, "p": _ints(1)},
    ),
)


def _grouped(heads: int, kv: int, length: int, past: int, seqlens: list[int], **more: str) -> Case:
    """GroupQueryAttention: `length` new tokens behind a cache of `past`, batch by batch."""
    size, attributes = 16, more.pop("attributes", "")
    keys = f"float[N,{length},{kv * size}]"
    cache = f"float[N,{kv},{past},{size}]"
    angles = np.outer(np.arange(16), np.arange(1, size // 2 + 1) / 5).astype(np.float32)
    tables = {"c": np.cos(angles), "s": np.sin(angles)} if "do_rotary=1" in attributes else {}
    rotary = "c, s" if tables else '"", ""'
    inputs = {"q": f"float[N,{length},{heads * size}]", "k": keys, "v": keys}
    held = '"", ""'
    if past:
        inputs |= {"pk": cache, "pv": cache}
        held = "pk, pv"
    return contrib(
        f"y, ck, cv = GroupQueryAttention<num_heads={heads}, kv_num_heads={kv}{attributes}>"
        f"(q, k, v, {held}, n, t, {rotary}{more.pop('further', '')})",
        inputs | {"n": "int32[N]"} | more,
        {"t": np.array(max(seqlens) + 1, np.int32), **tables},
        feeds={"n": np.array(seqlens, np.int32)},
    )


GROUPED = (
    # Prompts of different lengths, padded on the right; then one token behind caches that are.
    _grouped(4, 2, 4, 0, [3, 1, 2, 3, 0]),
    _grouped(6, 3, 4, 0, [3, 1, 2, 3, 0], attributes=", do_rotary=1, local_window_size=2"),
    _grouped(4, 2, 1, 6, [6, 3, 4, 6, 1], attributes=", do_rotary=1, softcap=2.0"),
    _grouped(3, 3, 1, 6, [6, 3, 4, 6, 1], attributes=", scale=0.3"),
    _grouped(4, 2, 1, 6, [6, 6, 6, 6, 6], further=', "", b', b="float[N,1,1,7]"),
    _grouped(4, 2, 1, 6, [6, 6, 6, 6, 6], further=', "", "", h', h="float[4]"),
)

_Q, _K, _V = "float[N,4,24]", "float[N,5,12]", "float[N,5,9]"
_QKV = {"q": _Q, "k": _K, "v": _V}
_GROUPS = "q_num_heads=6, kv_num_heads=3"
_FOUR = {"q": "float[N,2,6,3]", "k": "float[N,2,5,3]", "v": "float[N,2,5,3]"}
_GROWN = {"pk": "float[N,3,3,4]", "pv": "float[N,3,3,3]"}
_LONG = {"q": "float[N,2,3,4]", "k": "float[N,2,6,4]", "v": "float[N,2,6,4]"}


def _attention(
    attributes: str, inputs: Mapping[str, str], operands: str = "q, k, v", **more: Any
) -> Case:
    results = more.pop("results", "y")
    text = f"{results} = Attention<{attributes}>({operands})"
    text = text.replace("<>", "")
    return Case(text, inputs, opset=more.pop("opset", 23), **more)


ATTENTION = (
    _attention(_GROUPS, _QKV),
    _attention(f"{_GROUPS}, is_causal=1, scale=0.3", _QKV),
    _attention(f"{_GROUPS}, softcap=1.5", {**_QKV, "m": "float[6,4,5]"}, "q, k, v, m"),
    _attention("", _FOUR),
    _attention("is_causal=1", {**_FOUR, "m": "float[6,5]"}, "q, k, v, m"),
    _attention("", {**_FOUR, "m": "float[N,1,6,5]"}, "q, k, v, m", results="y, a, b"),
    _attention(
        f"{_GROUPS}, is_causal=1",
        {**_QKV, **_GROWN, "m": "float[4,8]"},
        "q, k, v, m, pk, pv",
        results="y, a, b",
    ),
    _attention("qk_matmul_output_mode=0", _FOUR, results="y, a, b, c"),
    _attention(
        "is_causal=1",
        {**_LONG, "n": "int64[N]"},
        'q, k, v, "", "", "", n',
        opset=24,
        feeds={"n": _ints(6, 4, 5, 3, 6)},
    ),
    _attention(
        "",
        {**_LONG, "n": "int64[N]", "m": "bool[3,6]"},
        'q, k, v, m, "", "", n',
        opset=24,
        feeds={"n": _ints(6, 4, 5, 3, 6), "m": np.tri(3, 6, 2) > 0},
    ),
)

_MHA = {"q": "float[N,3,12]", "k": "float[N,4,12]", "v": "float[N,4,6]"}
_EVEN = {**_MHA, "v": "float[N,4,12]"}
_HELD = {"pk": "float[N,3,2,4]", "pv": "float[N,3,2,4]"}

MULTI_HEAD = (
    contrib("y = MultiHeadAttention<num_heads=3>(q, k, v)", _MHA),
    contrib("y = MultiHeadAttention<num_heads=3>(q, k, v, b)", {**_EVEN, "b": "float[36]"}),
    contrib(
        'y = MultiHeadAttention<num_heads=3, scale=0.4>(q, k, v, "", m, a)',
        {**_EVEN, "m": "int32[N,4]", "a": "float[N,1,3,4]"},
        feeds={"m": np.arange(20).reshape(5, 4) % 3 % 2 + (np.arange(4) < 1)},
    ),
    contrib(
        "y = MultiHeadAttention<num_heads=3>(q, k, v)",
        {"q": "float[N,3,12]", "k": "float[N,3,4,4]", "v": "float[N,3,4,4]"},
    ),
    contrib(
        'y, a, b = MultiHeadAttention<num_heads=3, unidirectional=1>(q, k, v, "", "", "", pk, pv)',
        {**_EVEN, "k": "float[N,3,12]", "v": "float[N,3,12]", **_HELD},
    ),
)

_X = {"x": "float[N,4,6]", "w": "float[6,24]", "b": "float[24]"}
_ENDS = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])

# Operators that are sharded through their bodies.
BODIES = (
    contrib("y = Attention<num_heads=2>(x, w, b)", _X),
    contrib(
        "y = Attention<num_heads=2, unidirectional=1>(x, w, b, m)",
        {**_X, "m": "int32[N,4]"},
        feeds={"m": _ENDS},
    ),
    contrib(
        'y, p = Attention<num_heads=2, unidirectional=1>(x, w, b, "", c)',
        {**_X, "c": "float[2,N,2,3,4]"},
    ),
    contrib(
        "y = Attention<num_heads=2, scale=0.3>(x, w, b, m)",
        {**_X, "m": "int32[N]"},
        feeds={"m": _ENDS.sum(1)},
    ),
    contrib('y, p = Attention<num_heads=2>(x, w, b, "", "", a)', {**_X, "a": "float[1,2,4,4]"}),
)

FUSED = (
    contrib("y = Gelu(x)", {"x": "float[N,6]"}),
    contrib("y = BiasGelu(x, b)", {"x": "float[N,2,6]", "b": "float[6]"}),
    contrib("y = FastGelu(x)", {"x": "float[N,6]"}),
    contrib("y = FastGelu(x, b)", {"x": "float[N,6]", "b": "float[6]"}, opset=17),
    contrib("y = QuickGelu<alpha=1.5>(x)", {"x": "float[N,6]"}),
    contrib(
        'y = FusedGemm<activation="Relu", transB=1, beta=0.5>(a, b, c)',
        {"a": "float[N,6]", "b": "float[4,6]", "c": "float[4]"},
    ),
    contrib(
        'y = FusedGemm<activation="LeakyRelu", activation_alpha=0.2>(a, b)',
        {"a": "float[N,6]", "b": "float[6,4]"},
    ),
)

_SEQ = "float[N,3,12]"

STATES = (
    Case(
        "y = TensorScatter(c, u, n)",
        {"c": "float[N,2,7,3]", "u": "float[N,2,2,3]", "n": "int64[N]"},
        feeds={"n": _ints(0, 2, 5, 3, 1)},
        opset=24,
    ),
    Case(
        'y = TensorScatter<axis=1, mode="circular">(c, u)',
        {"c": "float[N,7,3]", "u": "float[N,2,3]"},
        opset=24,
    ),
    contrib(
        'y, z = LinearAttention<q_num_heads=3, kv_num_heads=3, update_rule="gated_delta">'
        "(q, k, v, p, g, b)",
        {
            "q": _SEQ,
            "k": _SEQ,
            "v": _SEQ,
            "p": "float[N,3,4,4]",
            "g": "float[N,3,3]",
            "b": "float[N,3,3]",
        },
        feeds={"g": -np.linspace(0.1, 1, 45).reshape(5, 3, 3), "b": np.full((5, 3, 3), 0.3)},
    ),
    contrib(
        'y, z = LinearAttention<q_num_heads=3, kv_num_heads=3, update_rule="linear">(q, k, v)',
        {"q": _SEQ, "k": _SEQ, "v": _SEQ},
    ),
    contrib(
        'y, z = CausalConvWithState<activation="silu">(x, w, b, p)',
        {"x": "float[N,6,4]", "w": "float[6,1,3]", "b": "float[6]", "p": "float[N,6,2]"},
    ),
)


def _experts(rows: int, inner: int, width: int = 8, count: int = 4) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    shapes = {"w": (count, rows, width), "b": (count, rows), "x": (count, width, inner)}
    made = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    return made | {"c": rng.standard_normal((count, width)).astype(np.float32)}


_ROUTED = {"t": "float[N,8]", "r": "float[N,4]"}
_BYTES = {
    "w": drawn((4, 12, 16), np.uint8),
    "s": drawn((4, 12), np.float32) / 8,
    "x": drawn((4, 32, 6), np.uint8, 1),
    "z": drawn((4, 32), np.float32, 2) / 8,
}

EXPERTS = (
    contrib(
        'y = MoE<k=2, activation_type="silu", normalize_routing_weights=1>(t, r, w, b, x, c)',
        _ROUTED,
        _experts(6, 6),
    ),
    contrib(
        'y = MoE<k=2, activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.7, '
        "activation_beta=1.0, normalize_routing_weights=1>(t, r, w, b, x, c)",
        {"t": "float[N,2,8]", "r": "float[M,4]"},
        _experts(12, 6),
        sizes={"N": 5, "M": 10},
    ),
    contrib(
        'y = QMoE<k=2, activation_type="silu", normalize_routing_weights=1>(t, r, w, s, "", x, z)',
        {"t": "float[N,32]", "r": "float[N,4]"},
        _BYTES,
    ),
)

DISTANCES = (
    contrib("y = CDist(a, b)", {"a": "float[N,6]", "b": "float[7,6]"}),
    contrib('y = CDist<metric="euclidean">(a, b)', {"a": "float[N,6]", "b": "float[7,6]"}),
    contrib('y = CDist<metric="euclidean">(a, b)', {"a": "double[3,5]", "b": "double[N,5]"}),
)

CASES = (
    *DISTANCES,
    *STATES,
    *EXPERTS,
    *FUSED,
    *MULTI_HEAD,
    *ATTENTION,
    *QUANTISED,
    *ROTARY,
    *GROUPED,
)

"""Small nodes of onnxruntime's contrib operators and of attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from op_harness import Array, Case

N5 = {"N": 5}


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
    sizes: Mapping[str, int] | None = None,
    **more: Any,
) -> Case:
    """A node of the domain com.microsoft: `y = Gelu(x)`."""
    result, operator = call.split(" = ")
    text = f"{result} = com.microsoft.{operator}"
    return Case(text, inputs, sizes or N5, consts or {}, **more)


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

CASES = (*QUANTISED,)

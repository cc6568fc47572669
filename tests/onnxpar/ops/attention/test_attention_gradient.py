"""Gradients of attention and of rotary embedding, against PyTorch's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import Data, GradCase, shown

FLAT = {"q": "double[N,3,8]", "k": "double[N,4,4]", "v": "double[N,4,6]"}
GROUPS = "q_num_heads=4, kv_num_heads=2"
FOUR = {"q": "double[N,2,3,2]", "k": "double[N,2,4,2]", "v": "double[N,2,4,2]"}
LONG = {"q": "double[N,1,2,2]", "k": "double[N,1,5,2]", "v": "double[N,1,5,2]"}
N3 = {"N": 3}


def attention(
    heads: tuple[int, int] = (0, 0), *, causal: bool = False, past: bool = False, **more: Any
) -> Any:
    """Attention by PyTorch; operands of 3 dims have `heads` of queries and of keys."""

    def function(torch: Any, q: Any, k: Any, v: Any, **rest: Any) -> Any:
        flat = q.dim() == 3
        if flat:
            counts = (heads[0], heads[1], heads[1])
            q, k, v = (
                x.unflatten(2, (n, -1)).transpose(1, 2)
                for x, n in zip((q, k, v), counts, strict=True)
            )
        if past:
            k, v = torch.cat([rest["a"], k], 2), torch.cat([rest["b"], v], 2)
        mask = rest.get("m")
        size = (q.shape[-2], k.shape[-2])
        if causal:
            seen = torch.ones(size, dtype=torch.bool).tril(rest["a"].shape[2] if past else 0)
            mask = seen if mask is None else mask.masked_fill(~seen, float("-inf"))
        if "n" in rest:
            mask = torch.arange(size[1]) < rest["n"][:, None, None, None]
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **more)
        return y.transpose(1, 2).flatten(2) if flat else y

    return function


@pytest.mark.parametrize(
    ("attributes", "inputs", "torch"),
    [
        (GROUPS, FLAT, attention((4, 2))),
        (f"{GROUPS}, is_causal=1, scale=0.25", FLAT, attention((4, 2), causal=True, scale=0.25)),
        ("q_num_heads=2, kv_num_heads=2", {**FLAT, "q": "double[N,3,4]"}, attention((2, 2))),
        ("is_causal=1", FOUR, attention(causal=True)),
        ("is_causal=1", {**FOUR, "m": "double[2,3,4]"}, attention(causal=True)),
        ("", {**FOUR, "m": "double[N,1,3,4]"}, attention()),
    ],
    ids=shown,
)
def test_attention(attributes: str, inputs: Mapping[str, str], torch: Any) -> None:
    node = f"y = Attention<{attributes}>({', '.join(inputs)})".replace("<>", "")
    GradCase(node, inputs, torch, sizes=N3, opset=23).check()


def test_a_cap_on_the_scores() -> None:
    GradCase("y = Attention<softcap=1.5>(q, k, v)", FOUR, sizes=N3, opset=23).check()


@pytest.mark.parametrize("diagonal", [1, -1], ids=["some keys", "no key for the first query"])
def test_a_mask_of_booleans(diagonal: int) -> None:
    """A query that sees no key has zeros as result and gradient, as in PyTorch; nothing is NaN."""
    GradCase(
        "y = Attention(q, k, v, m)",
        {**FOUR, "m": "bool[3,4]"},
        attention(),
        sizes=N3,
        data={"m": np.tri(3, 4, diagonal) > 0},
        opset=23,
    ).check()


def test_keys_behind_a_past() -> None:
    GradCase(
        'y = Attention<is_causal=1>(q, k, v, "", a, b)',
        {**FOUR, "a": "double[N,2,2,2]", "b": "double[N,2,2,2]"},
        attention(causal=True, past=True),
        sizes=N3,
        opset=23,
    ).check()


def test_lengths_of_a_cache() -> None:
    lengths: Data = np.array([5.0, 3, 4])
    GradCase(
        'y = Attention(q, k, v, "", "", "", n)',
        {**LONG, "n": "int64[N]"},
        attention(),
        sizes=N3,
        data={"n": lengths},
        opset=24,
    ).check()


PLACES = np.array([[0, 3, 1], [2, 2, 0], [1, 0, 3]])


def rotary(heads: int = 0, *, pairs: bool = False, contrib: bool = False) -> Any:
    """Rotary embedding in PyTorch, by complex numbers."""

    def function(torch: Any, x: Any, c: Any, s: Any, p: Any = None) -> Any:
        given = x.shape
        if x.dim() == 3:
            x = x.unflatten(2, (heads, -1)).transpose(1, 2)
        if p is not None:
            p = p + torch.arange(x.shape[2]) if p.dim() == 1 else p
            c, s = c[p], s[p]
        turn = torch.complex(c, s).unsqueeze(-3)
        half = turn.shape[-1]
        x, rest = x[..., : 2 * half], x[..., 2 * half :]
        a, b = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
        y = torch.complex(a.contiguous(), b.contiguous()) * turn
        parts = [y.real, y.imag]
        y = torch.stack(parts, -1).flatten(-2) if pairs else torch.cat(parts, -1)
        y = torch.cat([y, rest], -1)
        return y.transpose(1, 2).reshape(given) if len(given) == 3 else y

    return function


@pytest.mark.parametrize(
    ("attributes", "inputs", "torch"),
    [
        (
            "num_heads=2",
            {"x": "double[N,3,8]", "p": "int64[N,3]", "c": "double[4,2]", "s": "double[4,2]"},
            rotary(2),
        ),
        (
            "interleaved=1",
            {"x": "double[N,2,3,4]", "p": "int64[1]", "c": "double[4,2]", "s": "double[4,2]"},
            rotary(pairs=True),
        ),
        (
            "num_heads=2, rotary_embedding_dim=4",
            {"x": "double[N,3,12]", "p": "int64[N,3]", "c": "double[4,2]", "s": "double[4,2]"},
            rotary(2),
        ),
    ],
    ids=["positions", "pairs", "a part of a head"],
)
def test_rotary_embedding(attributes: str, inputs: Mapping[str, str], torch: Any) -> None:
    """ONNX's own has no float64; its body is this one's. PyTorch stands in for differences too."""
    places = PLACES if inputs["p"] == "int64[N,3]" else np.array([1])
    case = GradCase(
        f"y = com.microsoft.RotaryEmbedding<{attributes}>(x, p, c, s)",
        inputs,
        torch,
        sizes=N3,
        data={"p": places},
    )
    case.check_program()
    case.check_torch()
    case.check_meshes()


def test_multi_head_attention() -> None:
    """By PyTorch; onnx.reference does not have it, so nothing is differenced."""

    def function(torch: Any, q: Any, k: Any, v: Any, b: Any, m: Any, a: Any) -> Any:
        parts = [x + y for x, y in zip((q, k, v), b.chunk(3), strict=True)]
        hidden = -10000.0 * (m == 0).double()[:, None, None, :]
        return attention((2, 2))(torch, *parts, m=a + hidden)

    case = GradCase(
        "y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, b, m, a)",
        {
            "q": "double[N,3,4]",
            "k": "double[N,4,4]",
            "v": "double[N,4,4]",
            "b": "double[12]",
            "m": "int32[N,4]",
            "a": "double[1,2,3,4]",
        },
        function,
        sizes=N3,
        data={"m": np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]])},
    )
    case.check_program()
    case.check_torch()
    case.check_meshes()

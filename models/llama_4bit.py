"""Writes a Llama with 4-bit weights and a cache, as onnxruntime-genai's model builder does.

    python models/llama_4bit.py -o llama.onnx --layers 4 --hidden 256 --heads 8 --kv-heads 4

Inputs: `input_ids` [batch, seq] and `attention_mask` [batch, total] int64, and for each layer
`past_key_values.<n>.key` and `.value` [batch, kv_heads, past, head_dim] float32. Outputs: `logits`
[batch, seq, vocab] float32 and `present.<n>.key` and `.value`, which the next step takes. A
prompt has an empty cache (past = 0, total = seq), or a cache of zeros with its final length; the
mask says how much of it counts.

Projections are `MatMulNBits`, attention is `GroupQueryAttention` with rotary embedding inside,
norms are `SimplifiedLayerNormalization` and `SkipSimplifiedLayerNormalization` (Touvron et al.,
2023, and onnxruntime's contrib operators). Weights are drawn from a normal distribution and rounded
to 4 bits block by block, symmetrically.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from _exporter import Exported, GraphWriter, main, option, size

MICROSOFT = "com.microsoft"
EPSILON = 1e-5
THETA = 10000.0
BITS = 4

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Config(Exported):
    """The sizes and the form of the model.

    Raises:
        ValueError: a size that is not positive, or heads, blocks or bytes that do not fit.
    """

    layers: int = size(2, "number of blocks")
    hidden: int = size(64, "width of the residual stream")
    heads: int = size(4, "query heads")
    kv_heads: int = size(2, "heads of keys and values")
    head_dim: int = option(16, "width of a head, a multiple of 16")
    ffn: int = size(128, "feed-forward width")
    vocab: int = size(256, "number of tokens")
    max_positions: int = size(128, "longest sequence")
    block: int = option(16, "elements with one scale")
    packed: bool = option(False, "one projection to queries, keys and values")
    accuracy: int = option(0, "accuracy_level of the products; 4 computes in int8")

    def __post_init__(self) -> None:
        """Refuse sizes that do not make a model."""
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a multiple of {self.kv_heads}, got {self.heads}")
        if self.head_dim < 16 or self.head_dim % 16:
            raise ValueError(f"head_dim: expected a multiple of 16, got {self.head_dim}")
        if self.block < 16 or self.block & (self.block - 1):
            raise ValueError(f"block: expected a power of two from 16 on, got {self.block}")
        for name in ("hidden", "ffn"):
            if getattr(self, name) % self.block:
                raise ValueError(
                    f"{name}: expected a multiple of the block {self.block}, got "
                    f"{getattr(self, name)}"
                )


def build(config: Config | None = None, **fields: float) -> ir.Model:
    """The model; `fields` replace those of `config`, as in `build(layers=4, packed=True)`."""
    config = replace(config or Config(), **fields)  # type: ignore[arg-type]
    writer = GraphWriter(config.seed)
    ids = writer.input("input_ids", ir.DataType.INT64, ["batch", "seq"])
    mask = writer.input("attention_mask", ir.DataType.INT64, ["batch", "total"])
    cache: list[int | str] = ["batch", config.kv_heads, "past", config.head_dim]
    past = [
        tuple(
            writer.input(f"past_key_values.{n}.{part}", ir.DataType.FLOAT, cache)
            for part in ("key", "value")
        )
        for n in range(config.layers)
    ]
    lengths = _lengths(writer, mask)
    angles = _angles(writer, config)
    table = writer.weight("model.embed_tokens.weight", (config.vocab, config.hidden), std=0.5)
    x = writer.op("Gather", table, ids, name="/model/embed_tokens/Gather", axis=0)
    present: list[int | str] = ["batch", config.kv_heads, "present", config.head_dim]
    outputs: dict[str, tuple[ir.Value, list[int | str]]] = {}
    made: dict[str, tuple[ir.Value, list[int | str]]] = {}
    scope = "/model/layers.0/input_layernorm/LayerNorm"
    weight = _scale(writer, config, "model.layers.0.input_layernorm.weight")
    normed = writer.op(
        "SimplifiedLayerNormalization",
        x,
        weight,
        name=scope,
        axis=-1,
        epsilon=EPSILON,
        stash_type=1,
    )
    for n in range(config.layers):
        attended, key, value = _attention(writer, config, normed, past[n], lengths, angles, n)
        normed, x = _skip_norm(writer, config, x, attended, f"layers.{n}.post_attention_layernorm")
        hidden = _feed_forward(writer, config, normed, n)
        last = n + 1 == config.layers
        following = f"layers.{n + 1}." + ("final_norm_layernorm" if last else "input_layernorm")
        normed, x = _skip_norm(writer, config, x, hidden, following, last=last)
        made[f"present.{n}.key"] = (key, present)
        made[f"present.{n}.value"] = (value, present)
    logits = _product(writer, config, normed, config.hidden, config.vocab, "lm_head")
    outputs["logits"] = (logits, ["batch", "seq", config.vocab])
    return writer.model(outputs | made, "llama_4bit")


def _lengths(writer: GraphWriter, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Position of each sequence's last token int32 [batch, 1], and the longest length int32."""
    scope = "/model/attn_mask_reformat/attn_mask_subgraph"
    one = writer.constant([1], np.int64)
    total = writer.op("ReduceSum", mask, one, name=f"{scope}/ReduceSum", keepdims=1)
    last = writer.op("Sub", total, one, name=f"{scope}/Sub")
    shape = writer.op("Shape", mask, name=f"{scope}/Shape")
    longest = writer.op(
        "Gather", shape, writer.constant(1, np.int64), name=f"{scope}/Gather", axis=0
    )
    to = int(ir.DataType.INT32)
    return (
        writer.op("Cast", last, name=f"{scope}/Sub/Cast", to=to),
        writer.op("Cast", longest, name=f"{scope}/Gather/Cast", to=to),
    )


def _angles(writer: GraphWriter, config: Config) -> tuple[ir.Value, ir.Value]:
    """Cosine and sine of every position and frequency, [max_positions, head_dim / 2]."""
    frequencies = THETA ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.outer(np.arange(config.max_positions), frequencies)
    return (
        writer.table("cos_cache", np.cos(angles).astype(np.float32)),
        writer.table("sin_cache", np.sin(angles).astype(np.float32)),
    )


def _scale(writer: GraphWriter, config: Config, name: str) -> ir.Value:
    return writer.weight(name, (config.hidden,), std=0.1, mean=1)


def _skip_norm(
    writer: GraphWriter,
    config: Config,
    x: ir.Value,
    skip: ir.Value,
    name: str,
    *,
    last: bool = False,
) -> tuple[ir.Value, ir.Value]:
    """The sum of both, normalised, and the sum itself (not for the last norm)."""
    outputs = writer.ops(
        "SkipSimplifiedLayerNormalization",
        [x, skip, _scale(writer, config, f"model.{name}.weight")],
        f"/model/{name.replace('.', '/', 1)}/SkipLayerNorm",
        1 if last else 4,
        domain=MICROSOFT,
        absent=(1, 2),
        epsilon=EPSILON,
    )
    return outputs[0], outputs[-1]


def _attention(
    writer: GraphWriter,
    config: Config,
    x: ir.Value,
    past: tuple[ir.Value, ...],
    lengths: tuple[ir.Value, ir.Value],
    angles: tuple[ir.Value, ir.Value],
    layer: int,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Attention of x [batch, seq, hidden] over the cache and itself, and the new cache."""
    scope = f"layers.{layer}.attn"
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if config.packed:
        width = queries + 2 * keys
        operands = [_product(writer, config, x, config.hidden, width, f"{scope}.qkv_proj"), None]
        operands.append(None)
    else:
        operands = [
            _product(writer, config, x, config.hidden, width, f"{scope}.{part}_proj")
            for part, width in (("q", queries), ("k", keys), ("v", keys))
        ]
    mixed, key, value = writer.ops(
        "GroupQueryAttention",
        [*operands, *past, *lengths, *angles],
        f"/model/layers.{layer}/attn/GroupQueryAttention",
        3,
        domain=MICROSOFT,
        num_heads=config.heads,
        kv_num_heads=config.kv_heads,
        scale=1 / math.sqrt(config.head_dim),
        do_rotary=1,
        rotary_interleaved=0,
    )
    return _product(writer, config, mixed, queries, config.hidden, f"{scope}.o_proj"), key, value


def _feed_forward(writer: GraphWriter, config: Config, x: ir.Value, layer: int) -> ir.Value:
    scope, path = f"layers.{layer}.mlp", f"/model/layers.{layer}/mlp"
    gate, up = (
        _product(writer, config, x, config.hidden, config.ffn, f"{scope}.{part}_proj")
        for part in ("gate", "up")
    )
    sigmoid = writer.op("Sigmoid", gate, name=f"{path}/act_fn/Sigmoid")
    active = writer.op("Mul", gate, sigmoid, name=f"{path}/act_fn/Mul")
    hidden = writer.op("Mul", active, up, name=f"{path}/Mul")
    return _product(writer, config, hidden, config.ffn, config.hidden, f"{scope}.down_proj")


def _product(
    writer: GraphWriter, config: Config, x: ir.Value, columns: int, rows: int, name: str
) -> ir.Value:
    """The product of x and a 4-bit weight with `rows` outputs and `columns` inputs."""
    full = f"model.{name}.MatMul"
    weight = writer.normal(f"{full}.weight", (rows, columns), 1 / math.sqrt(columns))
    packed, scales = quantise(weight, config.block)
    path = "/lm_head" if name == "lm_head" else f"/model/{name.replace('.attn.', '/attn/')}"
    return writer.op(
        "MatMulNBits",
        x,
        writer.table(f"{full}.weight_Q4", packed),
        writer.table(f"{full}.weight_scales", scales),
        name=f"{path}/MatMul_Q4",
        domain=MICROSOFT,
        K=columns,
        N=rows,
        bits=BITS,
        block_size=config.block,
        accuracy_level=config.accuracy,
    )


def quantise(weight: npt.NDArray[np.float32], block: int, bits: int = BITS) -> tuple[Array, Array]:
    """Rounds a weight [rows, columns] to few bits, 4 or 8.

    Returns:
        The numbers, as many to a byte as it holds and the first in its low bits,
        [rows, blocks, bytes of a block] uint8; and the scales, [rows, blocks] float32. A number q
        stands for q minus half the range, times its scale.
    """
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // block, block)
    half = 1 << bits - 1
    scales = np.maximum(np.abs(blocks).max(-1) / (half - 1), np.finfo(np.float32).tiny)
    numbers = (np.rint(blocks / scales[..., None]) + half).astype(np.uint8)
    packed = numbers.reshape(rows, columns // block, -1, 8 // bits)
    places = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    return np.bitwise_or.reduce(packed << places, -1), scales.astype(np.float32)


if __name__ == "__main__":
    main(__doc__.splitlines()[0], Config, build)

"""A decoder-only language model in the manner of GPT-2, of any depth and width.

    python models/transformer.py -o transformer.onnx --layers 12 --d-model 768 --heads 12

`input_ids` [batch, seq] int64 -> `logits` [batch, seq, vocab] float32, with symbolic `batch` and
`seq`. Pre-norm blocks as in Radford et al. (2019): LayerNormalization, causal self-attention,
residual; LayerNormalization, a Gelu feed-forward of four times the width, residual. Positions, the
causal mask and every Reshape target are computed in the graph from Shape, as exporters write them.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from _exporter import Exported, GraphWriter, main, option, size

EPSILON = 1e-5
"""Added to the variance by every LayerNormalization."""

MASKED = float(np.finfo(np.float32).min)
"""Added to a masked score; it is finite, so that no row of the softmax becomes NaN."""

WEIGHT_STD = 0.02

# Scales and biases are random, too, instead of ones and zeros: with those, a bias that is added
# twice or a scale of the wrong columns would not change the output.
SCALE_STD = 0.1


@dataclass(frozen=True)
class Config(Exported):
    """The sizes and the form of the model.

    Raises:
        ValueError: a size that is not positive, heads that do not divide the width, or a dropout
            ratio outside [0, 1).
    """

    layers: int = size(4, "number of blocks")
    d_model: int = size(64, "width of the residual stream")
    heads: int = size(4, "attention heads")
    vocab: int = size(256, "number of tokens")
    max_positions: int = size(128, "longest sequence")
    ffn: int = option(0, "feed-forward width; 0 is four times d-model")
    fused_qkv: bool = option(False, "one projection to queries, keys and values, then Split")
    merged_heads: bool = option(False, "attention over one merged dim of batch*heads")
    tied_head: bool = option(False, "the output projection is the token table, transposed")
    loss: bool = option(False, "add the input labels and the output loss (mean)")
    ignore_index: int = option(-100, "the label that the loss ignores")
    dropout: float = option(0.0, "ratio of the Dropout nodes; 0 writes none")
    training: bool = option(
        False, "write Dropout nodes in training mode, in which they drop elements"
    )

    def __post_init__(self) -> None:
        """Refuse sizes that do not make a model."""
        super().__post_init__()
        if self.ffn < 0:
            raise ValueError(f"ffn: expected a width, or 0, got {self.ffn}")
        if self.d_model % self.heads:
            raise ValueError(
                f"heads: expected a divisor of d_model {self.d_model}, got {self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected a ratio in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.d_model // self.heads

    @property
    def ffn_width(self) -> int:
        """The width between the two products of the feed-forward."""
        return self.ffn or 4 * self.d_model


def build(config: Config | None = None, **fields: float) -> ir.Model:
    """The model; `fields` replace those of `config`, as in `build(layers=2, fused_qkv=True)`."""
    config = replace(config or Config(), **fields)  # type: ignore[arg-type]
    writer = GraphWriter(config.seed)
    ids = writer.input("input_ids", ir.DataType.INT64, ["batch", "seq"])
    seq = _size(writer, ids, 1, "/seq")
    positions = writer.op(
        "Range", _scalar(writer, 0), seq, _scalar(writer, 1), name="/positions/Range"
    )
    table = writer.weight("wte.weight", (config.vocab, config.d_model), std=WEIGHT_STD)
    x = _embed(writer, config, ids, positions, table)
    bias = _causal_bias(writer, positions)
    for layer in range(config.layers):
        x = _block(writer, config, x, bias, f"layer{layer}")
    x = _norm(writer, x, config.d_model, "ln_f")
    if config.tied_head:
        head = writer.op("Transpose", table, name="/lm_head/Transpose", perm=[1, 0])
    else:
        head = writer.weight("lm_head.weight", (config.d_model, config.vocab), std=WEIGHT_STD)
    logits = writer.op("MatMul", x, head, name="/lm_head/MatMul")
    outputs: dict[str, tuple[ir.Value, list[int | str]]] = {
        "logits": (logits, ["batch", "seq", config.vocab])
    }
    if config.loss:
        labels = writer.input("labels", ir.DataType.INT64, ["batch", "seq"])
        outputs["loss"] = (_loss(writer, config, logits, labels), [])
    return writer.model(outputs, "transformer")


def _scalar(writer: GraphWriter, value: int) -> ir.Value:
    return writer.constant(value, np.int64)


def _vector(writer: GraphWriter, *values: int) -> ir.Value:
    return writer.constant(values, np.int64)


def _size(writer: GraphWriter, value: ir.Value, dim: int, scope: str) -> ir.Value:
    """The size of one dim, as a scalar computed in the graph."""
    shape = writer.op("Shape", value, name=f"{scope}/Shape")
    return writer.op("Gather", shape, _scalar(writer, dim), name=f"{scope}/Gather", axis=0)


def _embed(
    writer: GraphWriter, config: Config, ids: ir.Value, positions: ir.Value, table: ir.Value
) -> ir.Value:
    """Token plus position embedding: [batch, seq, d_model]."""
    places = writer.weight("wpe.weight", (config.max_positions, config.d_model), std=WEIGHT_STD)
    token = writer.op("Gather", table, ids, name="/wte/Gather", axis=0)
    place = writer.op("Gather", places, positions, name="/wpe/Gather", axis=0)
    x = writer.op("Add", token, place, name="/embed/Add")
    return _dropout(writer, config, x, "embed")


def _causal_bias(writer: GraphWriter, positions: ir.Value) -> ir.Value:
    """[seq, seq], zero where the column is not after the row and `MASKED` elsewhere."""
    rows = writer.op("Unsqueeze", positions, _vector(writer, 1), name="/mask/rows/Unsqueeze")
    columns = writer.op("Unsqueeze", positions, _vector(writer, 0), name="/mask/columns/Unsqueeze")
    seen = writer.op("LessOrEqual", columns, rows, name="/mask/LessOrEqual")
    return writer.op(
        "Where",
        seen,
        writer.constant(0, np.float32),
        writer.constant(MASKED, np.float32),
        name="/mask/Where",
    )


def _block(
    writer: GraphWriter, config: Config, x: ir.Value, bias: ir.Value, scope: str
) -> ir.Value:
    normed = _norm(writer, x, config.d_model, f"{scope}.ln1")
    attended = _attention(writer, config, normed, bias, f"{scope}.attn")
    x = writer.op("Add", x, attended, name=f"/{scope}/residual1/Add")
    normed = _norm(writer, x, config.d_model, f"{scope}.ln2")
    hidden = _linear(writer, normed, config.d_model, config.ffn_width, f"{scope}.mlp.fc1")
    hidden = writer.op("Gelu", hidden, name=f"/{scope}/mlp/Gelu", approximate="none")
    hidden = _linear(writer, hidden, config.ffn_width, config.d_model, f"{scope}.mlp.fc2")
    hidden = _dropout(writer, config, hidden, f"{scope}.mlp")
    return writer.op("Add", x, hidden, name=f"/{scope}/residual2/Add")


def _attention(
    writer: GraphWriter, config: Config, x: ir.Value, bias: ir.Value, scope: str
) -> ir.Value:
    """Causal self-attention of x [batch, seq, d_model], of the same shape."""
    path = _path(scope)
    width = config.d_model
    if config.fused_qkv:
        fused = _linear(writer, x, width, 3 * width, f"{scope}.qkv_proj")
        query, key, value = writer.ops(
            "Split", [fused, _vector(writer, width, width, width)], f"{path}/qkv/Split", 3, axis=-1
        )
    else:
        query, key, value = (
            _linear(writer, x, width, width, f"{scope}.{part}_proj") for part in ("q", "k", "v")
        )
    batch = _size(writer, x, 0, f"{path}/batch")
    seq = _size(writer, x, 1, f"{path}/seq")
    split = _heads_merged if config.merged_heads else _heads
    query = split(writer, config, query, batch, seq, f"{path}/q")
    key = split(writer, config, key, batch, seq, f"{path}/k")
    value = split(writer, config, value, batch, seq, f"{path}/v")

    swapped = [0, 2, 1] if config.merged_heads else [0, 1, 3, 2]
    keys = writer.op("Transpose", key, name=f"{path}/k/Transpose_1", perm=swapped)
    scores = writer.op("MatMul", query, keys, name=f"{path}/scores/MatMul")
    scale = writer.constant(math.sqrt(config.head_dim), np.float32)
    scores = writer.op("Div", scores, scale, name=f"{path}/scores/Div")
    scores = writer.op("Add", scores, bias, name=f"{path}/scores/Add")
    weights = writer.op("Softmax", scores, name=f"{path}/Softmax", axis=-1)
    weights = _dropout(writer, config, weights, f"{scope}.weights")
    out = writer.op("MatMul", weights, value, name=f"{path}/values/MatMul")

    if config.merged_heads:
        apart = _target(writer, f"{path}/out/heads", batch, config.heads, seq, config.head_dim)
        out = writer.op("Reshape", out, apart, name=f"{path}/out/heads/Reshape")
    out = writer.op("Transpose", out, name=f"{path}/out/Transpose", perm=[0, 2, 1, 3])
    joined = _target(writer, f"{path}/out", batch, seq, width)
    out = writer.op("Reshape", out, joined, name=f"{path}/out/Reshape")
    out = _linear(writer, out, width, width, f"{scope}.out_proj")
    return _dropout(writer, config, out, f"{scope}.out")


def _heads(
    writer: GraphWriter, config: Config, x: ir.Value, batch: ir.Value, seq: ir.Value, path: str
) -> ir.Value:
    """[batch, seq, d_model] to [batch, heads, seq, head_dim]."""
    target = _target(writer, path, batch, seq, config.heads, config.head_dim)
    x = writer.op("Reshape", x, target, name=f"{path}/Reshape")
    return writer.op("Transpose", x, name=f"{path}/Transpose", perm=[0, 2, 1, 3])


def _heads_merged(
    writer: GraphWriter, config: Config, x: ir.Value, batch: ir.Value, seq: ir.Value, path: str
) -> ir.Value:
    """[batch, seq, d_model] to [batch*heads, seq, head_dim], as exporters of 2020 wrote it."""
    x = _heads(writer, config, x, batch, seq, path)
    rows = writer.op("Mul", batch, _scalar(writer, config.heads), name=f"{path}/merged/Mul")
    # -1 instead of seq, to test that a sharded Reshape can still infer a size.
    target = _target(writer, f"{path}/merged", rows, -1, config.head_dim)
    return writer.op("Reshape", x, target, name=f"{path}/merged/Reshape")


def _target(writer: GraphWriter, path: str, *dims: ir.Value | int) -> ir.Value:
    """A Reshape target: the Concat of constants and of scalars computed in the graph."""
    parts: list[ir.Value] = []
    for index, dim in enumerate(dims):
        if isinstance(dim, int):
            parts.append(_vector(writer, dim))
        else:
            name = f"{path}/dim{index}/Unsqueeze"
            parts.append(writer.op("Unsqueeze", dim, _vector(writer, 0), name=name))
    return writer.op("Concat", *parts, name=f"{path}/Concat", axis=0)


def _linear(writer: GraphWriter, x: ir.Value, rows: int, columns: int, scope: str) -> ir.Value:
    """The affine map x @ weight [rows, columns] + bias [columns]."""
    weight = writer.weight(f"{scope}.weight", (rows, columns), std=WEIGHT_STD)
    bias = writer.weight(f"{scope}.bias", (columns,), std=WEIGHT_STD)
    y = writer.op("MatMul", x, weight, name=f"{_path(scope)}/MatMul")
    return writer.op("Add", y, bias, name=f"{_path(scope)}/Add")


def _norm(writer: GraphWriter, x: ir.Value, width: int, scope: str) -> ir.Value:
    scale = writer.weight(f"{scope}.weight", (width,), std=SCALE_STD, mean=1.0)
    bias = writer.weight(f"{scope}.bias", (width,), std=SCALE_STD)
    name = f"{_path(scope)}/LayerNormalization"
    return writer.op("LayerNormalization", x, scale, bias, name=name, axis=-1, epsilon=EPSILON)


def _dropout(writer: GraphWriter, config: Config, x: ir.Value, scope: str) -> ir.Value:
    """A Dropout, which is an identity unless the model is exported in training mode."""
    if not config.dropout:
        return x
    operands = [x, writer.constant(config.dropout, np.float32)]
    if config.training:
        operands.append(writer.constant(True, np.bool_))
    return writer.op("Dropout", *operands, name=f"{_path(scope)}/Dropout")


def _loss(writer: GraphWriter, config: Config, logits: ir.Value, labels: ir.Value) -> ir.Value:
    """The mean cross-entropy over all tokens whose label is not `ignore_index`, a scalar."""
    rows = _vector(writer, -1, config.vocab)
    flat = writer.op("Reshape", logits, rows, name="/loss/logits/Reshape")
    wanted = writer.op("Reshape", labels, _vector(writer, -1), name="/loss/labels/Reshape")
    return writer.op(
        "SoftmaxCrossEntropyLoss",
        flat,
        wanted,
        name="/loss/SoftmaxCrossEntropyLoss",
        reduction="mean",
        ignore_index=config.ignore_index,
    )


def _path(scope: str) -> str:
    """`layer0.attn.q_proj`, the prefix of weights, as `/layer0/attn/q_proj`, that of nodes."""
    return "/" + scope.replace(".", "/")


if __name__ == "__main__":
    main("Write a decoder-only language model as ONNX.", Config, build)

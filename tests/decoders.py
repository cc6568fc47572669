"""A small decoder whose cache grows by Concat, as exporters write it, in ONNX text."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, VOCAB, POSITIONS = 2, 32, 8, 4, 4, 96, 256

_CACHE = "float[batch,{kv},past_sequence_length,{d}]"
_LAYER = """
q{n} = MatMul(n{n}, wq{n})
k{n} = MatMul(n{n}, wk{n})
v{n} = MatMul(n{n}, wv{n})
q4{n} = Reshape(q{n}, to_queries)
k4{n} = Reshape(k{n}, to_keys)
v4{n} = Reshape(v{n}, to_keys)
qt{n} = Transpose<perm=[0,2,1,3]>(q4{n})
kt{n} = Transpose<perm=[0,2,1,3]>(k4{n})
vt{n} = Transpose<perm=[0,2,1,3]>(v4{n})
present.{n}.key = Concat<axis=2>(past_key_values.{n}.key, kt{n})
present.{n}.value = Concat<axis=2>(past_key_values.{n}.value, vt{n})
y{n} = Attention<scale=0.5>(qt{n}, present.{n}.key, present.{n}.value, bias)
yt{n} = Transpose<perm=[0,2,1,3]>(y{n})
ym{n} = Reshape(yt{n}, merge)
o{n} = MatMul(ym{n}, wo{n})
a{n} = Add(x{n}, o{n})
an{n} = LayerNormalization(a{n}, g{n})
up{n} = MatMul(an{n}, wu{n})
act{n} = Gelu(up{n})
down{n} = MatMul(act{n}, wd{n})
x{m} = Add(a{n}, down{n})
n{m} = LayerNormalization(x{m}, h{n})
"""


def growing(path: Path, seed: int = 0) -> Path:
    """Writes the decoder to a file; its inputs are ids, mask, positions and the cache."""
    rng = np.random.default_rng(seed)
    weights = {
        "table": rng.normal(0, 1, (VOCAB, HIDDEN)),
        "positions": rng.normal(0, 0.3, (POSITIONS, HIDDEN)),
        "head": rng.normal(0, 0.5, (HIDDEN, VOCAB)),
        "g": np.ones(HIDDEN),
    }
    shapes = {
        "wq": (HIDDEN, HEADS * HEAD), "wk": (HIDDEN, KV_HEADS * HEAD),
        "wv": (HIDDEN, KV_HEADS * HEAD), "wo": (HEADS * HEAD, HIDDEN),
        "wu": (HIDDEN, 64), "wd": (64, HIDDEN),
    }  # fmt: skip
    for n in range(LAYERS):
        weights |= {f"{w}{n}": rng.normal(0, s[0] ** -0.5, s) for w, s in shapes.items()}
        weights |= {f"g{n}": 1 + rng.normal(0, 0.1, HIDDEN), f"h{n}": np.ones(HIDDEN)}
    cache = _CACHE.format(kv=KV_HEADS, d=HEAD)
    grown = cache.replace("past_sequence_length", "total_sequence_length")
    parts = [f"{n}.{part}" for n in range(LAYERS) for part in ("key", "value")]
    inputs = ", ".join(f"{cache} past_key_values.{part}" for part in parts)
    outputs = ", ".join(f"{grown} present.{part}" for part in parts)
    layers = "".join(_LAYER.format(n=n, m=n + 1) for n in range(LAYERS))
    text = f"""
<ir_version: 10, opset_import: ["" : 23]>
decoder (int64[batch,sequence_length] input_ids,
         int64[batch,total_sequence_length] attention_mask,
         int64[batch,sequence_length] position_ids, {inputs})
     => (float[batch,sequence_length,{VOCAB}] logits, {outputs})
<int64[4] to_queries = {{0,0,{HEADS},{HEAD}}}, int64[4] to_keys = {{0,0,{KV_HEADS},{HEAD}}},
 int64[3] merge = {{0,0,{HEADS * HEAD}}}, int64 zero = {{0}}, int64 one = {{1}},
 int64[1] last = {{-1}}, int64[1] first = {{0}}, int64[2] between = {{1,2}},
 float shown = {{0}}, float hidden = {{-1e9}}>
{{
e = Gather(table, input_ids)
p = Gather(positions, position_ids)
x0 = Add(e, p)
n0 = LayerNormalization(x0, g)
ids_shape = Shape(input_ids)
mask_shape = Shape(attention_mask)
length = Gather(ids_shape, one)
total = Gather(mask_shape, one)
begin = Sub(total, length)
rows = Range(begin, total, one)
row = Unsqueeze(rows, last)
columns = Range(zero, total, one)
column = Unsqueeze(columns, first)
causal = LessOrEqual(column, row)
real = Cast<to=9>(attention_mask)
real4 = Unsqueeze(real, between)
seen = And(causal, real4)
bias = Where(seen, shown, hidden)
{layers}
logits = MatMul(n{LAYERS}, head)
}}"""
    text = text.replace("past_key_values.", "past_key_values_").replace("present.", "present_")
    for part in parts:
        text = text.replace(f"_{part}", "_" + part.replace(".", "_"))
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()
    )
    onnx.save(model, path)
    return path

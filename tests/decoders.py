"""A small decoder whose cache grows by Concat, alone or with an encoder, in ONNX text."""

import json
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
{cross}
an{n} = LayerNormalization(a{n}, g{n})
up{n} = MatMul(an{n}, wu{n})
act{n} = Gelu(up{n})
down{n} = MatMul(act{n}, wd{n})
x{m} = Add(a{n}, down{n})
n{m} = LayerNormalization(x{m}, h{n})
"""
_ALONE = "a{n} = Add(x{n}, o{n})"
_CROSS = """
b{n} = Add(x{n}, o{n})
bn{n} = LayerNormalization(b{n}, g{n})
cq{n} = MatMul(bn{n}, wc{n})
cq4{n} = Reshape(cq{n}, to_queries)
cqt{n} = Transpose<perm=[0,2,1,3]>(cq4{n})
cy{n} = Attention<scale=0.5>(cqt{n}, past_key_cross_{n}, past_value_cross_{n}{read})
cyt{n} = Transpose<perm=[0,2,1,3]>(cy{n})
cym{n} = Reshape(cyt{n}, merge)
co{n} = MatMul(cym{n}, wd2{n})
a{n} = Add(b{n}, co{n})
"""
# One row for each token of the decoder.
_READ = """
read = Cast<to=9>(encoder_attention_mask)
read4 = Unsqueeze(read, between)
each = Equal(row, row)
read_each = And(each, read4)
read_bias = Where(read_each, shown, hidden)
"""


def growing(path: Path, seed: int = 0, *, crossed: bool = False, masked: bool = False) -> Path:
    """Writes the decoder to a file; its inputs are ids, mask, positions and the cache.

    Args:
        path: The file.
        seed: Seed of the weights.
        crossed: Whether it also attends to what an encoder leaves: `past_key_cross_0`, ….
        masked: Whether it leaves out what the encoder has padded: `encoder_attention_mask`.
    """
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
        if crossed:
            for name in (f"wc{n}", f"wd2{n}"):
                weights[name] = rng.normal(0, 2 * HIDDEN**-0.5, (HIDDEN, HIDDEN))
        weights |= {f"g{n}": 1 + rng.normal(0, 0.1, HIDDEN), f"h{n}": np.ones(HIDDEN)}
    cache = _CACHE.format(kv=KV_HEADS, d=HEAD)
    grown = cache.replace("past_sequence_length", "total_sequence_length")
    parts = [f"{n}.{part}" for n in range(LAYERS) for part in ("key", "value")]
    inputs = ", ".join(f"{cache} past_key_values.{part}" for part in parts)
    outputs = ", ".join(f"{grown} present.{part}" for part in parts)
    if crossed:
        read = f"float[batch,{KV_HEADS},frames,{HEAD}]"
        names = [f"past_{part}_cross_{n}" for n in range(LAYERS) for part in ("key", "value")]
        inputs += "".join(f", {read} {name}" for name in names)
    if masked:
        inputs += ", int64[batch,frames] encoder_attention_mask"
    bias = ", read_bias" if masked else ""
    block = _CROSS if crossed else _ALONE
    crosses = [block.format(n=n, read=bias) for n in range(LAYERS)]
    layers = _READ if masked else ""
    layers += "".join(_LAYER.format(n=n, m=n + 1, cross=c) for n, c in enumerate(crosses))
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


FEATURES = 12
_ENCODER_LAYER = """
ck{n} = MatMul(e, wck{n})
cv{n} = MatMul(e, wcv{n})
ck4{n} = Reshape(ck{n}, to_keys)
cv4{n} = Reshape(cv{n}, to_keys)
present_key_cross_{n} = Transpose<perm=[0,2,1,3]>(ck4{n})
present_value_cross_{n} = Transpose<perm=[0,2,1,3]>(cv4{n})
"""


def encoder_decoder(folder: Path, seed: int = 0, *, tokens: bool = False) -> Path:
    """Writes a folder of onnxruntime-genai: an encoder of features or of tokens, and a decoder.

    The weight `g` is the same in both, `wu0` is not, and `wq0` is the same but is wanted in another
    layout where a mesh divides it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    growing(folder / "decoder.onnx", seed, crossed=True, masked=tokens)
    held = onnx.load(folder / "decoder.onnx").graph.initializer
    same = {w.name: numpy_helper.to_array(w) for w in held if w.name in ("g", "wq0")}
    rng = np.random.default_rng(seed + 100)
    weights = {"wu0": rng.normal(0, FEATURES**-0.5, (FEATURES, HIDDEN))} | same
    for n in range(LAYERS):
        weights |= {
            f"{w}{n}": rng.normal(0, HIDDEN**-0.5, (HIDDEN, KV_HEADS * HEAD))
            for w in ("wck", "wcv")
        }
    outputs = ", ".join(
        f"float[batch,{KV_HEADS},frames,{HEAD}] present_{part}_cross_{n}"
        for n in range(LAYERS)
        for part in ("key", "value")
    )
    layers = "".join(_ENCODER_LAYER.format(n=n) for n in range(LAYERS))
    inputs, first = f"float[batch,frames,{FEATURES}] features", ""
    if tokens:
        weights["rows"] = rng.normal(0, 2, (VOCAB, FEATURES))
        inputs = "int64[batch,frames] input_ids, int64[batch,frames] attention_mask"
        first = """
given = Gather(rows, input_ids)
real = Cast<to=1>(attention_mask)
real3 = Unsqueeze(real, last)
features = Mul(given, real3)"""
    text = f"""
<ir_version: 10, opset_import: ["" : 23]>
encoder ({inputs}) => ({outputs})
<int64[4] to_keys = {{0,0,{KV_HEADS},{HEAD}}}, int64[1] last = {{-1}}>
{{{first}
up = MatMul(features, wu0)
act = Gelu(up)
down = MatMul(act, wq0)
e = LayerNormalization(down, g)
{layers}
}}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()
    )
    onnx.save(model, folder / "encoder.onnx")
    config = {
        "encoder": {
            "filename": "encoder.onnx",
            "outputs": {
                "cross_present_key_names": "present_key_cross_%d",
                "cross_present_value_names": "present_value_cross_%d",
            },
        },
        "decoder": {
            "filename": "decoder.onnx",
            "inputs": {
                "past_key_names": "past_key_values_%d_key",
                "past_value_names": "past_key_values_%d_value",
                "cross_past_key_names": "past_key_cross_%d",
                "cross_past_value_names": "past_value_cross_%d",
            },
            "outputs": {
                "present_key_names": "present_%d_key",
                "present_value_names": "present_%d_value",
            },
        },
    }
    (folder / "genai_config.json").write_text(json.dumps({"model": config}))
    return folder

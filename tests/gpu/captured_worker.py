"""Generates with a decoder whose cache is extended in place: `DIRECTORY [OPTION=VALUE]…`.

Prints how many lines the stand-ins' log had after each of several batches. Next tokens follow from
token, position and mask by arithmetic that the stand-ins compute, so they are known without a GPU.
Attention extends the cache, and computes nothing there.
"""

import os
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.generation.generator import Generator

VOCAB, HIDDEN, NEW = 96, 16, 12
PROMPTS = [[5, 80, 33], [41], [7, 7, 90, 2, 64]]
BATCHES = [PROMPTS, [prompt[:2] for prompt in PROMPTS], PROMPTS[:2]]
"""The second has the number of rows and the length of the first; the third has fewer rows."""

TEXT = """<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
g (int64[batch, seq] input_ids, int64[batch, total] attention_mask, int64[batch, seq] position_ids,
   float16[batch, 2, past, 8] past_key_values_0_key,
   float16[batch, 2, past, 8] past_key_values_0_value)
=> (float[batch, seq, 96] logits, float16[batch, 2, past, 8] present_0_key,
    float16[batch, 2, past, 8] present_0_value)
<int64[1] last = {-1}, int64[1] middle = {1}, float one = {1}, float two = {2}, int64 second = {1},
 float[1] base = {90}, float[1] by_token = {-0.9}, float[1] by_position = {0.5},
 float[1] by_length = {0.25}>
{
  tokens = Cast<to = 1>(input_ids)
  places = Cast<to = 1>(position_ids)
  counts = Cast<to = 1>(attention_mask)
  row = Unsqueeze(counts, middle)
  column = Unsqueeze(counts, last)
  lengths = MatMul(row, column)
  length = Squeeze(lengths, last)
  t = Mul(tokens, by_token)
  p = Mul(places, by_position)
  l = Mul(length, by_length)
  tp = Add(t, p)
  tpl = Add(tp, l)
  h = Add(tpl, base)
  h1 = Unsqueeze(h, last)
  parts = MatMul(h1, spread)
  score = MatMul(parts, doubled)
  logits = Sub(score, squares)
  x = Cast<to = 10>(h1)
  q = MatMul(x, wq)
  k = MatMul(x, wk)
  v = MatMul(x, wv)
  before = Sub(length, one)
  flat = Squeeze(before, last)
  lens = Cast<to = 6>(flat)
  sizes = Shape(attention_mask)
  size = Gather(sizes, second)
  total32 = Cast<to = 6>(size)
  y, present_0_key, present_0_value = com.microsoft.GroupQueryAttention<
    num_heads = 4, kv_num_heads = 2>(q, k, v, past_key_values_0_key, past_key_values_0_value,
      lens, total32)
}"""


def directory(folder: Path, strategy: str, devices: int) -> Path:
    """Writes the decoder."""
    model = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    values = np.arange(VOCAB, dtype=np.float32)
    # The product is 2 h v - v^2, which is greatest for the v nearest to h.
    weights = {"spread": np.ones((1, 8), np.float32), "squares": values**2}
    weights["doubled"] = np.broadcast_to(values / 4, (8, VOCAB))
    for name, width in (("wq", 32), ("wk", 16), ("wv", 16)):
        weights[name] = rng.normal(size=(1, width)).astype(np.float16)
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    path = folder / "m.onnx"
    onnx.save(model, path)
    out: Path = shard_model(path, strategy, folder / f"{devices}", devices=devices).out
    return out


def expected(prompt: list[int]) -> list[int]:
    """Returns the new tokens: the nearest one to a number that token, place and length give."""
    tokens = list(prompt)
    for _ in range(NEW):
        h = 90 - 0.9 * tokens[-1] + 0.5 * (len(tokens) - 1) + 0.25 * len(tokens)
        tokens.append(int(np.argmin(np.abs(np.arange(VOCAB) - h))))
    return tokens[len(prompt) :]


def main(out: str, *pairs: str) -> None:
    """Generates from all batches, and from those of requests."""
    log = os.environ.get("STANDIN_LOG")
    options = dict(pair.split("=") for pair in pairs)
    with Generator(out, device="cuda", ort_options=options) as m:
        for prompts in BATCHES:
            found = m.generate(prompts, max_new_tokens=NEW)
            assert found == [expected(prompt) for prompt in prompts], found
            print(len(Path(log).read_text().splitlines()) if log else 0)
        requests = m.requests(slots=3, length=32)
        new: dict[int, list[int | None]] = {}
        for prompt in PROMPTS:
            new[requests.submit(prompt, max_new_tokens=NEW)] = []
        for event in requests.events():
            new[event.request].append(event.token)
        assert list(new.values()) == [expected(prompt) for prompt in PROMPTS], new
        print(len(Path(log).read_text().splitlines()) if log else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

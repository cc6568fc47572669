"""Networks whose sizes are computed of sizes: sharded, trained, and compared with the undivided."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxpar.cli import main
from tests.tiers import covering

HEAD = '<ir_version: 10, opset_import: ["": 20]>\n'
RNG = np.random.default_rng(3)


def weight(name: str, *shape: int) -> str:
    """An initializer of seeded numbers as text."""
    numbers = ", ".join(f"{x:.3f}" for x in RNG.standard_normal(np.prod(shape)))
    return f"float[{', '.join(map(str, shape))}] {name} = {{{numbers}}}"


HALVES = f"""g (float[batch, seq, 6] x) => (float[b, h, 5] y)
<{weight("w", 12, 8)}, {weight("v", 8, 5)}> {{
  s = Shape(x) one = Constant<value_ints = [1]>() zero = Constant<value_ints = [0]>()
  n = Gather(s, one) b = Gather(s, zero) two = Constant<value_ints = [2]>()
  half = Div(n, two) even = Mul(half, two) twelve = Constant<value_ints = [12]>()
  cut = Slice(x, zero, even, one) shape = Concat<axis = 0>(b, half, twelve)
  pairs = Reshape(cut, shape) [first] h = MatMul(pairs, w) r = Relu(h) [last] y = MatMul(r, v)
}}"""
"""Two neighbours of a sequence become one, an odd one left over: as `x[:, : n // 2 * 2]`."""

FLOATS = f"""g (float[batch, seq, 6] x) => (float[b, h, 5] y) <{weight("w", 6, 5)}> {{
  s = Shape(x) i = Constant<value_int = 1>() n = Gather(s, i) f = Cast<to = 1>(n)
  three = Constant<value_float = 3.0>() q = Div(f, three) c = Ceil(q) k = Cast<to = 7>(c)
  axis = Constant<value_ints = [0]>() end = Unsqueeze(k, axis)
  one = Constant<value_ints = [1]>() [cut] t = Slice(x, axis, end, one) y = MatMul(t, w)
}}"""
"""A third of a sequence, rounded up as older exporters of PyTorch round."""

RANGE = f"""g (float[batch, 8, 6] x) => (float[b, 8, 5] y) <{weight("w", 6, 5)}> {{
  start = Constant<value_int = 0>() end = Constant<value_int = 8>()
  step = Constant<value_int = 1>() f = CastLike(start, x) g = CastLike(end, x)
  d = CastLike(step, x) r = Range(f, g, d) axis = Constant<value_ints = [1]>()
  column = Unsqueeze(r, axis) t = Add(x, column) y = MatMul(t, w)
}}"""
"""`arange` of constants in the type of another tensor, as `optimize=False` leaves it."""

CHOSEN = f"""g (float[batch, 6] x, float[batch, 5] z) => (float[b, 5] y)
<{weight("w", 6, 5)}, {weight("v", 5, 5)}> {{
  [first] h = MatMul(x, w) zero = Constant<value_float = 0.0>() mask = Greater(z, zero)
  hits = NonZero(mask) at = Transpose<perm = [1, 0]>(hits) chosen = GatherND(z, at)
  written = ScatterND(h, at, chosen) y = MatMul(written, v)
}}"""
"""As many elements are written as a mask chooses, which is no expression of sizes."""

CHUNKS = f"""g (float[batch, seq, 6] x) => (float[b, n, 5] y)
<{weight("w", 6, 4)}, {weight("v", 4, 5)}> {{
  h = MatMul(x, w) s = Shape(h) i = Constant<value_ints = [1]>() n = Gather(s, i)
  four = Constant<value_ints = [4]>() m = Mod(n, four) d = Sub(four, m) more = Mod(d, four)
  none = Constant<value_ints = [0]>() before = Constant<value_ints = [0, 0, 0]>()
  pads = Concat<axis = 0>(before, none, more, none) p = Pad(h, pads)
  all = Constant<value_ints = [-1]>() batch = Constant<value_ints = [0]>()
  shape = Concat<axis = 0>(batch, all, four, four) parts = Reshape(p, shape)
  axis = Constant<value_ints = [2]>() sums = ReduceSum<keepdims = 0>(parts, axis)
  y = MatMul(sums, v)
}}"""
"""A sequence is padded to a multiple of the chunk, as state space models do."""

NETWORKS = {
    "halves": (HALVES, ["batch=3,seq=7", "batch=1,seq=2", "batch=4,seq=11"]),
    "floats": (FLOATS, ["batch=3,seq=7", "batch=1,seq=1", "batch=2,seq=9"]),
    "chunks": (CHUNKS, ["batch=3,seq=7", "batch=1,seq=1", "batch=2,seq=8"]),
    "range": (RANGE, ["batch=3", "batch=1"]),
    "chosen": (CHOSEN, ["batch=3", "batch=5"]),
}
SPLITS = {
    "halves": "{first: {in: [[~, dp, ~], [~, ~]]}, last: {in: [[dp, ~, ~], [~, ~]]}}",
    "floats": "{cut: {in: [[dp, ~, ~], [~], [~], [~]]}}",
}
TRAIN = ["--train", "--loss", "mse", "--optimizer", "adamw"]


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.onnx"
    model = onnx.parser.parse_model(HEAD + NETWORKS[name][0])
    onnx.save(model, path)
    return path


def strategy(folder: Path, name: str, preset: str) -> str:
    if preset != "file":
        return preset
    path = folder / "strategy.yaml"
    path.write_text(f"mesh: {{dp: 2}}\nnodes: {SPLITS[name]}\n")
    return str(path)


@pytest.mark.parametrize(
    ("name", "preset", "train"),
    [
        *covering(NETWORKS, ["dp=2", "tp=2"], [False, True]),
        *covering(SPLITS, ["file"], [True, False]),
    ],
)
def test_sharded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, preset: str, train: bool
) -> None:
    model, out = written(tmp_path, name), str(tmp_path / "out")
    chosen = strategy(tmp_path, name, preset)
    options = TRAIN if train else []
    assert main(["shard", str(model), "--strategy", chosen, "-o", out, *options]) == 0
    printed = capsys.readouterr().out
    assert main(["inspect", out, "--json"]) == 0
    report = capsys.readouterr().out
    if name != "chosen":
        assert not re.search(r"\b_d\d", printed + report)
        assert json.loads(report)["replicated"] == []
    cases = [option for case in NETWORKS[name][1] for option in ("--symbol", case)]
    steps = ["--steps", "2"] if train else []
    assert main(["verify", out, "--model", str(model), *cases, *steps]) == 0

"""What a sharded sequence communicates: keys and values, or only statistics and a result."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec

HEADS = 2


def attention(path: Path, queries: int | str, keys: int | str, attributes: str = "") -> Path:
    """A model of one Attention over q [N, heads, queries, 8] and k and v [N, heads, keys, 8]."""
    q, k = (f"float[N,{HEADS},{n},8]" for n in (queries, keys))
    text = f"g ({q} q, {k} k, {k} v) => (float[N,M,S,D] y) {{ y = Attention{attributes}(q, k, v) }}"
    model = onnx.helper.make_model(
        onnx.parser.parse_graph(text),
        opset_imports=[onnx.helper.make_opsetid("", 23)],
        ir_version=11,
    )
    onnx.save(model, path)
    return path


def sharded(
    tmp_path: Path, model: Path, query: str, key: str, feeds: dict[str, tuple[int, ...]]
) -> tuple[Counter[str], Counter[str]]:
    """Shards and verifies a model; returns its collectives and the values that they take."""
    strategy = tmp_path / "s.yaml"
    entry = f"{{q: {query}, k: {key}, v: {key}}}"
    strategy.write_text(f"mesh: {{sp: 2}}\ndataset: {entry}\n")
    made = shard_model(model, strategy, tmp_path / "out")
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in feeds.items()}
    np.savez(tmp_path / "in.npz", **arrays)
    (case,) = runtime.verify(made.out, model, inputs=tmp_path / "in.npz")
    assert case.ok, case
    sent = made.partitioned.builder.collectives
    return Counter(c.op for c in sent), Counter(c.value for c in sent)


@pytest.mark.parametrize("attributes", ["", "<is_causal=1>"])
@pytest.mark.parametrize("length", [6, 7])
def test_a_long_prompt_gathers_keys_and_values_but_no_query(
    tmp_path: Path, attributes: str, length: int
) -> None:
    model = attention(tmp_path / "m.onnx", "S", "S", attributes)
    half = "[~, ~, sp, ~]"
    shape = (2, HEADS, length, 8)
    ops, values = sharded(tmp_path, model, half, half, dict.fromkeys("qkv", shape))
    assert ops == {"AllGather": 2}
    assert values == {"k": 1, "v": 1}


@pytest.mark.parametrize("length", [6, 7])
def test_a_token_behind_a_long_cache_sends_statistics_and_a_sum(
    tmp_path: Path, length: int
) -> None:
    model = attention(tmp_path / "m.onnx", 1, "T")
    shapes = {"q": (2, HEADS, 1, 8)} | dict.fromkeys("kv", (2, HEADS, length, 8))
    ops, values = sharded(tmp_path, model, "[~, ~, ~, ~]", "[~, ~, sp, ~]", shapes)
    # For each row the maximum, the sum of the exponentials, and the result.
    assert ops == {"AllReduce": 3}
    assert not {"q", "k", "v"} & set(values)


WIDTH = 16
BLOCK = """
    {x}q = MatMul({x}, {x}wq)  {x}k = MatMul({x}, {x}wk)  {x}v = MatMul({x}, {x}wv)
    {x}a = Attention<q_num_heads=4, kv_num_heads=2, is_causal=1>({x}q, {x}k, {x}v)
    {x}o = MatMul({x}a, {x}wo)
    {next} = Add({x}, {x}o)
"""


def test_training_keeps_heads_where_they_are(tmp_path: Path) -> None:
    """Two layers over tp: one reduction per layer forward, and one backward if x has a gradient.

    Attention is differentiated by its body, whose heads stay sharded: nothing is gathered.
    """
    rng = np.random.default_rng(0)
    body = BLOCK.format(x="x", next="h") + BLOCK.format(x="h", next="y")
    kind = f"float[N,S,{WIDTH}]"
    graph = onnx.parser.parse_graph(f"g ({kind} x) => ({kind} y) {{{body}}}")
    shapes = {"q": (WIDTH, 16), "k": (WIDTH, 8), "v": (WIDTH, 8), "o": (16, WIDTH)}
    for layer in "xh":
        for part, shape in shapes.items():
            array = rng.standard_normal(shape).astype(np.float32) / 4
            graph.initializer.append(onnx.numpy_helper.from_array(array, f"{layer}w{part}"))
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=11
    )
    onnx.save(model, tmp_path / "m.onnx")
    spec = TrainingSpec(parse_loss("mse"), parse_optimizer("sgd"))
    made = shard_model(tmp_path / "m.onnx", "tp=2", tmp_path / "out", training=spec)
    assert made.training is not None
    programs = {p.program: p for p in made.training.programs}
    sent = Counter(c.op for c in programs["training_model"].builder.collectives)
    assert sent == {"AllReduce": 2 + 1}
    (case,) = runtime.verify(
        made.out, tmp_path / "m.onnx", cases=["N=3,S=5"], options=runtime.VerifyOptions(steps=3)
    )
    assert case.ok, case

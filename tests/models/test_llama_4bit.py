"""The 4-bit Llama against numpy, and sharded or not: a prompt, then tokens one by one."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import llama_4bit
import numpy as np
import onnxruntime as ort
import pytest
from _exporter import save
from numpy.typing import NDArray

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.partition.partitioned_model import PartitionedModel

Array = NDArray[np.generic]
Feeds = dict[str, Array]

SMALL = llama_4bit.Config(layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=128, seed=1)
STRATEGIES = {"tp=2": 2, "tp=4": 4, "dp=2,tp=2": 2}


def feeds(ids: Array, lengths: Sequence[int], cache: int | list[Array] = 0) -> Feeds:
    """The inputs of one step.

    Args:
        ids: The new tokens; a prompt is padded on the right.
        lengths: Tokens of each sequence, these included.
        cache: The presents of the step before; for a prompt the length of the cache to begin with.
    """
    batch = len(ids)
    if isinstance(cache, int):
        empty = np.zeros((batch, SMALL.kv_heads, cache, SMALL.head_dim), np.float32)
        held = [empty] * (2 * SMALL.layers)
    else:
        held = cache
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    names = [f"past_key_values.{n}.{p}" for n in range(SMALL.layers) for p in ("key", "value")]
    return {"input_ids": ids, "attention_mask": mask, **dict(zip(names, held, strict=True))}


def run(path: Path, given: Feeds) -> list[Array]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return list(session.run(None, given))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "llama.onnx"
    save(llama_4bit.build(SMALL), path)
    return path


@cache
def weights() -> dict[str, Array]:
    """All weights, those of 4 bits as floats."""
    graph = llama_4bit.build(SMALL).graph
    found = {n: v.const_value.numpy() for n, v in graph.initializers.items() if v.const_value}
    for name in [n for n in found if n.endswith("weight_Q4")]:
        packed = found.pop(name)
        scales = found.pop(name.replace("_Q4", "_scales"))
        nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*scales.shape, -1)
        weight = (nibbles.astype(np.float64) - 8) * scales[..., None]
        found[name.removesuffix("_Q4")] = weight.reshape(len(packed), -1)
    return found


def rms(x: Array, name: str) -> Array:
    scale = weights()[f"model.layers.{name}.weight"]
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + llama_4bit.EPSILON) * scale


def linear(x: Array, name: str) -> Array:
    return x @ weights()[f"model.{name}.MatMul.weight"].T


def attention(x: Array, name: str) -> Array:
    """Row by row and head by head, of x [batch, seq, hidden]."""
    size, length = SMALL.head_dim, x.shape[1]
    frequencies = llama_4bit.THETA ** (-np.arange(0, size, 2) / size)
    turn = np.exp(1j * np.outer(np.arange(length), frequencies))

    def heads(part: str, count: int) -> Array:
        return linear(x, f"{name}.{part}_proj").reshape(*x.shape[:2], count, size)

    def rotated(y: Array) -> Array:
        complexes = (y[..., : size // 2] + 1j * y[..., size // 2 :]) * turn[:, None]
        return np.concatenate([complexes.real, complexes.imag], -1)

    q = rotated(heads("q", SMALL.heads))
    k, v = rotated(heads("k", SMALL.kv_heads)), heads("v", SMALL.kv_heads)
    out = np.empty_like(q)
    for row, i, h in np.ndindex(q.shape[:3]):
        kv = h // (SMALL.heads // SMALL.kv_heads)
        powers = np.exp(k[row, : i + 1, kv] @ q[row, i, h] / np.sqrt(size))
        out[row, i, h] = powers / powers.sum() @ v[row, : i + 1, kv]
    return linear(out.reshape(*x.shape[:2], -1), f"{name}.o_proj")


def forward(ids: Array) -> Array:
    """The logits in float64."""
    x = weights()["model.embed_tokens.weight"][ids].astype(np.float64)
    for n in range(SMALL.layers):
        norm = f"{n}.input_layernorm"
        x = x + attention(rms(x, norm), f"layers.{n}.attn")
        y = rms(x, f"{n}.post_attention_layernorm")
        gate = linear(y, f"layers.{n}.mlp.gate_proj")
        hidden = gate / (1 + np.exp(-gate)) * linear(y, f"layers.{n}.mlp.up_proj")
        x = x + linear(hidden, f"layers.{n}.mlp.down_proj")
    return linear(rms(x, f"{SMALL.layers}.final_norm_layernorm"), "lm_head")


IDS = np.random.default_rng(0).integers(0, SMALL.vocab, (3, 7))


def test_logits_equal_a_forward_pass_in_numpy(model: Path) -> None:
    """Float32 through two layers of sums of up to 128 products: 1e-5 of the greatest logit."""
    want = forward(IDS)
    prompt = run(model, feeds(IDS[:, :5], [5] * 3))
    np.testing.assert_allclose(prompt[0], want[:, :5], atol=1e-5 * np.abs(want).max())
    one = run(model, feeds(IDS[:, 5:6], [6] * 3, prompt[1:]))
    two = run(model, feeds(IDS[:, 6:], [7] * 3, one[1:]))
    np.testing.assert_allclose(two[0], want[:, 6:], atol=1e-5 * np.abs(want).max())


def test_packed_projections_are_sharded_by_heads_too(tmp_path: Path) -> None:
    """As the builder of onnxruntime-genai packs them: one product, then one operand of three."""
    path = tmp_path / "packed.onnx"
    save(llama_4bit.build(SMALL, packed=True), path)
    sharded = shard_model(path, "tp=4", tmp_path / "out")
    assert collectives(sharded.partitioned) == {"AllReduce": 2 * SMALL.layers + 1}
    np.savez(tmp_path / "prompt.npz", **feeds(IDS[:, :5], [5, 3, 4], 9))
    (case,) = runtime.verify(sharded.out, path, inputs=tmp_path / "prompt.npz")
    assert case.ok, case


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_steps_equal_the_undivided_model(
    model: Path, strategy: str, tmp_path: Path
) -> None:
    """A prompt of uneven lengths over 3 sequences, and a step on its cache of full length."""
    cache = 9
    out = shard_model(model, strategy, tmp_path / "out").out
    prompt = feeds(IDS[:, :5], [5, 3, 4], cache)
    held = run(model, prompt)[1:]
    grown = feeds(IDS[:, 5:6], [6, 4, 5], held)
    for name, given in (("prompt", prompt), ("step", grown)):
        np.savez(tmp_path / f"{name}.npz", **given)
        (case,) = runtime.verify(out, model, inputs=tmp_path / f"{name}.npz")
        assert case.ok, case


def test_random_steps_and_prompts_at_the_sizes_given(model: Path, tmp_path: Path) -> None:
    """No sizes fit all: a cache of one has no room for a step's 8, nor a mask for the other's."""
    out = shard_model(model, "dp=2,tp=2", tmp_path / "out").out
    step, full = "batch=2,seq=1,total=8,past=32", "batch=3,seq=1,total=32,past=32"
    cases = runtime.verify(out, model, cases=[step, full, "batch=2,seq=5,total=5,past=5"])
    assert [case.symbols["past"] for case in cases] == [32, 32, 5]
    assert all(case.ok for case in cases), cases


def collectives(sharded: PartitionedModel) -> Counter[str]:
    return Counter(c.op for c in sharded.builder.collectives)


@pytest.mark.parametrize(("strategy", "pieces"), STRATEGIES.items())
def test_two_reductions_a_layer_and_a_cache_split_by_heads(
    model: Path, strategy: str, pieces: int, tmp_path: Path
) -> None:
    sharded = shard_model(model, strategy, tmp_path / "out").partitioned
    # One for the split vocabulary of the embedding; the logits stay split.
    assert collectives(sharded) == {"AllReduce": 2 * SMALL.layers + 1}
    tp = sharded.plan.mesh.axis_atoms("tp")
    outputs = sharded.plan.outputs
    assert outputs["logits"].dim_atoms(2) == tp
    for n in range(SMALL.layers):
        for part in ("key", "value"):
            assert outputs[f"present.{n}.{part}"].dim_atoms(1) == tp
            # What comes out goes in again as it is.
            assert sharded.plan.inputs[f"past_key_values.{n}.{part}"].dim_atoms(1) == tp
    weight = sharded.plan.parameters["model.layers.0.attn.q_proj.MatMul.weight_Q4"]
    assert weight.strategy(sharded.plan.mesh) == (pieces, 1, 1)

"""The decoder against a forward pass written in numpy."""

import numpy as np
import pytest
import transformer
from scipy.special import erf

from tests.models.example import run, unknown_shapes, weights

Array = np.ndarray
Weights = dict[str, Array]

SMALL = transformer.Config(layers=2, d_model=24, heads=3, vocab=37, max_positions=16, seed=1)


def normalise(x: Array, w: Weights, name: str) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + transformer.EPSILON)
    return centred / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x: Array, w: Weights, name: str) -> Array:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def attend(q: Array, k: Array, v: Array) -> Array:
    """One head of one sequence, row by row: token i sees tokens 0 to i and no mask is needed."""
    out = np.empty_like(v)
    for i in range(len(q)):
        scores = k[: i + 1] @ q[i] / np.sqrt(q.shape[-1])
        exponents = np.exp(scores - scores.max())
        out[i] = exponents / exponents.sum() @ v[: i + 1]
    return out


def attention(x: Array, w: Weights, name: str, heads: int) -> Array:
    if f"{name}.qkv_proj.weight" in w:
        q, k, v = np.split(linear(x, w, f"{name}.qkv_proj"), 3, axis=-1)
    else:
        q, k, v = (linear(x, w, f"{name}.{part}_proj") for part in "qkv")
    out = np.empty_like(x)
    for sequence in range(x.shape[0]):
        for columns in np.split(np.arange(x.shape[-1]), heads):
            out[sequence][:, columns] = attend(*(part[sequence][:, columns] for part in (q, k, v)))
    return linear(out, w, f"{name}.out_proj")


def forward(ids: Array, w: Weights, config: transformer.Config) -> Array:
    """The logits in float64; dropout is an identity here."""
    x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]
    for n in range(config.layers):
        normed = normalise(x, w, f"layer{n}.ln1")
        x = x + attention(normed, w, f"layer{n}.attn", config.heads)
        hidden = linear(normalise(x, w, f"layer{n}.ln2"), w, f"layer{n}.mlp.fc1")
        hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        x = x + linear(hidden, w, f"layer{n}.mlp.fc2")
    head = w["wte.weight"].T if config.tied_head else w["lm_head.weight"]
    return normalise(x, w, "ln_f") @ head


def cross_entropy(logits: Array, labels: Array, ignored: int) -> float:
    peak = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - peak).sum(-1)) + peak[..., 0]
    kept = labels != ignored
    picked = np.take_along_axis(logits, np.where(kept, labels, 0)[..., None], -1)[..., 0]
    return float((log_sum - picked)[kept].mean())


# float32 has a unit of 2^-24 = 6e-8. The longest sum has 96 terms (sqrt(96) * 6e-8 = 6e-7), about
# ten products follow one another, and each LayerNormalization divides by a deviation of 0.02 to 1
# what was added at that scale: 2e-5 of the largest logit leaves a factor of three.
RTOL = 2e-5

FORMS = {
    "plain": {},
    "fused_qkv": {"fused_qkv": True},
    "merged_heads": {"merged_heads": True},
    "tied_head": {"tied_head": True},
    "narrow_ffn": {"ffn": 10},
    "dropout": {"dropout": 0.5},
    "all": {"fused_qkv": True, "merged_heads": True, "tied_head": True, "dropout": 0.1},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (3, 11)])
def test_logits_equal_numpy(form: str, batch: int, seq: int) -> None:
    config = transformer.replace(SMALL, **FORMS[form])
    model = transformer.build(config)
    ids = np.random.default_rng(batch).integers(0, config.vocab, (batch, seq))
    got = run(model, {"input_ids": ids})["logits"]
    want = forward(ids, weights(model), config)
    assert got.shape == (batch, seq, config.vocab)
    np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * np.abs(want).max())


@pytest.mark.parametrize("ignore_index", [-100, 5])
def test_loss_is_the_mean_over_the_labels_kept(ignore_index: int) -> None:
    config = transformer.replace(SMALL, loss=True, ignore_index=ignore_index)
    model = transformer.build(config)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.vocab, (4, 6))
    labels = rng.integers(0, config.vocab, (4, 6))
    labels[rng.random((4, 6)) < 0.4] = ignore_index
    got = run(model, {"input_ids": ids, "labels": labels})
    want = cross_entropy(forward(ids, weights(model), config), labels, ignore_index)
    assert got["loss"].shape == ()
    # The loss is about log(37) = 3.6, so a relative 2e-6 is some thirty units of float32.
    assert got["loss"] == pytest.approx(want, rel=2e-6)


@pytest.mark.parametrize("form", [*FORMS, "loss"])
def test_every_shape_is_inferred(form: str) -> None:
    options = {"loss": True} if form == "loss" else FORMS[form]
    assert unknown_shapes(transformer.build(transformer.replace(SMALL, **options))) == []


def test_nodes_and_parameters_are_named_by_their_place() -> None:
    model = transformer.build(layers=2, d_model=8, heads=2)
    names = [node.name for node in model.graph]
    assert len(set(names)) == len(names)
    expected = {
        "/wte/Gather",
        "/layer0/ln1/LayerNormalization",
        "/layer0/attn/q_proj/MatMul",
        "/layer1/attn/out_proj/Add",
        "/layer1/mlp/fc1/MatMul",
        "/layer1/mlp/Gelu",
        "/lm_head/MatMul",
    }
    assert expected <= set(names)
    assert {"wte.weight", "wpe.weight", "layer1.attn.v_proj.bias", "ln_f.weight"} <= set(
        model.graph.initializers
    )


def test_only_inputs_and_outputs_carry_symbolic_dims() -> None:
    model = transformer.build(SMALL)
    assert [str(d) for d in model.graph.outputs[0].shape or ()] == ["batch", "seq", "37"]
    inner = [v for node in model.graph for v in node.outputs if not v.is_graph_output()]
    assert all(value.shape is None for value in inner)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers: expected a positive integer, got 0"),
        ({"heads": 3}, "expected a divisor of d_model 64, got 3"),
        ({"dropout": 1.0}, "expected a ratio in"),
        ({"ffn": -1}, "ffn: expected a width"),
        ({"seed": -1}, "seed: expected a non-negative"),
    ],
)
def test_refused_sizes(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transformer.build(**fields)

"""Losses of a sharded training run equal PyTorch's, the same network with the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx_ir as ir
import pytest
import transformer
import two_layer
from numpy.typing import NDArray

from onnxpar_runtime.training.group import TrainerGroup
from tests import training_cases as cases
from tests.training_cases import batch_of, hyper, shard

torch = pytest.importorskip("torch")
functional = torch.nn.functional

Array = NDArray[Any]
Weights = dict[str, Any]
Loss = Callable[[Weights, dict[str, Any]], Any]
STEPS = 20
HEADS = 4
PLACES = 5e-6
"""Half a unit of the fifth decimal. Losses below are about 3, so it is some 20 roundings each."""


def weights_of(model: ir.Model) -> Weights:
    """Returns the model's parameters as leaves of PyTorch."""
    found = {}
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        array = value.const_value.numpy()
        if name.endswith((".weight", ".bias")):
            found[name] = torch.tensor(array.copy(), requires_grad=True)
    return found


def mlp_loss(w: Weights, batch: dict[str, Any]) -> Any:
    hidden = batch["x"].flatten(1)
    for layer in (1, 2):
        hidden = torch.relu(hidden @ w[f"fc{layer}.weight"])
    return functional.cross_entropy(hidden @ w["fc3.weight"], batch["labels"])


def two_layer_loss(w: Weights, batch: dict[str, Any]) -> Any:
    hidden = torch.relu(batch["x"] @ w["matmul1.weight"])
    return functional.mse_loss(hidden @ w["matmul2.weight"], batch["labels"])


def transformer_loss(w: Weights, batch: dict[str, Any]) -> Any:
    ids = batch["input_ids"]
    count, seq = ids.shape

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def heads(x: Any) -> Any:
        return x.view(count, seq, HEADS, -1).transpose(1, 2)

    x = w["wte.weight"][ids] + w["wpe.weight"][:seq]
    for layer in (f"layer{i}" for i in range(2)):
        y = norm(x, f"{layer}.ln1")
        q, k, v = (heads(linear(y, f"{layer}.attn.{part}_proj")) for part in "qkv")
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(x.shape), f"{layer}.attn.out_proj")
        y = functional.gelu(linear(norm(x, f"{layer}.ln2"), f"{layer}.mlp.fc1"))
        x = x + linear(y, f"{layer}.mlp.fc2")
    x = norm(x, "ln_f")
    head = w["lm_head.weight"] if "lm_head.weight" in w else w["wte.weight"].T
    logits = x @ head
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def small_transformer(**fields: Any) -> ir.Model:
    return transformer.build(
        layers=2, d_model=32, heads=HEADS, vocab=40, max_positions=16, **fields
    )


def optimizer_of(kind: str, weights: Weights, lr: float, **settings: float) -> Any:
    """Returns PyTorch's optimizer; weight decay is for matrices only, `shard`'s default."""
    groups = [
        {"params": [w for w in weights.values() if w.ndim > 1]},
        {"params": [w for w in weights.values() if w.ndim <= 1], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr, **settings)
    return torch.optim.SGD(groups, lr, **settings)


def losses_of(
    weights: Weights,
    dtype: Any,
    loss: Loss,
    batches: list[dict[str, Array]],
    clips: list[float | None],
    optimizer: str,
    lr: float,
    **settings: float,
) -> list[float]:
    """Returns the losses of training copies of the weights in a type, a step for each batch."""
    copies = {n: w.detach().clone().to(dtype).requires_grad_() for n, w in weights.items()}
    theirs = optimizer_of(optimizer, copies, lr, **settings)
    found = []
    for batch, clip in zip(batches, clips, strict=True):
        tensors = {n: torch.tensor(a) for n, a in batch.items()}
        theirs.zero_grad()
        value = loss(
            copies, {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        )
        value.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(list(copies.values()), clip)
        theirs.step()
        found.append(value.item())
    return found


@pytest.mark.parametrize(
    ("build", "loss", "strategy", "symbols", "optimizer", "lr", "settings"),
    [
        (mlp.build, mlp_loss, cases.MLP_STRATEGY, {"batch": 16}, "sgd", 0.05, {}),
        pytest.param(
            mlp.build, mlp_loss, "dp=2,tp=2", {"batch": 9}, "adamw", 1e-3, {"weight_decay": 0.1},
            marks=pytest.mark.full,
        ),
        (
            two_layer.build, two_layer_loss, "dp=8", {"batch": 16}, "momentum", 0.05,
            {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.2},
        ),
        pytest.param(
            small_transformer, transformer_loss, "dp=2,tp=4", {"batch": 3, "seq": 7}, "sgd", 0.1,
            {"weight_decay": 0.01}, marks=pytest.mark.full,
        ),
        (
            small_transformer, transformer_loss, "dp=2,tp=2", {"batch": 4, "seq": 16}, "adamw",
            1e-3, {"weight_decay": 0.1},
        ),
        pytest.param(
            lambda: small_transformer(tied_head=True), transformer_loss, "tp=2",
            {"batch": 3, "seq": 9}, "adamw", 1e-3, {}, marks=pytest.mark.full,
        ),
    ],
    ids=["mlp-sgd", "mlp-adamw", "two-momentum", "gpt-sgd", "gpt-adamw", "gpt-tied"],
)  # fmt: skip
def test_losses_of_twenty_steps(
    tmp_path: Path,
    build: Callable[[], ir.Model],
    loss: Loss,
    strategy: str | Path,
    symbols: dict[str, int],
    optimizer: str,
    lr: float,
    settings: dict[str, float],
) -> None:
    model = build()
    weights = weights_of(model)
    kind = "mse" if loss is two_layer_loss else cases.CROSS_ENTROPY
    ranks = shard(tmp_path / "a", model, strategy, optimizer=optimizer, loss=kind)
    rng = np.random.default_rng(1)
    turns = [batch_of(ranks, rng, **symbols) for _ in range(3)]
    batches = [turns[step % len(turns)] for step in range(1, STEPS + 1)]
    clips = [0.7 if step > STEPS // 2 else None for step in range(1, STEPS + 1)]
    expected, exact = (
        losses_of(weights, dtype, loss, batches, clips, optimizer, lr, **settings)
        for dtype in (torch.float32, torch.float64)
    )
    # AdamW steps as far along a gradient that is rounding alone as along any other. What that comes
    # to PyTorch's own losses tell; ours round in another order, and may be as far the other way.
    places = max(PLACES, 2 * np.abs(np.subtract(expected, exact)).max())
    assert places < 4 * PLACES
    got = []
    with TrainerGroup(ranks) as group:
        trained = group.manifest.trained().states.values()
        assert {s.parameter for s in trained} == set(weights)
        for step, (batch, clip) in enumerate(zip(batches, clips, strict=True), 1):
            scalars = hyper(optimizer, step, lr, clip_norm=clip, **settings)
            got.append(group.train_step([batch], scalars).loss)
        np.testing.assert_allclose(got, expected, rtol=0, atol=places)
        # It has learnt something, so that a step that does nothing would be seen.
        assert got[-1] < got[0] - 0.05

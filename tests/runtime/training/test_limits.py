"""Limits of rounding in a step: never below the effect of noise, and not far above it."""

from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxpar_format.options import Settings
from onnxpar_runtime.training import limits
from onnxpar_runtime.training.hyper import hyperparameters

Array = NDArray[np.float64]
UNIT = 2.0**-52
SIZES = np.array([0.0, 1e-12, 1e-9, 1e-8, 3e-8, 1e-7, 1e-5, 1e-3, 1.0, 10.0])
"""Gradients from zero to far above the noise."""
NOISE = 2e-8
KINDS = ("sgd", "momentum", "adam", "adamw", "lamb")


def step(
    kind: str, p: Array, m: Array, v: Array, g: Array, h: dict[str, float]
) -> tuple[Array, Array, Array]:
    """One step by the formulas of PyTorch and You et al., in float64."""
    if kind in ("sgd", "momentum", "adam"):
        g = g + h["weight_decay"] * p
    if kind == "sgd":
        return p - h["lr"] * g, m, v
    if kind == "momentum":
        m = g if h["momentum_first"] else h["momentum"] * m + (1 - h["dampening"]) * g
        return p - h["lr"] * m, m, v
    m = h["beta1"] * m + h["beta1_complement"] * g
    v = h["beta2"] * v + h["beta2_complement"] * g * g
    direction = h["lr_corrected"] / h["lr"] * m / (np.sqrt(v) / h["correction2_sqrt"] + h["eps"])
    if kind == "lamb":
        direction = direction + h["weight_decay"] * p
        direction *= np.linalg.norm(p) / np.linalg.norm(direction)
    elif kind == "adamw":
        p = p * h["decay"]
    return p - h["lr"] * direction, m, v


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("seed", range(5))
def test_noise_stays_within(kind: str, before: int, seed: int) -> None:
    """Gradients that differ by at most the noise, in the worst direction and at random."""
    rng = np.random.default_rng([seed, before])
    hyper = hyperparameters(kind, Settings(weight_decay=0.01))
    p = rng.standard_normal(SIZES.shape)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for number in range(1, before + 1):
        p, m, v = step(kind, p, m, v, SIZES * rng.standard_normal(p.shape), hyper.at(number, 1e-3))
    h, number = hyper.at(before + 1, 1e-3), before + 1
    g = SIZES * rng.standard_normal(p.shape)
    after, new_m, new_v = step(kind, p, m, v, g, h)
    tensor = limits.Tensor(
        p, after, None if kind == "sgd" else new_m, new_v if "a" in kind[:2] else None
    )
    limit = limits.after_step(kind, NOISE, tensor, h, number, UNIT)
    signs = [np.ones_like(g), -np.ones_like(g), -np.sign(g), rng.choice([-1, 1], g.shape)]
    for sign in (*signs, rng.uniform(-1, 1, g.shape)):
        # A little less than the limit's noise: the limit is reached, and float64 rounds too.
        other = step(kind, p, m, v, g + 0.999 * NOISE * sign, h)
        difference = np.abs(other[0] - after)
        assert (difference <= limit.parameter).all()
        assert (np.abs(other[1] - new_m) <= limit.moment1).all() or kind == "sgd"
        assert (np.abs(other[2] - new_v) <= limit.moment2).all() or tensor.moment2 is None
    # Where gradients are far above the noise a mistake of a thousandth of an update is seen. LAMB's
    # depend on all elements of the tensor, half of which is noise here.
    moved, sure = np.abs(after - p), SIZES >= 1.0
    seen = 0.2 if kind == "lamb" else 1e-3
    assert (np.broadcast_to(limit.parameter, p.shape)[sure] < seen * moved[sure]).all()
    assert (limit.parameter < inf).all()


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_a_gradient_of_nothing_but_noise(kind: str) -> None:
    """Any update of the first step may be either of +lr and -lr: the limit is both together."""
    h = hyperparameters(kind, Settings(eps=0.0)).at(1, 1e-3)
    p, g = np.zeros(3), np.full(3, 1e-9)
    after, m, v = step(kind, p, np.zeros(3), np.zeros(3), g, h)
    limit = limits.after_step(kind, 1e-8, limits.Tensor(p, after, m, v), h, 1, UNIT)
    # A handful of operations in float64.
    np.testing.assert_allclose(limit.parameter, 2e-3, rtol=1e-12)

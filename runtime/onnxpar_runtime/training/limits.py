"""How far two runs of the same step of an optimizer may differ by rounding alone.

Both begin with the same states. Their gradients differ because sums are formed in another order.
This module computes the effect of that difference for each element of a parameter. If an update is
m / sqrt(v), noise in g is divided by sqrt(v); so one limit for a complete tensor would be either
too small for elements whose gradients are noise, or too large to find mistakes in the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

NOISE_ULPS = 4
"""By how many units of rounding of the largest of all gradients any gradient may differ."""
_STATE_ULPS = 4
_CERTAIN = 0.5


@dataclass(frozen=True)
class Tensor:
    """A parameter of the reference around one step, float64, with its moments after the step.

    Attributes:
        before: Its value before the step.
        after: Its value after the step.
        moment1: The velocity or the mean of gradients; None where the optimizer has none.
        moment2: The mean of squared gradients, or None.
    """

    before: Array
    after: Array
    moment1: Array | None = None
    moment2: Array | None = None


@dataclass(frozen=True)
class Limits:
    """The limits of the differences of a parameter and its moments: one, or one per element."""

    parameter: Array
    moment1: Array | float = 0.0
    moment2: Array | float = 0.0


def after_step(
    kind: str, noise: float, tensor: Tensor, hyper: Mapping[str, float], step: int, unit: float
) -> Limits:
    """Returns how much a parameter and its moments may differ after a step.

    For SGD the update is linear in the gradient; for Adam and AdamW (Kingma & Ba, 2015) see
    `_adam`, for LAMB (You et al., 2020) `_lamb`.

    Args:
        kind: The optimizer.
        noise: How much an element of the clipped gradient, which the optimizer reads, may differ.
        tensor: The reference's values.
        hyper: The scalars of the step.
        step: Its number, from 1.
        unit: Unit of rounding of the parameter's type.
    """
    moved = np.abs(tensor.after - tensor.before)
    rounding = _STATE_ULPS * unit * (np.abs(tensor.before) + moved)
    m, v = tensor.moment1, tensor.moment2
    if m is None:
        return Limits(hyper["lr"] * noise + rounding)
    small = _STATE_ULPS * unit * float(np.abs(m).max(initial=0.0))
    if v is None:
        first = (1.0 if hyper["momentum_first"] else 1.0 - hyper["dampening"]) * noise + small
        return Limits(hyper["lr"] * first + rounding, first)
    share1, share2 = hyper["beta1_complement"], hyper["beta2_complement"]
    update, direction = _adam(m, v, noise, hyper, step)
    if kind == "lamb":
        update = _lamb(update, direction, tensor, hyper)
    # The share of g^2 is at most v, so a difference n of g makes share2 (2 |g| n + n^2) at most:
    second = 2 * np.sqrt(share2 * v) * noise + share2 * noise**2 + _STATE_ULPS * unit * v
    return Limits(update + rounding, share1 * noise + small, second)


def of_gradient(rtol: float, scale: float, largest: float, unit: float) -> float:
    """Returns how much a gradient may differ, before the step is shaken.

    A gradient that is zero in exact arithmetic (for example of attention's key bias, which shifts
    all scores of a row equally) is the rest of a sum whose terms cancel. Its error is as large as
    the rounding of the terms, however small the rest is. Here the terms are assumed to be as large
    as the largest gradient of any parameter, which is computed from the same cotangents.

    They may be larger. For the logits z of a gate s = softmax(z), dL/dz = s (g - sum(g s)), where g
    is the product of a cotangent with the result of an expert; and the layers before may amplify
    rounding, such as one that normalises over three rows. How much this matters is measured. By
    backward error (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1) a sum
    of products in another order is the same sum of products with weights that moved by units of
    rounding. Therefore, if this limit does not hold, the undivided program runs with its weights
    moved by as much. Each side of the comparison is the result for weights that moved in this way,
    so the two differ by at most twice the movement, which is added. A network that does not amplify
    rounding gains nothing by this.

    Args:
        rtol: Tolerance of outputs of the type.
        scale: Largest magnitude in the gradient.
        largest: Largest magnitude in any gradient.
        unit: Unit of rounding of the type.
    """
    return rtol * scale + NOISE_ULPS * unit * largest


def of_statistic(rtol: float, scale: float, largest: float, unit: float) -> float:
    """Returns how much a running statistic may differ after a step, before the step is shaken.

    The new statistic is (1 - k) r + k s: the old r is the same on both sides, and s is the mean or
    the variance of a channel's activations x over the batch. If x differs by d, because of the
    order of earlier sums,

        |mean(x + d) - mean(x)| <= max |d|
        |var(x + d) - var(x)|   <= 2 std(x) std(d) + var(d)

    (the second by Cauchy and Schwarz). So s differs as much as activations do, and has their
    tolerance `rtol`, relative to the largest channel. A mean may be the rest of terms that cancel;
    then it differs by the rounding of its terms, as gradients do (`of_gradient`). The terms of a
    statistic as large as L are no larger than about L, or sqrt(L) if it is a variance.

    The size of d does not depend on one layer alone: each normalisation divides by a deviation and
    so amplifies d by its condition, most if the deviation is over few elements. Therefore, if this
    limit does not hold, the undivided program is run as `of_gradient` describes, and the statistics
    may differ by twice the movement of its own statistics.

    Args:
        rtol: Tolerance of outputs of the type.
        scale: Largest magnitude in the statistic.
        largest: Largest magnitude in any running statistic.
        unit: Unit of rounding of the type.
    """
    return rtol * scale + NOISE_ULPS * unit * max(largest, sqrt(largest))


def _adam(
    m: Array, v: Array, noise: float, hyper: Mapping[str, float], step: int
) -> tuple[Array, Array]:
    """Returns the limit of an update of Adam for each element, and the direction r = m^ / s.

    With m^ and v^ the corrected averages and s = sqrt(v^) + eps, the update is lr m^ / s. Noise n
    in this step's gradient moves m^ by at most a = n (1 - beta1) / (1 - beta1^t). sqrt(v^) is a
    weighted 2-norm of the gradients, which by Minkowski's inequality moves by at most
    b = n sqrt((1 - beta2) / (1 - beta2^t)). So if b < s, the direction moves by at most

        |(m^ + a) / (s - b) - m^ / s| = (a + |r| b) / (s - b),

    about n / sqrt(v^). It never moves by more than the sum of both directions, and any direction is
    bounded: by Cauchy-Schwarz |m_t| = |sum a_k g_k| is at most sqrt(sum a_k^2 / b_k) sqrt(v_t),
    where a_k and b_k are the weights of the two averages; in the first step this is sqrt(v_t).
    """
    share1, share2 = hyper["beta1_complement"], hyper["beta2_complement"]
    correction1, root2 = 1.0 - (1.0 - share1) ** step, hyper["correction2_sqrt"]
    scale = np.sqrt(v) / root2 + hyper["eps"]
    direction = (m / correction1) / scale
    size = np.abs(direction)
    a, b = noise * share1 / correction1, noise * sqrt(share2) / root2
    left = scale - b
    certain = left > 0
    apart = np.where(certain, (a + size * b) / np.where(certain, left, 1), inf)
    powers = np.arange(step)
    weights = (share1 * (1 - share1) ** powers) ** 2 / (share2 * (1 - share2) ** powers)
    most = sqrt(float(weights.sum())) * root2 / correction1
    return hyper["lr"] * np.minimum(apart, size + most), direction


def _lamb(update: Array, direction: Array, tensor: Tensor, hyper: Mapping[str, float]) -> Array:
    """Returns the limit of an update of LAMB, lr |p| d / |d|, d = Adam's direction + decay p.

    If d may differ by a large part of its own length, the limit is two complete updates. It is not
    known here whether a parameter decays, so the larger of both limits is taken.
    """
    lr, p = hyper["lr"], tensor.before
    length, moved = float(np.linalg.norm(p)), np.abs(tensor.after - p)
    apart = update / lr
    off = float(np.linalg.norm(apart))
    limits: list[Array] = []
    for decay in (0.0, hyper["weight_decay"]):
        norm = float(np.linalg.norm(direction + decay * p))
        if not length or off > _CERTAIN * norm:
            limits.append(np.full(p.shape, 2 * lr * max(length, 1.0)))
        else:
            # The denominator moves too, by at most half its length, which doubles the limit.
            limits.append(2 * (lr * length / norm * apart + moved * off / norm))
    return np.asarray(np.maximum(limits[0], limits[1]))

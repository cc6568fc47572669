"""Gradients of normalisations over instances, groups of channels, rows and neighbours."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import GradCase
from tests.tiers import covering

# Exact in float32, which attributes are.
EPSILON = 0.125
AFFINE = {"s": "double[4]", "b": "double[4]"}
BY = ["x", "s", "b", "xs", "xb", "sb"]


def instance_norm(torch: Any, x: Any, s: Any, b: Any) -> Any:
    return torch.nn.functional.instance_norm(x, weight=s, bias=b, eps=EPSILON)


@pytest.mark.parametrize("shape", ["double[N,4,6]", "double[N,4,2,3]", "double[2,4,S,2]"])
def test_instance_norm(shape: str) -> None:
    text = f"y = InstanceNormalization<epsilon={EPSILON}>(x, s, b)"
    GradCase(text, {"x": shape, **AFFINE}, instance_norm).check()


@pytest.mark.parametrize("by", BY)
def test_some_operands_of_instance_norm(by: str) -> None:
    text = f"y = InstanceNormalization<epsilon={EPSILON}>(x, s, b)"
    GradCase(text, {"x": "double[N,4,S]", **AFFINE}, instance_norm, by=tuple(by)).check()


def group_norm(groups: int) -> Callable[..., Any]:
    def function(torch: Any, x: Any, s: Any, b: Any) -> Any:
        s, b = (t.repeat_interleave(4 // len(t)) for t in (s, b))
        return torch.nn.functional.group_norm(x, groups, s, b, EPSILON)

    return function


@pytest.mark.parametrize(
    ("opset", "groups", "shape"),
    covering([18, 21], [1, 2, 4], ["double[N,4,3]", "double[N,4,2,3]", "double[2,4,S]"]),
)
def test_group_norm(groups: int, shape: str, opset: int) -> None:
    double = ", stash_type=11" if opset == 21 else ""
    text = f"y = GroupNormalization<num_groups={groups}, epsilon={EPSILON}{double}>(x, s, b)"
    affine = {k: f"double[{4 if opset == 21 else groups}]" for k in "sb"}
    reference = opset == 21  # onnx.reference has one scale a channel in all opsets
    GradCase(
        text, {"x": shape, **affine}, group_norm(groups), opset=opset, reference=reference
    ).check()


@pytest.mark.parametrize("by", BY)
def test_some_operands_of_group_norm(by: str) -> None:
    text = f"y = GroupNormalization<num_groups=2, epsilon={EPSILON}, stash_type=11>(x, s, b)"
    case = {"x": "double[N,4,S]", **AFFINE}
    GradCase(text, case, group_norm(2), by=tuple(by), opset=21).check()


def rms_norm(*dims: int) -> Callable[..., Any]:
    def function(torch: Any, x: Any, s: Any) -> Any:
        return torch.nn.functional.rms_norm(x, dims, s, EPSILON)

    return function


@pytest.mark.parametrize(
    ("axis", "x", "s"),
    [(-1, "double[N,S,6]", "6"), (1, "double[N,3,4]", "3,4"), (0, "double[3,4]", "3,4")],
)
@pytest.mark.parametrize("stash", [1, 11])  # statistics narrower than x are not used
def test_rms_norm(axis: int, x: str, s: str, stash: int) -> None:
    text = f"y = RMSNormalization<axis={axis}, epsilon={EPSILON}, stash_type={stash}>(x, s)"
    operands = {"x": x, "s": f"double[{s}]"}
    GradCase(text, operands, rms_norm(*map(int, s.split(","))), opset=23).check()


@pytest.mark.parametrize("by", ["x", "s"])
def test_some_operands_of_rms_norm(by: str) -> None:
    text = f"y = RMSNormalization<epsilon={EPSILON}, stash_type=11>(x, s)"
    operands = {"x": "double[N,S,6]", "s": "double[6]"}
    GradCase(text, operands, rms_norm(6), opset=23, by=(by,)).check()


@pytest.mark.parametrize("shape", ["double[N,6]", "double[N,S,6]", "double[2,6]"])
def test_onnxruntimes_rms_norm(shape: str) -> None:
    text = f"y = SimplifiedLayerNormalization<epsilon={EPSILON}, stash_type=11>(x, s)"
    GradCase(text, {"x": shape, "s": "double[6]"}, rms_norm(6)).check()


@pytest.mark.parametrize(
    ("axes", "shape"),
    [("[0, 2, 3]", "double[N,4,2,S]"), ("[1]", "double[N,6]"), ("[-1, 0]", "double[N,2,S]")],
)
def test_mean_variance_norm(axes: str, shape: str) -> None:
    over = [int(a) for a in axes.strip("[]").split(",")]

    def function(torch: Any, x: Any) -> Any:
        deviation = x.var(over, keepdim=True, unbiased=False).sqrt()
        return (x - x.mean(over, keepdim=True)) / (deviation + 1e-9)

    GradCase(f"y = MeanVarianceNormalization<axes={axes}>(x)", {"x": shape}, function).check()


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(
    ("axis", "shape"), [(1, "double[N,S,4]"), (-1, "double[N,6]"), (0, "double[4,S]")]
)
def test_lp_norm(p: int, axis: int, shape: str) -> None:
    def function(torch: Any, x: Any) -> Any:
        return torch.nn.functional.normalize(x, p, axis)

    GradCase(
        f"y = LpNormalization<axis={axis}, p={p}>(x)", {"x": shape}, function, reference=False
    ).check()


def test_lp_norm_of_zeros() -> None:
    """PyTorch divides by a least norm of 1e-12 there; the operator says nothing but zero."""
    rows = np.ones((5, 4))
    rows[2] = 0
    case = GradCase(
        "y = LpNormalization(x)", {"x": "double[N,4]"}, data={"x": rows}, reference=False
    )
    assert not case.single["x"][2].any()
    assert np.isfinite(case.single["x"]).all()


@pytest.mark.parametrize(
    ("size", "shape"), [(3, "double[N,4,2]"), (2, "double[N,5,S]"), (5, "double[2,4,2,S]")]
)
def test_lrn(size: int, shape: str) -> None:
    text = f"y = LRN<size={size}, alpha=0.5, beta=0.75, bias=2.0>(x)"

    def function(torch: Any, x: Any) -> Any:
        # ONNX's window begins (size - 1) // 2 channels before, PyTorch's size // 2.
        before = (size - 1) // 2
        rest = [0, 0] * (x.ndim - 2)
        square = torch.nn.functional.pad(x * x, [*rest, before, size - 1 - before])
        total = sum(square[:, i : i + x.shape[1]] for i in range(size))
        return x * (2 + 0.5 / size * total) ** -0.75

    GradCase(text, {"x": shape}, function).check()


@pytest.mark.parametrize(
    ("operator", "x", "skip", "vectors"),
    [
        ("SkipLayerNormalization", "double[N,S,6]", "double[N,S,6]", "gb"),
        ("SkipLayerNormalization", "double[N,S,6]", "double[1,S,6]", "gbc"),
        ("SkipLayerNormalization", "double[N,6]", "double[N,6]", "g"),
        ("SkipSimplifiedLayerNormalization", "double[N,S,6]", "double[N,S,6]", "g"),
        ("SkipSimplifiedLayerNormalization", "double[N,S,6]", "double[1,S,6]", "gc"),
        ("SkipSimplifiedLayerNormalization", "double[2,S,6]", "double[2,S,6]", "g"),
    ],
)
def test_norms_of_a_residual_sum(operator: str, x: str, skip: str, vectors: str) -> None:
    operands = {"x": x, "k": skip, **{v: "double[6]" for v in vectors}}
    centred = operator == "SkipLayerNormalization"
    sum_too = not centred or "b" in vectors
    call = f"com.microsoft.{operator}<epsilon={EPSILON}>({', '.join(operands)})"

    def function(torch: Any, x: Any, k: Any, g: Any, *, b: Any = None, c: Any = 0) -> Any:
        total = x + k + c
        if centred:
            y = torch.nn.functional.layer_norm(total, (6,), g, b, EPSILON)
        else:
            y = torch.nn.functional.rms_norm(total, (6,), g, EPSILON)
        return (y, total) if sum_too else y

    GradCase(f"{'y, , , t' if sum_too else 'y'} = {call}", operands, function).check()

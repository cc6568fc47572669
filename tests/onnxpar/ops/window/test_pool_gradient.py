"""Gradients of the pools, in 1, 2 and 3 dims."""

from typing import Any

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import Data, GradCase, away_from_zero, chosen

_N3 = {"N": 3}


def _distinct(rng: np.random.Generator, shape: list[int]) -> np.ndarray:
    """Numbers of both signs that are far apart, so that no step makes another the maximum."""
    count = int(np.prod(shape))
    return np.asarray(rng.permutation(count).reshape(shape) * 0.1 - count / 30)


def _pool(node: str, x: str, torch: Any = None, data: Data = _distinct, **more: Any) -> GradCase:
    return GradCase(f"y = {node}(x)", {"x": x}, torch, **{"sizes": _N3} | more, data={"x": data})


def _torch(kind: str, *options: Any, **more: Any) -> Any:
    """The pool of PyTorch with these options."""
    return lambda torch, x: getattr(torch.nn.functional, f"{kind}_pool{x.dim() - 2}d")(
        x, *options, **more
    )


MAX_POOL = (
    _pool("MaxPool<kernel_shape=[3], pads=[1,1]>", "double[N,2,6]", _torch("max", 3, 1, 1)),
    _pool("MaxPool<kernel_shape=[2], strides=[2]>", "double[N,2,7]", _torch("max", 2, 2)),
    _pool(
        "MaxPool<kernel_shape=[3,2], strides=[2,1], pads=[1,0,1,0], ceil_mode=1>",
        "double[2,2,6,3]",
        _torch("max", (3, 2), (2, 1), (1, 0), ceil_mode=True),
    ),
    _pool(
        "MaxPool<kernel_shape=[2], dilations=[2], strides=[3]>",
        "double[2,1,11]",
        _torch("max", 2, 3, dilation=2),
    ),
    _pool(
        "MaxPool<kernel_shape=[2,1,2], strides=[2,1,1]>",
        "double[1,1,4,2,3]",
        _torch("max", (2, 1, 2), (2, 1, 1)),
    ),
    _pool('MaxPool<kernel_shape=[3], strides=[2], auto_pad="SAME_UPPER">', "double[N,1,6]"),
)

AVERAGE_POOL = (
    _pool(
        "AveragePool<kernel_shape=[3], pads=[1,1], count_include_pad=1>",
        "double[N,2,6]",
        _torch("avg", 3, 1, 1),
    ),
    _pool(
        "AveragePool<kernel_shape=[3], pads=[1,1]>",
        "double[N,2,5]",
        _torch("avg", 3, 1, 1, count_include_pad=False),
    ),
    _pool("AveragePool<kernel_shape=[2,2], strides=[2,2]>", "double[N,1,4,6]", _torch("avg", 2, 2)),
    _pool("AveragePool<kernel_shape=[2], strides=[3]>", "double[2,1,9]", _torch("avg", 2, 3)),
    _pool(
        "AveragePool<kernel_shape=[3,2], strides=[2,1], pads=[1,0,1,0], ceil_mode=1>",
        "double[2,1,6,3]",
        _torch("avg", (3, 2), (2, 1), (1, 0), ceil_mode=True, count_include_pad=False),
    ),
    _pool("AveragePool<kernel_shape=[2,1,2]>", "double[1,1,3,2,3]"),
)


_AXES = {3: (2,), 4: (2, 3)}

LP_POOL = (
    _pool(
        "LpPool<kernel_shape=[2], strides=[2]>",
        "double[N,2,6]",
        lambda torch, x: torch.nn.functional.lp_pool1d(x, 2, 2, 2),
    ),
    _pool("LpPool<kernel_shape=[3], p=3, pads=[1,1]>", "double[N,1,5]", data=away_from_zero),
    _pool("LpPool<kernel_shape=[2,2], p=1>", "double[2,1,3,4]", data=away_from_zero),
)

GLOBAL_POOL = tuple(
    case
    for shape in ("double[N,2,5]", "double[2,2,3,4]", "double[N,2,S]")
    for case in (
        _pool(
            "GlobalAveragePool",
            shape,
            lambda torch, x: x.mean(_AXES[x.dim()], keepdim=True),
            sizes={"N": 3, "S": 4},
        ),
        _pool(
            "GlobalMaxPool",
            shape,
            lambda torch, x: x.amax(_AXES[x.dim()], keepdim=True),
            sizes={"N": 3, "S": 4},
        ),
    )
)

GLOBAL_LP_POOL = tuple(
    GradCase(
        f"y = GlobalLpPool<p={p}>(x)",
        {"x": shape},
        lambda torch, x, p=p: torch.linalg.vector_norm(x, p, _AXES[x.dim()], keepdim=True),
        _N3,
    )
    for p, shape in ((1, "double[N,2,4]"), (2, "double[2,2,3,2]"), (3, "double[N,1,5]"))
)

_PLACES = np.array([[[0, 3], [4, 7]], [[8, 10], [13, 14]]])

OTHERS = (
    GradCase(
        "y = MaxUnpool<kernel_shape=[2], strides=[2]>(x, i, s)",
        {"x": "double[2,2,2]", "i": "int64[2,2,2]"},
        lambda torch, x, i: (
            torch.zeros(16, dtype=x.dtype).index_add(0, i.flatten(), x.flatten()).reshape(2, 2, 4)
        ),
        data={"i": _PLACES},
        consts={"s": np.array([2, 2, 4])},
    ),
    GradCase(
        "y = Col2Im<strides=[2,1], pads=[1,0,1,0]>(x, i, b)",
        {"x": "double[2,12,6]"},
        consts={"i": np.array([5, 4]), "b": np.array([2, 3])},
    ),
)
_EVERY = (*MAX_POOL, *AVERAGE_POOL, *LP_POOL, *GLOBAL_POOL, *GLOBAL_LP_POOL, *OTHERS)


@pytest.mark.parametrize("case", chosen(_EVERY, 10), ids=str)
def test_pools(case: GradCase) -> None:
    case.check()

"""Gradients of views, Slice and Concat, and Dropout."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import GradCase, shown

NSX = {"x": "double[N,S,4]"}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("target", [(0, -1), (-1, 4), (0, 0, 2, 2), (-1,), (0, 2, -1)], ids=str)
def test_reshape(target: Sequence[int]) -> None:
    sizes = [(5, 3, 4)[i] if n == 0 else n for i, n in enumerate(target)]
    GradCase(
        "y = Reshape(x, s)", NSX, lambda torch, x: x.reshape(sizes), consts={"s": ints(*target)}
    ).check()


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_flatten(axis: int) -> None:
    split = axis % 3

    def torch(torch: Any, x: Any) -> Any:
        return x.reshape(int(np.prod(x.shape[:split])), -1)

    GradCase(f"y = Flatten<axis={axis}>(x)", NSX, torch).check()


@pytest.mark.parametrize("order", [None, [1, 0, 2], [2, 0, 1]], ids=str)
def test_transpose(order: list[int] | None) -> None:
    perm = "" if order is None else f"<perm={order}>"
    GradCase(
        f"y = Transpose{perm}(x)", NSX, lambda torch, x: x.permute(*(order or [2, 1, 0]))
    ).check()


@pytest.mark.parametrize(
    ("nodes", "shape", "consts", "torch"),
    [
        ("Unsqueeze(x, a)", "N,4", (0, 2), lambda torch, x: x[None, :, None]),
        ("Squeeze(x, a)", "N,1,4", (1,), lambda torch, x: x[:, 0]),
        ("Squeeze(x)", "1,6,1,4", None, lambda torch, x: x[0, :, 0]),
        ("Expand(x, a)", "1,4", (5, 4), lambda torch, x: x.expand(5, 4)),
        ("Expand(x, a)", "N,1,4", (3, 1), lambda torch, x: x.expand(5, 3, 4)),
        ("Expand(x, a)", "4", (2, 3, 4), lambda torch, x: x.expand(2, 3, 4)),
        ("Trilu(x)", "N,4,4", None, lambda torch, x: x.triu()),
        ("Trilu<upper=0>(x, a)", "N,4,3", 1, lambda torch, x: x.tril(1)),
    ],
    ids=shown,
)
def test_dims_of_one(
    nodes: str, shape: str, consts: Sequence[int] | int | None, torch: Callable[..., Any]
) -> None:
    GradCase(
        f"y = {nodes}",
        {"x": f"double[{shape}]"},
        torch,
        consts={} if consts is None else {"a": np.array(consts, np.int64)},
    ).check()


def test_a_dim_that_is_one_only_if_the_other_is() -> None:
    """min(7, N) and N are compatible where they are equal, and if the first is 1, so is N."""
    GradCase(
        "a = Slice(x, from, to) s = Shape(x) y = Expand(a, s)",
        {"x": "double[N,4]"},
        lambda _, x: x * 1,
        consts={"from": ints(0), "to": ints(7)},
    ).check()


def test_a_value_that_is_read_twice_under_two_names() -> None:
    GradCase(
        "i = Identity(x)\n s = Mul(i, x)\n y = Exp(s)",
        {"x": "double[N,6]"},
        lambda torch, x: (x * x).exp(),
    ).check()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(axis: int) -> None:
    GradCase(
        f"y = Concat<axis={axis}>(a, b, a)",
        {"a": "double[N,S,4]", "b": "double[N,S,4]"},
        lambda torch, a, b: torch.cat([a, b, a], axis),
    ).check()


@pytest.mark.parametrize("opset", [13, 20])
def test_concat_of_uneven_parts(opset: int) -> None:
    GradCase(
        "y = Concat<axis=1>(a, b)",
        {"a": "double[N,3]", "b": "double[N,1]"},
        lambda torch, a, b: torch.cat([a, b], 1),
        opset=opset,
    ).check()


@pytest.mark.parametrize(
    ("dims", "axis", "pieces"),
    [("N,6", 1, (1, 2, 3)), ("N,6", -1, (2, 2, 2)), ("6,N", 0, (4, 1, 1))],
)
def test_split(dims: str, axis: int, pieces: Sequence[int]) -> None:
    GradCase(
        f"a, b, c = Split<axis={axis}>(x, s)\n d = Exp(a)",
        {"x": f"double[{dims}]"},
        lambda torch, x: (
            *x.split(pieces, axis)[1:],
            x.split(pieces, axis)[0].exp(),
        ),
        consts={"s": ints(*pieces)},
    ).check()


def test_a_piece_that_nobody_reads() -> None:
    GradCase(
        "a, b = Split<num_outputs=2, axis=1>(x)\n c = Floor(b)\n y = Exp(a)",
        {"x": "double[N,6]"},
        lambda torch, x: (x[:, 3:].floor(), x[:, :3].exp()),
    ).check_torch()


SLICES: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]] = [
    ((1,), (5,), (1,), (1,)),
    ((-3,), (100,), (-1,), (1,)),
    ((0,), (5,), (1,), (2,)),
    ((-1,), (-100,), (1,), (-1,)),
    ((5,), (0,), (1,), (-2,)),
    ((1, 1), (3, 6), (0, 1), (1, 3)),
    ((0,), (100,), (0,), (1,)),
]


@pytest.mark.parametrize(("starts", "ends", "axes", "steps"), SLICES, ids=str)
def test_slice(
    starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> None:
    def torch(torch: Any, x: Any) -> Any:
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            taken = range(x.shape[axis])[slice(start, None if end < -6 else end, step)]
            x = x.index_select(axis, torch.tensor(list(taken)))
        return x

    GradCase(
        "y = Slice(x, b, e, a, s)",
        {"x": "double[N,6]"},
        torch,
        consts={"b": ints(*starts), "e": ints(*ends), "a": ints(*axes), "s": ints(*steps)},
    ).check()


END = 2**63 - 1
"""As exporters write "to the end"; -END is "to the beginning"."""


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(0, END, 2), (1, END, 3), (-2, END, 2), (0, -1, 2), (-1, -END, -1), (END, -END, -1)],
)
def test_a_slice_of_a_symbolic_size(start: int, end: int, step: int, size: int) -> None:
    def torch(torch: Any, x: Any) -> Any:
        last = None if end in (END, -END) else end
        taken = list(range(size))[slice(start, last, step)]
        return x.index_select(1, torch.tensor(taken, dtype=torch.int64))

    GradCase(
        "y = Slice(x, b, e, a, s)",
        {"x": "double[N,S,2]"},
        torch,
        sizes={"N": 5, "S": size},
        consts={"b": ints(start), "e": ints(end), "a": ints(1), "s": ints(step)},
    ).check()


@pytest.mark.parametrize("ratio", [None, 0.3])
def test_dropout(ratio: float | None) -> None:
    operands, consts = ("x, , t", {}) if ratio is None else ("x, r, t", {"r": np.float32(ratio)})
    case = GradCase(
        f"y = Dropout({operands})",
        {"x": "double[N,S,4]"},
        consts={**consts, "t": np.array(True)},
    )
    case.check()
    # What was dropped gets no gradient, and what was kept that of its scale.
    weight, scale = case.arrays["onnxpar.weight.y"], 1 / (1 - (ratio or 0.5))
    kept = case.single["x"] / (weight * scale)
    # The ratio is of type float32.
    assert np.all(np.isclose(kept, 0) | np.isclose(kept, 1, rtol=1e-6)) and 0 < kept.mean() < 1


@pytest.mark.parametrize("operands", ["x", "x, r", "x, r, t"])
def test_dropout_that_is_off(operands: str) -> None:
    consts = {"r": np.float32(0.3), "t": np.array(False)}
    GradCase(
        f"y = Dropout({operands})",
        {"x": "double[N,4]"},
        lambda torch, x: x + 0,
        consts={n: c for n, c in consts.items() if n in operands.split(", ")},
    ).check()

"""Gradients of reads and writes at indices."""

from collections.abc import Sequence

import numpy as np
import pytest

from onnxpar.core.errors import ModelError
from tests.onnxpar.ops.gradient_harness import GradCase

ELEMENTS = np.array([[0, 3, 3], [2, 2, 2], [1, 0, 1], [3, 1, 2], [0, 1, 2]])
DISTINCT = np.array([[0, 3, 1], [2, 1, 3], [1, 0, 2], [3, 1, 2], [0, 1, 2]])


def columns(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array(rows, np.int64)


@pytest.mark.parametrize("shape", ["double[N,4]", "double[5,4]"])
def test_gather_elements(shape: str) -> None:
    GradCase(
        "y = GatherElements<axis=1>(d, i)",
        {"d": shape, "i": "int64[N,3]"},
        lambda torch, d, i: d.gather(1, i),
        data={"i": ELEMENTS},
    ).check()


def test_gather_elements_of_a_part_of_the_rows() -> None:
    GradCase(
        "y = GatherElements<axis=-1>(d, i)",
        {"d": "double[N,4]", "i": "int64[2,3]"},
        lambda torch, d, i: d.gather(1, i),
        data={"i": ELEMENTS[:2]},
        reference=False,  # onnx.reference expects all rows
    ).check()


@pytest.mark.parametrize("shape", ["double[N,4]", "double[5,4]"])
@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_elements(reduction: str, shape: str) -> None:
    GradCase(
        f'y = ScatterElements<axis=1, reduction="{reduction}">(d, i, u)',
        {"d": shape, "i": "int64[N,3]", "u": "double[N,3]"},
        lambda torch, d, i, u: (
            d.scatter(1, i, u) if reduction == "none" else d.scatter_add(1, i, u)
        ),
        data={"i": DISTINCT if reduction == "none" else ELEMENTS},
    ).check()


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("reduction", ["mul", "max", "min"])
def test_writes_of_other_kinds_are_refused(op: str, reduction: str) -> None:
    case = GradCase(
        f'y = {op}<reduction="{reduction}">(d, i, u)',
        {"d": "double[N,4]", "i": "int64[3,1]", "u": f"double[3,{1 if 'El' in op else 4}]"},
    )
    with pytest.raises(ModelError, match=f"the reduction '{reduction}' has no gradient"):
        _ = case.program


@pytest.mark.parametrize("shape", ["double[N,3,2]", "double[5,3,2]"])
@pytest.mark.parametrize(
    "rows", [[[0, 1], [4, 2], [0, 1], [3, 0]], [[0], [4], [2], [4]]], ids=["two", "one"]
)
def test_gather_nd(shape: str, rows: list[list[int]]) -> None:
    depth = len(rows[0])
    GradCase(
        "y = GatherND(d, i)",
        {"d": shape, "i": f"int64[Q,{depth}]"},
        lambda torch, d, i: d[tuple(i.T)],
        sizes={"N": 5, "Q": 4},
        data={"i": columns(rows)},
    ).check()


@pytest.mark.parametrize("batch", [1, 2])
def test_gather_nd_of_each_of_a_batch(batch: int) -> None:
    shape = ["N", "3"][:batch]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 3, [*[5, 3][:batch], 4, 1])
    GradCase(
        f"y = GatherND<batch_dims={batch}>(d, i)",
        {"d": f"double[{','.join(shape)},3,2]", "i": f"int64[{','.join(shape)},4,1]"},
        lambda torch, d, i: d.gather(batch, i.expand(*i.shape[:-1], 2)),
        data={"i": rows},
        reference=False,  # onnx.reference gives it another shape
    ).check()


@pytest.mark.parametrize("shape", ["double[N,3,2]", "double[5,3,2]"])
@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_nd(reduction: str, shape: str) -> None:
    rows = [[0, 1], [4, 2], [0, 2], [3, 0]]
    if reduction == "add":
        rows[2] = [0, 1]
    GradCase(
        f'y = ScatterND<reduction="{reduction}">(d, i, u)',
        {"d": shape, "i": "int64[Q,2]", "u": "double[Q,2]"},
        lambda torch, d, i, u: d.index_put(tuple(i.T), u, accumulate=reduction == "add"),
        sizes={"N": 5, "Q": 4},
        data={"i": columns(rows)},
    ).check()


ROW_NUMBERS = """
    s = Shape<start=0, end=1>(x)
    n = Squeeze(s)
    r = Range(zero, n, one)
    u = Unsqueeze(r, last)
    i = Concat<axis=-1>(u, p)
"""
NUMBERS = {"zero": np.array(0), "one": np.array(1), "last": np.array([-1])}


def test_one_of_each_row() -> None:
    GradCase(
        f"{ROW_NUMBERS} y = GatherND(x, i)",
        {"x": "double[N,4]", "p": "int64[N,1]"},
        lambda torch, x, p: x.gather(1, p)[:, 0],
        data={"p": ELEMENTS[:, :1]},
        consts=NUMBERS,
        split=5,
    ).check()


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_one_of_each_row_is_written(reduction: str) -> None:
    GradCase(
        f'{ROW_NUMBERS} y = ScatterND<reduction="{reduction}">(x, i, w)',
        {"x": "double[N,4]", "p": "int64[N,1]", "w": "double[N]"},
        data={"p": ELEMENTS[:, :1]},
        consts=NUMBERS,
        split=5,
    ).check()

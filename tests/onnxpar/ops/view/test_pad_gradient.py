"""Gradients of Pad and Tile."""

from typing import Any

import numpy as np
import pytest

from onnxpar.core.errors import ModelError
from tests.onnxpar.ops.gradient_harness import GradCase
from tests.tiers import covering


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("pads", "torch"),
    [
        ((0, 1, 0, 0, 2, 1), lambda torch, x: torch.nn.functional.pad(x, (0, 1, 1, 2))),
        ((1, 0, 2, 0, 0, 0), lambda torch, x: torch.nn.functional.pad(x, (2, 0, 0, 0, 1, 0))),
        ((0, -1, 2, 0, 1, -1), lambda torch, x: torch.nn.functional.pad(x, (2, -1, -1, 1))),
        ((0, 0, 0, 0, 0, 0), None),
    ],
)
def test_border_of_a_constant(pads: tuple[int, ...], torch: Any) -> None:
    GradCase(
        "y = Pad(x, p)",
        {"x": "double[N,S,4]"},
        torch,
        consts={"p": ints(*pads)},
        reference=False,  # onnx.reference takes no negative pads
    ).check()


@pytest.mark.parametrize("shape", ["double[N,6]", "double[5,6]"])
def test_the_border_is_differentiated_by(shape: str) -> None:
    GradCase(
        "y = Pad(x, p, c)",
        {"x": shape, "c": "double"},
        consts={"p": ints(0, 2, 0, 1)},
    ).check()


def test_chosen_axes() -> None:
    GradCase(
        "y = Pad(x, p, , a)",
        {"x": "double[N,3,4]"},
        consts={"p": ints(1, 2), "a": ints(-1)},
    ).check()


MULTIPLE = """f = Shape<start=1, end=2>(x)
n = Neg(f)
m = Mod(n, k)
p = Concat<axis=0>({ends})
y = Pad(x, p, {border}, a)"""
"""Up to a multiple of k, as what works on windows does."""


@pytest.mark.parametrize(
    ("ends", "border", "size"),
    covering(
        [("z, m", (0, 1)), ("m, z", (1, 0)), ("m, m", (1, 1))],
        ["", "c"],
        [3, 4, 6],
    ),
)
def test_a_border_that_is_computed(
    ends: tuple[str, tuple[int, int]], border: str, size: int
) -> None:
    where, more = ends

    def torch(torch: Any, x: Any, c: Any = 0.0) -> Any:
        before, after = (-size % 4 * n for n in more)
        ends = [torch.ones(5, n, 2, dtype=x.dtype) * c for n in (before, after)]
        return torch.cat([ends[0], x, ends[1]], 1)

    GradCase(
        MULTIPLE.format(ends=where, border=border),
        {"x": "double[N,S,2]"} | ({"c": "double"} if border else {}),
        torch,
        sizes={"N": 5, "S": size},
        consts={"k": ints(4), "z": ints(0), "a": ints(1)},
        split=4,
    ).check()


def test_a_border_that_may_be_cut_is_refused() -> None:
    case = GradCase(
        "f = Shape<start=1, end=2>(x)\n m = Sub(f, k)\n p = Concat<axis=0>(z, m)\n"
        "y = Pad(x, p, , a)",
        {"x": "double[N,S,2]"},
        consts={"k": ints(4), "z": ints(0), "a": ints(1)},
    )
    with pytest.raises(
        ModelError,
        match=r"whether elements are added or removed, got 0 and S - "
        r"4 along",
    ):
        _ = case.program


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("shape", ["double[N,4,3]", "double[4,4,3]"])
def test_borders_that_are_copied(mode: str, shape: str) -> None:
    GradCase(
        f'y = Pad<mode="{mode}">(x, p)',
        {"x": shape},
        consts={"p": ints(0, 2, 1, 0, 1, 2)},
    ).check()


def test_a_copied_border_of_unknown_width_is_refused() -> None:
    case = GradCase(
        'y = Pad<mode="edge">(x, p)', {"x": "double[N,3]"}, consts={"p": ints(1, 0, 0, 0)}
    )
    with pytest.raises(ModelError, match="needs a constant size"):
        _ = case.program


@pytest.mark.parametrize(
    ("shape", "repeats"),
    [
        ("double[N,3]", (1, 4)),
        ("double[N,S,4]", (2, 1, 3)),
        ("double[N,1]", (3, 5)),
        ("double[3,2]", (2, 2)),
        ("double[3,2]", (1, 1)),
    ],
)
def test_tile(shape: str, repeats: tuple[int, ...]) -> None:
    GradCase(
        "y = Tile(x, r)",
        {"x": shape},
        lambda torch, x: x.tile(repeats),
        consts={"r": ints(*repeats)},
    ).check()

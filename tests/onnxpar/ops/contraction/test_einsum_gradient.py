"""Gradients of Einsum."""

import pytest

from onnxpar.core.errors import ModelError
from tests.onnxpar.ops.gradient_harness import GradCase


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", ["N,4", "4,3"]),
        ("ij,jk->ik", ["5,S", "S,3"]),
        ("bhqd,bhkd->bhqk", ["N,2,3,2", "N,2,S,2"]),
        ("ij,jk,kl->il", ["N,2", "2,3", "3,2"]),
        ("i,j->ij", ["N", "4"]),
        ("i,i->", ["6", "6"]),
        ("ij,j->", ["N,3", "3"]),
        ("ij->", ["N,3"]),
        ("ijk->kj", ["N,3,2"]),
        ("ijk,il->l", ["N,3,2", "N,2"]),
        ("ij,->ji", ["N,3", ""]),
        ("aB,Bc", ["N,3", "3,4"]),
        # An ellipsis, and dims that are broadcast.
        ("...ij,...jk->...ik", ["N,1,2,3", "1,2,3,2"]),
        ("...ij,...jk->...ik", ["1,3,2", "N,2,2"]),
        ("i...,i...->...", ["3,N,2", "3,1,2"]),
        ("i...->...i", ["N,2,3"]),
    ],
)
def test_every_operand(equation: str, shapes: list[str]) -> None:
    names = "xyz"[: len(shapes)]
    GradCase(
        f'r = Einsum<equation="{equation}">({", ".join(names)})',
        {n: f"double[{s}]" if s else "double" for n, s in zip(names, shapes, strict=True)},
        lambda torch, **operands: torch.einsum(equation, *(operands[n] for n in names)),
    ).check()


def test_a_diagonal_is_refused() -> None:
    case = GradCase('r = Einsum<equation="ii->i">(x)', {"x": "double[3,3]"})
    with pytest.raises(ModelError, match="a diagonal has no gradient"):
        _ = case.program

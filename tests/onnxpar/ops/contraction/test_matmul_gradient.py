"""Gradients of MatMul, Gemm and FusedMatMul."""

from typing import Any

import pytest

from tests.onnxpar.ops.gradient_harness import GradCase

MATMUL = [
    ("N,4", "4,6"),
    ("N,S,4", "4,6"),
    ("N,S,4", "N,4,3"),
    ("N,S,4", "1,4,3"),
    ("1,S,4", "N,4,3"),
    ("S,4", "N,4,3"),
    ("N,1,S,4", "2,4,3"),
    ("4", "4"),
    ("4", "4,6"),
    ("N,4", "4"),
    ("4", "N,4,3"),
    ("N,S,4", "4"),
]


@pytest.mark.parametrize(("a", "b"), MATMUL)
def test_matmul(a: str, b: str) -> None:
    GradCase(
        "y = MatMul(a, b)",
        {"a": f"double[{a}]", "b": f"double[{b}]"},
        lambda torch, a, b: torch.matmul(a, b),
    ).check()


@pytest.mark.parametrize("by", ["a", "b"])
def test_one_operand(by: str) -> None:
    GradCase("y = MatMul(a, b)", {"a": "double[N,S,4]", "b": "double[4,6]"}, by=[by]).check()


def test_a_matrix_by_itself() -> None:
    GradCase(
        "y = MatMul(a, a)", {"a": "double[N,4,4]"}, lambda torch, a: torch.matmul(a, a)
    ).check()


@pytest.mark.parametrize("c", ["N,6", "6", "1,6", "N,1", "1", "", None])
def test_gemm_bias(c: str | None) -> None:
    inputs = {"a": "double[N,4]", "b": "double[4,6]"}
    if c is not None:
        inputs["c"] = f"double[{c}]" if c else "double"
    GradCase(
        f"y = Gemm<alpha=0.5, beta=2.0>({', '.join(inputs)})",
        inputs,
        lambda torch, a, b, c=0: 0.5 * (a @ b) + 2 * c,
    ).check()


@pytest.mark.parametrize("ta", [0, 1])
@pytest.mark.parametrize("tb", [0, 1])
def test_gemm_transposes(ta: int, tb: int) -> None:
    def torch(torch: Any, a: Any, b: Any, c: Any) -> Any:
        return 1.5 * ((a.T if ta else a) @ (b.T if tb else b)) + c

    GradCase(
        f"y = Gemm<transA={ta}, transB={tb}, alpha=1.5>(a, b, c)",
        {
            "a": "double[4,N]" if ta else "double[N,4]",
            "b": "double[6,4]" if tb else "double[4,6]",
            "c": "double[6]",
        },
        torch,
    ).check()


@pytest.mark.parametrize("ta", [0, 1])
@pytest.mark.parametrize("tb", [0, 1])
@pytest.mark.parametrize(
    ("a", "b"),
    [(("N", "S", "4"), ("N", "4", "3")), (("N", "S", "4"), ("4", "6")), (("S", "4"), ("4", "6"))],
    ids=str,
)
def test_fused_matmul(a: tuple[str, ...], b: tuple[str, ...], ta: int, tb: int) -> None:
    def operand(dims: tuple[str, ...], turned: int) -> str:
        dims = (*dims[:-2], dims[-1], dims[-2]) if turned else dims
        return f"double[{','.join(dims)}]"

    def torch(torch: Any, a: Any, b: Any) -> Any:
        return 0.5 * torch.matmul(a.mT if ta else a, b.mT if tb else b)

    GradCase(
        f"y = com.microsoft.FusedMatMul<transA={ta}, transB={tb}, alpha=0.5>(a, b)",
        {"a": operand(a, ta), "b": operand(b, tb)},
        torch,
    ).check()

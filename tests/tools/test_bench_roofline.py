"""The roofline of a step: operations from the shapes that onnxruntime's profiler notes."""

import pytest
from roofline import Spent, operations

Shape = list[int]


def event(op: str, inputs: list[Shape], output: Shape) -> dict[str, object]:
    facts = {"op_name": op, "input_type_shape": [{"float": s} for s in inputs]}
    return {"args": facts | {"output_type_shape": [{"float": output}]}}


@pytest.mark.parametrize(
    ("op", "inputs", "output", "multiplied"),
    [
        ("Gemm", [[7, 3], [7, 5], [5]], [3, 5], 7 * 3 * 5),  # transA
        ("MatMul", [[2, 6, 3], [3, 5]], [2, 6, 5], 2 * 6 * 3 * 5),
        ("FusedMatMul", [[2, 4, 6, 3], [2, 4, 5, 3]], [2, 4, 6, 5], 2 * 4 * 6 * 3 * 5),
        ("Conv", [[2, 8, 9, 9], [4, 8, 3, 3]], [2, 4, 7, 7], 2 * 4 * 7 * 7 * 8 * 3 * 3),
        ("Conv", [[2, 8, 9, 9], [8, 1, 3, 3]], [2, 8, 7, 7], 2 * 8 * 7 * 7 * 3 * 3),  # groups
    ],
)
def test_operations(op: str, inputs: list[Shape], output: Shape, multiplied: int) -> None:
    assert operations(event(op, inputs, output)) == pytest.approx(2 * multiplied)


def test_shares_are_those_of_all_operators() -> None:
    spent = Spent({"Gemm": 0.03, "Relu": 0.01}, {"Gemm": 2, "Relu": 1}, 1.5e9)
    first, second = spent.lines("net", 1, 75e9)
    assert first == (
        "net, 1 threads: operators 40.0 ms, products 75.0% at 50.0 GFLOP/s; 50.0% of the rate"
    )
    assert second.split() == ["Relu", "10.00", "ms", "1", "nodes", "25.0%"]

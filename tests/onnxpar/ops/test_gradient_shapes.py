"""Operators whose gradients other tests check at one shape or two, at further shapes."""

from typing import Any

import numpy as np
import pytest

from tests.onnxpar.ops.elementwise.test_elementwise_gradient import UNARY, Torch
from tests.onnxpar.ops.gradient_harness import GradCase

SHAPES = ("2,3,4", "7", "3,1")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", [t for t in UNARY if "=-" not in t and "=0.75" not in t])
def test_elementwise(text: str, shape: str) -> None:
    function, data = UNARY[text]
    given = {} if data is None else {"x": data}
    # Their attributes are of type float32: right to 6e-8 of themselves.
    rtol = 1e-6 if text.startswith(("Hard", "Selu")) else 1e-8
    case = GradCase(f"y = {text}", {"x": f"double[{shape}]"}, function, data=given, rtol=rtol)
    case.check_differences()
    GradCase(
        f"y = {text}", {"x": f"double[{shape}]"}, function, data=given, torch_rtol=rtol
    ).check_torch()


def softmax(name: str) -> Torch:
    return lambda torch, x: getattr(torch.nn.functional, name)(x, dim=-1)


def trilu(upper: int) -> Torch:
    return lambda torch, x: torch.triu(x) if upper else torch.tril(x)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


Row = tuple[str, Torch | None, dict[str, str], dict[str, Any]]


def of_shapes(nodes: str, torch: Torch | None, *shapes: str, **more: Any) -> list[Row]:
    return [(nodes, torch, {"x": f"double[{s}]"}, more) for s in shapes]


def along(axis: int, text: str) -> np.ndarray:
    """Different numbers along an axis, the same along the others."""
    shape = [int(n) for n in text.split(",")]
    return np.indices(shape)[axis]


def gathered(torch: Any, x: Any, i: Any) -> Any:
    return x.gather(1, i)


def scattered(torch: Any, d: Any, i: Any, u: Any) -> Any:
    return d.scatter(1, i, u)


def written(torch: Any, d: Any, i: Any, u: Any) -> Any:
    return d.index_put(tuple(i.T), u)


def nll(torch: Any, x: Any, t: Any) -> Any:
    return torch.nn.functional.nll_loss(x, t)


def cross_entropy(torch: Any, x: Any, t: Any) -> Any:
    return torch.nn.functional.cross_entropy(x, t)


def one_hot(torch: Any, x: Any, i: Any) -> Any:
    places = torch.nn.functional.one_hot(i, 3)
    return x[0] + (x[1] - x[0]) * places


def reversed_rows(torch: Any, x: Any) -> Any:
    """Sequences along dim 0 of lengths 2 and 3, one for each place of dim 1."""
    columns = [torch.cat([x[:n, i].flip(0), x[n:, i]]) for i, n in enumerate((2, 3))]
    return torch.stack(columns, 1)


_REVERSE = "y = ReverseSequence<batch_axis=1, time_axis=0>(x, n)"
_DOUBLE_TO_FLOAT = "h = Cast<to=1>(x)\n y = Cast<to=11>(h)"

ROWS: list[Row] = [
    *of_shapes("y = Softmax(x)", softmax("softmax"), *SHAPES),
    *of_shapes("y = LogSoftmax(x)", softmax("log_softmax"), *SHAPES),
    *of_shapes("y = Flatten(x)", lambda torch, x: x.reshape(x.shape[0], -1), "2,3,4", "5,1", "3"),
    *of_shapes("y = Transpose(x)", lambda torch, x: x.permute(*range(x.ndim)[::-1]), *SHAPES),
    *of_shapes(
        "y = Reshape(x, s)",
        lambda torch, x: x.reshape(3, -1),
        *("2,3,4", "6", "3,1,5"),
        consts={"s": ints(3, -1)},
    ),
    *of_shapes(
        "y = Slice(x, s, e, a)",
        lambda torch, x: x[1:3],
        *("4,2", "3", "5,1,2"),
        consts={"s": ints(1), "e": ints(3), "a": ints(0)},
    ),
    *of_shapes(
        "a, b = Split<axis=0>(x, s)",
        lambda torch, x: x.split([1, 2]),
        *("3,2", "3", "3,1,2"),
        consts={"s": ints(1, 2)},
    ),
    *of_shapes(
        "y, i = TopK<axis=0>(x, k)",
        lambda torch, x: x.topk(2, 0).values,
        *("4,2", "5", "3,1,2"),
        consts={"k": ints(2)},
    ),
    *of_shapes("y = Trilu(x)", trilu(1), "3,4", "2,3,3", "4,1"),
    *of_shapes("y = Trilu<upper=0>(x)", trilu(0), "3,4", "2,3,3", "4,1"),
    *of_shapes("y = Dropout(x)", lambda torch, x: x + 0, *SHAPES),
    *of_shapes("y = CastLike(x, x)", lambda torch, x: x + 0, *SHAPES),
    *of_shapes(
        "y = CumSum(x, a)",
        lambda torch, x: x.cumsum(0),
        *SHAPES,
        consts={"a": np.array(0)},
    ),
    *of_shapes(
        "y = CumProd(x, a)",
        lambda torch, x: x.cumprod(0),
        *SHAPES,
        consts={"a": np.array(0)},
        opset=26,
    ),
    *of_shapes(_REVERSE, reversed_rows, "3,2", "4,2,3", "3,2,1,2", consts={"n": ints(2, 3)}),
    *(
        (
            "y = GatherElements<axis=1>(x, i)",
            gathered,
            {"x": f"double[{x}]", "i": f"int64[{i}]"},
            {},
        )
        for x, i in (("2,3", "2,4"), ("3,4,2", "3,2,2"), ("1,3", "1,1"))
    ),
    *(
        (
            "y = ScatterElements<axis=1>(d, i, u)",
            scattered,
            {"d": f"double[{d}]", "i": f"int64[{i}]", "u": f"double[{i}]"},
            {"data": {"i": along(1, i)}},
        )
        for d, i in (("2,3", "2,2"), ("3,4,2", "3,3,2"), ("1,3", "1,1"))
    ),
    *(
        (
            "y = ScatterND(d, i, u)",
            written,
            {"d": f"double[{d}]", "i": "int64[2,1]", "u": f"double[2{rest}]"},
            {"data": {"i": np.array([[2], [0]])}},
        )
        for d, rest in (("3", ""), ("4,2", ",2"), ("3,2,2", ",2,2"))
    ),
    *(
        (f"y = {name}(x, t)", function, {"x": f"double[{x}]", "t": f"int64[{t}]"}, {})
        for name, function in (
            ("NegativeLogLikelihoodLoss", nll),
            ("SoftmaxCrossEntropyLoss", cross_entropy),
        )
        for x, t in (("4,3", "4"), ("2,3,4", "2,4"), ("1,3,2,2", "1,2,2"))
    ),
    *(
        (
            "y = OneHot(i, n, x)",
            one_hot,
            {"x": "double[2]", "i": f"int64[{i}]"},
            {"consts": {"n": np.array(3)}},
        )
        for i in ("4", "2,3", "1,2,2")
    ),
    *(
        (
            f"y = {name}(a, b)",
            function,
            {"a": f"double[{a}]", "b": f"double[{b}]"},
            {},
        )
        for name, function in (
            ("Min", lambda torch, a, b: torch.minimum(a, b)),
            ("Max", lambda torch, a, b: torch.maximum(a, b)),
            ("Mod<fmod=1>", lambda torch, a, b: a.fmod(b)),
        )
        for a, b in (("2,3,4", "3,1"), ("7", "7"), ("3,1", "1,4"))
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r[0]}|{','.join(r[2].values())}")
def test_operator(row: Row) -> None:
    nodes, torch, inputs, more = row
    case = GradCase(nodes, inputs, torch, **more)
    case.check_program()
    case.check_differences()
    case.check_torch()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "nodes", [_DOUBLE_TO_FLOAT, "h = Cast<to=1>(x)\n c = Celu(h)\n y = Cast<to=11>(c)"]
)
def test_in_float32(nodes: str, shape: str) -> None:
    """What onnx.reference has in float32 alone, or rounds to it: PyTorch is the measure."""
    function = (lambda torch, x: torch.nn.functional.celu(x)) if "Celu" in nodes else (
        lambda torch, x: x + 0
    )  # fmt: skip
    case = GradCase(nodes, {"x": f"double[{shape}]"}, function, torch_rtol=1e-6)
    case.check_program()
    case.check_torch()

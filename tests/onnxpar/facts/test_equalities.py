"""Which sizes rules take to be equal without a proof."""

import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.core.symbols import Symbol, dim_symbol
from onnxpar.facts.equalities import Equality, assumed_equalities


def equalities(text: str, constraints: dict[str, Symbol] | None = None) -> tuple[Equality, ...]:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> g {text}')
    analysed = analyse(ir.from_proto(proto), constraints or {})
    return assumed_equalities(analysed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(float[m, k] a, float[k, n] b) => (float[m, n] y) { y = MatMul(a, b) }", []),
        ("(float[m, k] a, float[j, n] b) => (float[m, n] y) { y = MatMul(a, b) }", ["k = j"]),
        (
            "(float[m, k] a, float[j, n] b) => (float[m, n] y) "
            "{ c = MatMul(a, b) d = MatMul(a, b) y = Add(c, d) }",
            ["k = j"],
        ),
        (
            "(float[b, 2, s] a, float[c, 2, t] b) => (float[x, 4, y] y) "
            "{ y = Concat<axis = 1>(a, b) }",
            ["b = c", "s = t"],
        ),
        # One of them may be 1 when the model runs, so nothing is taken to be equal.
        ("(float[m] a, float[n] b) => (float[m] y) { y = Add(a, b) }", []),
        (
            "(float[m, 3] a, int64[n] t) => (float l) "
            "{ d = Concat<axis = 0>(a, a) l = SoftmaxCrossEntropyLoss(d, t) }",
            ["2*m = n"],
        ),
        # The number of non-zeros is known to nobody before the run.
        (
            "(float[m] a, float[j, k] b) => (float[1, k] y) "
            "{ i = NonZero(a) r = Cast<to = 1>(i) y = MatMul(r, b) }",
            [],
        ),
    ],
)
def test_pairs(text: str, expected: list[str]) -> None:
    assert [f"{e.left.size} = {e.right.size}" for e in equalities(text)] == expected


def test_what_is_proved_is_not_assumed() -> None:
    text = "(float[m, k] a, float[j, n] b) => (float[m, n] y) { [mm] y = MatMul(a, b) }"
    one = Symbol(unique=True)
    assert equalities(text, {"k": one, "j": one}) == ()
    (found,) = equalities(text)
    assert (found.node, found.op_type) == ("mm", "MatMul")
    assert (found.left.value, found.left.dim, found.left.size) == ("a", 1, dim_symbol("k"))
    assert (found.right.value, found.right.dim) == ("b", 0)

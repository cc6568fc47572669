"""Which prices grow faster than in proportion to a symbol, and what sizes are large."""

from collections.abc import Callable

import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.core.symbols import Symbol
from onnxpar.cost.growth import Sizes, grows_faster, large_sizes
from onnxpar.facts.program import Program


def program(**constraints: str) -> Program:
    text = """
        <ir_version: 11, opset_import: ["" : 23]>
        g (float[batch, seq] x) => (float[batch, seq] y) { y = Relu(x) }
    """
    symbols = {name: Symbol.parse(text) for name, text in constraints.items()}
    return analyse(ir.from_proto(onnx.parser.parse_model(text)), symbols)


def at(sizes: Sizes) -> tuple[int, int]:
    return sizes.get("batch", 64), sizes.get("seq", 64)


@pytest.mark.parametrize(
    ("price", "symbols"),
    [
        (lambda b, s: 0.0, ()),
        (lambda b, s: 1e9, ()),
        (lambda b, s: 3.0 * b * s, ()),
        # A shard of 3 devices is rounded up.
        (lambda b, s: 4.0 * -(-b // 3) * -(-s // 3), ()),
        (lambda b, s: 64.0 * b * s * s, ("seq",)),
        (lambda b, s: 1000.0 * b * s + s * s, ()),
        (lambda b, s: 100.0 * b * s + b * s * s, ("seq",)),
        (lambda b, s: 1e3 * b * b * s * s, ("batch", "seq")),
    ],
)
def test_what_grows_faster_than_in_proportion(
    price: Callable[[int, int], float], symbols: tuple[str, ...]
) -> None:
    made = program()
    large = large_sizes(made)
    assert large == {"batch": 1024, "seq": 1024}
    assert grows_faster(lambda sizes: price(*at(sizes)), made.env.table, large) == symbols


def test_large_sizes_are_admissible() -> None:
    assert large_sizes(program(batch="max=100", seq="divisor=48")) == {"batch": 100, "seq": 1536}


def test_a_symbol_with_one_size_does_not_grow() -> None:
    made = program(seq="min=60,max=70,divisor=32")
    large = large_sizes(made)
    assert large == {"batch": 1024, "seq": 64}
    assert grows_faster(lambda sizes: float(at(sizes)[1] ** 2), made.env.table, large) == ()

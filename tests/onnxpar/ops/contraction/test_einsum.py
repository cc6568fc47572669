"""Equations as rules, and equations that are refused."""

from collections.abc import Sequence

import onnx_ir as ir
import pytest

from onnxpar.core.errors import ModelError
from onnxpar.core.rule import format_rule
from onnxpar.core.symbols import SymbolTable, as_dim
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.contraction.einsum import einsum_rule, read_equation


def view(equation: str, *shapes: Sequence[int | str]) -> NodeView:
    """A node with operands of these shapes; the rule reads nothing else."""
    inputs = [ir.Value(name=f"x{i}") for i in range(len(shapes))]
    attributes = ir.convenience.convert_attributes({"equation": equation})
    node = ir.Node("", "Einsum", inputs, attributes, name="sum")
    known = {f"x{i}": tuple(as_dim(d) for d in shape) for i, shape in enumerate(shapes)}
    return NodeView(node, ShapeEnv(known, {}, SymbolTable(())), 20)


@pytest.mark.parametrize(
    ("equation", "shapes", "text"),
    [
        ("ij,jk->ik", [(2, 3), (3, 4)], "i j, j k -> i k; sum: j; linear: sum 0, sum 1"),
        ("ij , jk", [(2, 3), (3, 4)], "i j, j k -> i k; sum: j; linear: sum 0, sum 1"),
        ("ba", [(2, 3)], "b a -> a b; linear: sum 0, max 0, min 0, prod 0"),
        (
            "...i,...i->...",
            [(4, 1, 3), (1, 5, 3)],
            "e0 1 i, 1 e1 i -> e0 e1; sum: i; linear: sum 0, sum 1",
        ),
        ("ii->i", [(3, 3)], "i i_1 -> i; replicated: i i_1; linear: sum 0, max 0, min 0, prod 0"),
        ("ij,j->i", [(2, 1), (1,)], "i 1, 1 -> i; linear: sum 0, sum 1, prod 0+1"),
        ("i,j->ij", [(2,), (3,)], "i, j -> i j; linear: sum 0, sum 1, prod 0+1"),
    ],
)
def test_an_equation_is_a_rule(equation: str, shapes: list[tuple[int, ...]], text: str) -> None:
    assert format_rule(einsum_rule(view(equation, *shapes))) == text


def test_dims_of_an_ellipsis_that_may_be_broadcast_are_replicated() -> None:
    rule = einsum_rule(view("...i,...i->...", ("N", 3), ("M", 3)))
    assert rule.kinds["e0"] == "replicated"
    # Letters are equal by the specification.
    assert einsum_rule(view("ij,ik->i", ("N", 3), ("M", 2))).kinds["i"] == "parallel"


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("ij,jk->ik", [(2, 3)], "expected 1 terms"),
        ("ijk->i", [(2, 3)], "expected terms for operands"),
        ("i->i", [(2, 3)], "expected terms for operands"),
        ("ij->ik", [(2, 3)], "expected distinct labels on the right"),
        ("ij->ii", [(2, 3)], "expected distinct labels on the right"),
        ("i1->i", [(2, 3)], "expected letters"),
        ("...i...->i", [(2, 3)], "expected letters"),
    ],
)
def test_equations_that_do_not_fit_are_refused(
    equation: str, shapes: list[tuple[int, ...]], expected: str
) -> None:
    with pytest.raises(ModelError, match=expected):
        read_equation(view(equation, *shapes))

"""Sizes computed in a rank's graph, and read from a manifest, are those of the expressions."""

import random

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import sympy

from onnxpar.core.mesh import Mesh
from onnxpar.core.symbols import Dim, Symbol, SymbolTable, as_dim, dim_str
from onnxpar.graph.local_builder import SYMBOL_PREFIX, LocalBuilder
from onnxpar_format.expressions import evaluate
from tests.tiers import FULL

TABLE = SymbolTable({"a": Symbol(), "b": Symbol()})
VALUES = [{"a": a, "b": b} for a in (1, 2, 7, 12, 31) for b in (1, 3, 8, 10)]


def computed(sizes: list[Dim], values: dict[str, int]) -> list[int]:
    """The sizes as onnxruntime computes them in a graph."""
    builder = LocalBuilder(TABLE, 20, Mesh.of(dp=2))
    results = [builder.size(size) for size in sizes]
    inputs = list(builder.system_inputs.values())
    # A size that is a constant or a symbol alone is not computed by a node.
    outputs = [builder.op("Identity", value, shape=[1]) for value in results]
    graph = ir.Graph(
        inputs, outputs, nodes=builder.nodes, initializers=builder.initializers,
        opset_imports={"": 20}, name="sizes",
    )  # fmt: skip
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    session = ort.InferenceSession(model.SerializeToString())
    feeds = {
        value.name or "": np.array([values[(value.name or "").removeprefix(SYMBOL_PREFIX)]])
        for value in inputs
    }
    return [int(x[0]) for x in session.run(None, feeds)]


def drawn(draw: random.Random, depth: int) -> str:
    """A random expression, which may be negative."""
    if depth == 0 or draw.random() < 0.15:
        return draw.choice(["a", "b", str(draw.randint(-4, 9))])
    left, right = (drawn(draw, depth - 1) for _ in range(2))
    kind = draw.choice(["+", "-", "*", "//", "%", "min", "max"])
    if kind in ("//", "%"):
        return f"({left}) {kind} {draw.choice([2, 3, 5, -3, 'a', '(b + 1)'])}"
    return f"{kind}({left}, {right})" if kind in ("min", "max") else f"({left}) {kind} ({right})"


@pytest.mark.parametrize("seed", range(20 if FULL else 8))
def test_arithmetic_of_a_graph_and_of_a_manifest(seed: int) -> None:
    draw = random.Random(seed)
    texts = [drawn(draw, 3) for _ in range(12)]
    sizes = [as_dim(text) for text in texts]
    # sympy knows of a product that it is a multiple, Python computes it: one reference for all.
    for values in VALUES[seed % 4 :: 4]:
        expected = [eval(text, {"min": min, "max": max}, dict(values)) for text in texts]
        assert computed(sizes, values) == expected, (texts, values)
        assert [evaluate(dim_str(size), values) for size in sizes] == expected


def test_rounding_down_of_what_may_be_negative() -> None:
    a = sympy.Symbol("a", integer=True, positive=True)
    sizes: list[Dim] = [as_dim(sympy.floor((a - 7) / 4)), as_dim(sympy.ceiling((a - 7) / 4))]
    for value in range(1, 12):
        expected = [(value - 7) // 4, -((7 - value) // 4)]
        assert computed(sizes, {"a": value, "b": 1}) == expected

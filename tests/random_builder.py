"""What random programs are built with: values with symbolic shapes, and nodes that make them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sympy import Mul

from onnxpar.core.symbols import Dim, dim_symbol

Array = NDArray[Any]
OPSET = 20
SYMBOLS = ("batch", "seq")
BOOL, I64, F32, F64 = TensorProto.BOOL, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE
# Elements at batch = seq = 7, above which nothing is built.
LARGEST = 30_000
TYPICAL = {dim_symbol(name): 7 for name in SYMBOLS}


@dataclass(frozen=True)
class Value:
    """A value of the program: its name, global shape and element type.

    Attributes:
        tame: Whether its elements are of moderate size, so that Exp and products are safe.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: int
    tame: bool = True

    @property
    def rank(self) -> int:
        return len(self.shape)


def elements(shape: Sequence[Dim]) -> int:
    """The number of elements of a shape at typical sizes."""
    total: Any = reduce(mul, shape, 1)
    return int(total if isinstance(total, int) else total.subs(TYPICAL))


@dataclass
class Program:
    """Builds a graph node by node; each of the drawing functions below adds a few nodes."""

    draw: random.Random
    float_type: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    count: int = 0

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        made = [self.name("v") for _ in range(outputs)]
        node = helper.make_node(op_type, list(inputs), made, name=self.name("n"), **attributes)
        self.nodes.append(node)
        return made

    def add(self, name: str, shape: Sequence[Dim], dtype: int, *, tame: bool = True) -> Value:
        value = Value(name, tuple(shape), dtype, tame)
        self.values.append(value)
        return value

    def const(self, array: Any, dtype: int = I64) -> str:
        name = self.name("c")
        data = np.asarray(array, helper.tensor_dtype_to_np_dtype(dtype))
        self.initializers.append(numpy_helper.from_array(data, name))
        return name

    def weight(self, shape: Sequence[int], dtype: int | None = None) -> str:
        """A parameter; sometimes one that another node has as well."""
        dtype = dtype or self.float_type
        tied = [t for t in self.initializers if t.name[0] == "w" and tuple(t.dims) == tuple(shape)]
        tied = [t for t in tied if t.data_type == dtype]
        if tied and self.draw.random() < 0.5:
            return self.draw.choice(tied).name
        rng = np.random.default_rng(self.draw.randrange(1 << 30))
        name = self.name("w")
        data = rng.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(dtype))
        self.initializers.append(numpy_helper.from_array(np.asarray(data), name))
        return name

    def pick(self, *types: int, least: int = 0, most: int = 4) -> Value | None:
        """A value of one of the types and a rank in the range; late ones are likelier."""
        found = [v for v in self.values if v.dtype in types and least <= v.rank <= most]
        if not found:
            return None
        return found[max(self.draw.randrange(len(found)) for _ in range(2))]

    def size(self, dim: Dim) -> str:
        """Emits a size as int64 [1], from shapes of values where it is symbolic."""
        if isinstance(dim, int):
            return self.const([dim])
        holders = [
            (v, axis) for v in self.values for axis, size in enumerate(v.shape) if size == dim
        ]
        if holders:
            value, axis = self.draw.choice(holders)
            return self.read_size(value, axis)
        terms = dim.as_ordered_terms()
        if len(terms) > 1:
            parts = [self.size(plain(t)) for t in terms]
            return reduce(lambda a, b: self.op("Add", a, b)[0], parts)
        factors = [plain(f) for f in Mul.make_args(dim)]
        if len(factors) == 1:
            base, exponent = dim.as_base_exp()
            factors = [base] * int(exponent)
        parts = [self.size(f) for f in factors]
        return reduce(lambda a, b: self.op("Mul", a, b)[0], parts)

    def read_size(self, value: Value, axis: int) -> str:
        way = self.draw.randrange(3)
        if way == 0:
            return self.op("Shape", value.name, start=axis, end=axis + 1)[0]
        shape = self.op("Shape", value.name)[0]
        if way == 1:
            return self.op("Gather", shape, self.const([axis]), axis=0)[0]
        scalar = self.op("Gather", shape, self.const(axis), axis=0)[0]
        return self.op("Unsqueeze", scalar, self.const([0]))[0]

    def target(self, dims: Sequence[Dim]) -> str:
        """Emits a shape as int64 [rank]."""
        if not dims:
            return self.const(np.zeros(0))
        if all(isinstance(d, int) for d in dims):
            return self.const(list(dims))
        parts = [self.size(d) for d in dims]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)[0]


def plain(expr: Any) -> Dim:
    return int(expr) if expr.is_Integer else expr


def broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """The common shape, None where there is none for all sizes."""
    result: list[Dim] = []
    for i in range(1, max(len(a), len(b)) + 1):
        x: Dim = a[-i] if i <= len(a) else 1
        y: Dim = b[-i] if i <= len(b) else 1
        if x != y and 1 not in (x, y):
            return None
        result.append(y if x == 1 else x)
    return tuple(reversed(result))


def build(p: Program, ends: Sequence[Value]) -> onnx.ModelProto:
    """The model with these outputs and what they need."""
    needed, nodes = {v.name for v in ends}, []
    for node in reversed(p.nodes):
        if needed & set(node.output):
            nodes.append(node)
            needed |= set(node.input)
    graph = helper.make_graph(
        nodes[::-1],
        "program",
        [_info(v) for v in p.inputs],
        [helper.make_tensor_value_info(v.name, v.dtype, [None] * v.rank) for v in ends],
        [t for t in p.initializers if t.name in needed],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def _info(value: Value) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(
        value.name, value.dtype, [d if isinstance(d, int) else str(d) for d in value.shape]
    )

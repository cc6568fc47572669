"""The elements that inference finds for small tensors are those that onnxruntime computes."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxpar.api.shard_model import analyse
from onnxpar.core.symbols import symbols_of
from onnxpar.graph.shapes import ShapeEnv
from tests.tiers import FULL

HEAD = '<ir_version: 10, opset_import: ["": 20]>\n'
SIZES = ((1, 1), (2, 3), (3, 1), (5, 8), (7, 4), (12, 9), (31, 17))
"""Values of the symbols a and b."""


def run(model: onnx.ModelProto, names: Sequence[str], a: int, b: int) -> list[Any]:
    """Runs a model with more results; every input is zeros."""
    full = onnx.ModelProto()
    full.CopyFrom(model)
    del full.graph.output[:]
    full.graph.output.extend(helper.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        full.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {}
    for value in full.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [{"a": a, "b": b}.get(d.dim_param, d.dim_value) for d in dims]
        feeds[value.name] = np.zeros(shape, np.float32)
    return list(session.run(list(names), feeds))


def check(model: onnx.ModelProto, sizes: Sequence[tuple[int, int]] = SIZES) -> ShapeEnv:
    """Compares all shapes and elements that are known with what onnxruntime computes."""
    env = analyse(ir.from_proto(model), {}).env
    names = [out for node in model.graph.node for out in node.output if out in env.shapes]
    for a, b in sizes:
        values = {"a": a, "b": b}
        for name, got in zip(names, run(model, names, a, b), strict=True):
            for size, length in zip(env.shapes[name], got.shape, strict=True):
                if symbols_of(size) <= {"a", "b"}:
                    assert env.table.evaluate(size, values) == length, (name, size, values)
            for index, item in enumerate(env.contents.get(name, ())):
                if symbols_of(item) <= {"a", "b"}:
                    expected = got.ravel()[index]
                    assert env.table.evaluate(item, values) == expected, (name, item, values)
    return env


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def known(env: ShapeEnv, name: str) -> list[str]:
    """The elements of a value as text; it fails where one is unknown."""
    items = env.contents[name]
    assert all(symbols_of(item) <= {"a", "b"} for item in items), items
    return [str(item) for item in items]


SIZES_OF_X = """
  s = Shape(x)
  one = Constant<value_int = 1>()
  n = Gather(s, one)
  two = Constant<value_int = 2>()
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Div(n, two)", "floor(b/2)"),
        ("c = Constant<value_int = -2>() y = Div(n, c)", "-floor(b/2)"),
        ("m = Neg(n) y = Div(m, two)", "-floor(b/2)"),
        ("m = Mul(n, two) y = Div(m, two)", "b"),
        ("m = Mul(n, two) y = Mod(m, two)", "0"),
        ("y = Mod(n, two)", "Mod(b, 2)"),
        ("m = Add(n, two) y = Max(m, two)", "b + 2"),
        ("y = Min(n, two)", "Min(2, b)"),
        ("m = Sub(n, two) y = Abs(m)", "Max(2 - b, b - 2)"),
        # As PyTorch writes a division of sizes that is rounded down, and up.
        ("f = Cast<to = 1>(n) t = Cast<to = 1>(two) q = Div(f, t) r = Floor(q) y = Cast<to = 7>(r)",
         "floor(b/2)"),
        ("f = Cast<to = 1>(n) t = Constant<value_float = 2.0>() q = Div(f, t) r = Ceil(q) "
         "y = Cast<to = 7>(r)", "floor(b/2 + 1/2)"),
        ("f = Cast<to = 11>(n) t = CastLike(two, f) q = Div(f, t) y = Cast<to = 7>(q)",
         "floor(b/2)"),
        ("f = Cast<to = 1>(n) t = Constant<value_float = 0.5>() q = Mul(f, t) r = Floor(q) "
         "y = Cast<to = 7>(r)", "floor(b/2)"),
        ("t = Constant<value_int = 3>() f = Cast<to = 1>(n) g = Cast<to = 1>(t) q = Div(f, g) "
         "r = Floor(q) y = Cast<to = 7>(r)", "floor(b/3)"),
        ("p = ReduceProd<keepdims = 0>(s) y = Div(p, n)", "4*a"),
        ("p = ReduceMax<keepdims = 0>(s) y = Max(p, n)", "Max(4, a, b)"),
        ("p = ReduceMin<keepdims = 0>(s) y = Identity(p)", "Min(4, a, b)"),
        ("z = Constant<value_int = -1>() c = Equal(n, z) y = Where(c, two, n)", "b"),
        ("z = Constant<value_int = 0>() c = Greater(n, z) d = Not(c) y = Where(d, two, n)", "b"),
        ("c = Equal(s, s) d = Constant<value_ints = [7, 7, 7]>() w = Where(c, s, d) "
         "y = Gather(w, one)", "b"),
        ("i = Range(n, n, one) m = Mul(n, two) e = Add(n, two) r = Range(n, e, one) "
         "y = Gather(r, one)", "b + 1"),
    ],
)  # fmt: skip
def test_arithmetic_of_sizes(body: str, expected: str) -> None:
    text = f"g (float[a, b, 4] x) => (int64 y) {{ {SIZES_OF_X} {body} }}"
    assert known(check(parsed(text)), "y") == [expected]


def test_division_is_towards_zero_whatever_the_sign() -> None:
    text = """g (float[a, b, 4] x) => (int64 y, int64 z, int64 w) {
      s = Shape(x) one = Constant<value_int = 1>() n = Gather(s, one)
      c = Constant<value_int = 7>() m = Sub(n, c) k = Constant<value_int = 3>()
      y = Div(m, k) z = Mod(m, k) w = Mod<fmod = 1>(m, k)
    }"""
    env = check(parsed(text), [(1, b) for b in range(1, 16)])
    assert all(known(env, name) for name in "yzw")


def test_rounded_quotients_of_floats_are_exact() -> None:
    """Kernels divide float32: floor and ceiling of every quotient of these sizes are compared."""
    text = """g (float[a, b, 4] x) => (int64 y, int64 z) {
      s = Shape(x) i = Constant<value_int = 0>() j = Constant<value_int = 1>()
      n = Gather(s, i) m = Gather(s, j) f = Cast<to = 1>(n) g = Cast<to = 1>(m)
      q = Div(f, g) d = Floor(q) u = Ceil(q) y = Cast<to = 7>(d) z = Cast<to = 7>(u)
    }"""
    env = check(parsed(text), [(a, b) for a in (1, 3, 10, 21, 49) for b in (1, 3, 5, 7, 9)])
    assert known(env, "y") == ["floor(a/b)"]
    assert known(env, "z")


def test_what_floats_round_twice_is_not_known() -> None:
    text = """g (float[a, b, 4] x) => (int64 y) {
      s = Shape(x) j = Constant<value_int = 1>() m = Gather(s, j) f = Cast<to = 1>(m)
      three = Constant<value_float = 3.0>() tenth = Constant<value_float = 0.1>()
      q = Div(f, three) p = Mul(q, three) y = Cast<to = 7>(p)
      r = Mul(f, tenth) z = Cast<to = 7>(r)
    }"""
    contents = check(parsed(text)).contents
    assert not {"y", "z"} & set(contents)


def test_elements_of_a_matrix_stay_in_their_places() -> None:
    """The pads that PyTorch's older exporter reverses, of which one is a size."""
    text = """g (float[a, b, 4] x) => (int64[4] y) {
      s = Shape(x) i = Constant<value_ints = [1]>() n = Gather(s, i)
      rest = Constant<value_ints = [5, 6, 7]>() flat = Concat<axis = 0>(n, rest)
      shape = Constant<value_ints = [2, 2]>() m = Reshape(flat, shape)
      first = Constant<value_ints = [0]>() start = Constant<value_ints = [-1]>()
      end = Constant<value_ints = [-9223372036854775807]>()
      r = Slice(m, start, end, first, start) t = Transpose<perm = [1, 0]>(r)
      all = Constant<value_ints = [-1]>() y = Reshape(t, all)
    }"""
    assert known(check(parsed(text)), "y") == ["6", "b", "7", "5"]


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("y = Slice(x, h, far, axis)", "[a, b - floor(b/2), 4]"),
        ("y = Slice(x, zero, h, axis)", "[a, floor(b/2), 4]"),
        ("m = Neg(u) y = Slice(x, m, far, axis)", "[a, Min(b, b), 4]"),
        ("p = Concat<axis = 0>(h, h) y = Pad(x, p, , axis)", "[a, b + 2*floor(b/2), 4]"),
        ("r = Sub(u, h) k = Concat<axis = 0>(h, r) y, z = Split<axis = 1>(x, k)",
         "[a, floor(b/2), 4]"),
        ("k = Concat<axis = 0>(zero, minus, h, two) w = Add(h, h) v = Slice(x, zero, w, axis) "
         "y = Reshape(v, k)", "[a, 4, floor(b/2), 2]"),
    ],
)  # fmt: skip
def test_shapes_that_follow_from_quotients(body: str, shape: str) -> None:
    text = f"""g (float[a, b, 4] x) => (float[i, j, k] y) {{
      s = Shape(x) axis = Constant<value_ints = [1]>() u = Gather(s, axis)
      two = Constant<value_ints = [2]>() zero = Constant<value_ints = [0]>()
      minus = Constant<value_ints = [-1]>()
      far = Constant<value_ints = [9223372036854775807]>()
      h = Div(u, two) {body}
    }}"""
    found = check(parsed(text), [(a, b) for a, b in SIZES if b > 1]).shapes["y"]
    expected = {"[a, Min(b, b), 4]": "[a, b, 4]"}.get(shape, shape)
    assert f"[{', '.join(map(str, found))}]" == expected


# Random programs.


@dataclass
class Program:
    """Integer vectors computed of the shape [a, b, 4], and what is known of each by construction.

    Attributes:
        values: Name -> number of elements, None for a scalar.
        nonzero: Names of values without an element that may be 0.
    """

    draw: random.Random
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    values: dict[str, int | None] = field(default_factory=dict)
    nonzero: list[str] = field(default_factory=list)

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(array), name))
        return name

    def add(self, kind: str, inputs: Sequence[str], length: int | None, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        self.values[name] = length
        return name

    def pick(self, among: Sequence[str] | None = None) -> str:
        return self.draw.choice(list(self.values) if among is None else among)

    def number(self, least: int = -5) -> str:
        value = self.draw.choice([n for n in range(least, 8) if n])
        name = self.constant(np.int64(value))
        return name

    def scalar(self) -> str:
        """A new scalar: one element of a vector, or of the shape itself."""
        vectors = [name for name, length in self.values.items() if length]
        name = self.pick(vectors)
        length = self.values[name]
        assert length is not None
        return self.add("Gather", [name, self.constant(self.draw.randrange(length))], None)

    def binary(self) -> None:
        kind = self.draw.choice(["Add", "Sub", "Mul", "Min", "Max", "Div", "Mod", "Mod"])
        left = self.pick()
        length = self.values[left]
        if kind in ("Div", "Mod"):
            alike = [n for n in self.nonzero if self.values[n] in (length, None)]
            right = self.draw.choice([self.number(), self.pick(alike)])
        else:
            alike = [n for n, m in self.values.items() if m in (length, None)]
            right = self.draw.choice([self.number(), self.pick(alike)])
        if right in self.values and length is None:
            length = self.values[right]
        attributes = {"fmod": 1} if kind == "Mod" and self.draw.random() < 0.3 else {}
        name = self.add(kind, [left, right], length, **attributes)
        if kind in ("Add", "Mul", "Max") and {left, right} <= {*self.nonzero}:
            self.nonzero.append(name)

    def through_floats(self) -> None:
        value = self.pick(self.nonzero)
        wide = self.draw.choice([TensorProto.FLOAT, TensorProto.DOUBLE])
        length = self.values[value]
        left = self.add("Cast", [value], length, to=wide)
        right = self.add("Cast", [self.constant(np.int64(self.draw.randint(1, 6)))], None, to=wide)
        name = self.add("Div", [left, right], length)
        kind = self.draw.choice(["Floor", "Ceil", ""])
        rounded = self.add(kind, [name], length) if kind else name
        self.add("Cast", [rounded], length, to=TensorProto.INT64)
        for inner in {left, right, name, rounded}:
            del self.values[inner]

    def moved(self) -> None:
        kind = self.draw.choice(["Concat", "Slice", "Unsqueeze", "Where", "Reduce", "Neg"])
        name = self.pick()
        length = self.values[name]
        if kind == "Neg":
            self.add(self.draw.choice(["Neg", "Abs"]), [name], length)
        elif kind == "Unsqueeze" and length is None:
            self.add(kind, [name, self.constant(np.array([0]))], 1)
        elif kind == "Where":
            other = self.pick([n for n, m in self.values.items() if m == length])
            compare = self.draw.choice(["Equal", "Less", "GreaterOrEqual"])
            condition = self.add(compare, [name, self.number()], length)
            del self.values[condition]
            self.add(kind, [condition, name, other], length)
        elif kind == "Reduce" and length:
            reduction = self.draw.choice(["ReduceProd", "ReduceMax", "ReduceMin", "ReduceSum"])
            self.add(reduction, [name], None, keepdims=0)
        elif length and length < 8:
            if kind == "Concat":
                vectors = [n for n, m in self.values.items() if m and m < 8]
                other = self.pick(vectors)
                self.add(kind, [name, other], length + (self.values[other] or 0), axis=0)
            elif kind == "Slice":
                start = self.draw.randrange(length)
                step = self.draw.choice([1, 1, 2])
                bounds = [self.constant(np.array([n])) for n in (start, length, 0, step)]
                self.add(kind, [name, *bounds], len(range(start, length, step)))

    def used_as_shape(self) -> None:
        """A tensor of a computed size, reshaped: shapes are compared, not elements alone."""
        size = self.add("Abs", [self.scalar()], None)
        room = self.constant(np.int64(64))
        small = self.add("Mod", [size, room], None)
        target = self.add("Unsqueeze", [small, self.constant(np.array([0]))], 1)
        filled = f"f{len(self.nodes)}"
        self.nodes.append(helper.make_node("ConstantOfShape", [target], [filled], name=filled))
        twice = f"f{len(self.nodes)}"
        self.nodes.append(helper.make_node("Concat", [filled, filled], [twice], name=twice, axis=0))
        shape = self.constant(np.array([2, -1]))
        name = f"f{len(self.nodes)}"
        self.nodes.append(helper.make_node("Reshape", [twice, shape], [name], name=name))

    def model(self) -> onnx.ModelProto:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a", "b", 4])
        last = next(reversed(self.values))
        y = helper.make_tensor_value_info(last, TensorProto.INT64, None)
        graph = helper.make_graph(self.nodes, "g", [x], [y], self.constants)
        return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def random_program(seed: int) -> Program:
    program = Program(random.Random(seed))
    shape = program.add("Shape", ["x"], 3)
    program.nonzero.append(shape)
    for _ in range(2):
        program.nonzero.append(program.scalar())
    steps: Mapping[Callable[[], object], int] = {
        program.binary: 6,
        program.moved: 5,
        program.through_floats: 1,
        program.used_as_shape: 1,
    }
    for _ in range(program.draw.randint(4, 12)):
        program.draw.choices(list(steps), list(steps.values()))[0]()
    return program


SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))


@pytest.mark.parametrize("part", range(40 if FULL else 1))
def test_random_programs(part: int) -> None:
    """Every element found is right at all sizes, and over 90 % of the tensors are found."""
    start = SEED + 1000 * part
    print(f"ONNXPAR_FUZZ_SEED={SEED}")
    found = asked = 0
    for seed in range(start, start + 50):
        program = random_program(seed)
        model = program.model()
        try:
            env = check(model, SIZES if FULL else SIZES[::2])
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for node in model.graph.node:
            name = node.output[0]
            if name in program.values and name in env.shapes and node.op_type != "Where":
                asked += 1
                items = env.contents.get(name)
                found += items is not None and all(symbols_of(x) <= {"a", "b"} for x in items)
    assert found > 0.9 * asked


@pytest.mark.parametrize("cast", ["Cast<to = 1>(n)", "CastLike(n, one)"])
def test_a_range_of_floats_as_long_as_a_size(cast: str) -> None:
    graph = onnx.parser.parse_graph(f"""g (float[a, b] x) => (float[m] y)
        <float zero = {{0.0}}, float one = {{1.0}}, int64 at = {{1}}> {{
            s = Shape(x)  n = Gather(s, at)  f = {cast}  y = Range(zero, f, one) }}""")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    env = analyse(ir.from_proto(model), {}).env
    assert [str(dim) for dim in env.shapes["y"]] == ["b"]

"""The sizes inferred for Slice and ConstantOfShape are those that come out at any symbols."""

from itertools import product

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx_shape_inference import ShapeInferenceContext, _registry, registry

from onnxpar.api.shard_model import analyse
from onnxpar.core.symbols import Dim, Symbol, symbols_of
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.inference import inference
from onnxpar.ops.table import REGISTRY

CORRECTED = inference(REGISTRY).functions
HEAD = '<ir_version: 10, opset_import: ["": 20]>\n'
INT64_MAX, INT32_MAX = 2**63 - 1, 2**31 - 1


def shapes_of(text: str, **constraints: Symbol) -> ShapeEnv:
    return analyse(ir.from_proto(onnx.parser.parse_model(HEAD + text)), constraints).env


def sliced(*bounds: tuple[int, int, int], **constraints: Symbol) -> tuple[ShapeEnv, list[Dim]]:
    """The sizes that slices of a symbolic dim have, one of each (start, end, step)."""
    places = range(len(bounds))
    weights = ", ".join(
        f"int64[1] {name}{i} = {{{bounds[i][at]}}}" for i in places for at, name in enumerate("set")
    )
    env = shapes_of(
        f"""g (float[seq, 4] x) => ({", ".join(f"float[n{i}, 4] y{i}" for i in places)})
        <int64[1] a = {{0}}, {weights}>
        {{ {" ".join(f"y{i} = Slice(x, s{i}, e{i}, a, t{i})" for i in places)} }}""",
        **constraints,
    )
    return env, [env.shapes[f"y{i}"][0] for i in places]


def test_slices_of_a_symbolic_dim() -> None:
    ends = [1, 3, 1000, -1, -3, INT64_MAX, 1 << 40]
    bounds = list(product([0, 1, -1, -3], ends, [1, 3]))
    env, sizes = sliced(*bounds)
    for size, (start, end, step) in zip(sizes, bounds, strict=True):
        for seq in range(1, 9):
            got = env.table.evaluate(size, {"seq": seq})
            assert got == len(range(seq)[start:end:step]), (seq, start, end, step)


@pytest.mark.parametrize(("start", "end"), [(-1, -INT64_MAX), (INT64_MAX, -INT64_MAX)])
def test_slice_that_reverses(start: int, end: int) -> None:
    env, (size,) = sliced((start, end, -1))
    assert env.table.evaluate(size, {"seq": 5}) == 5


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(-1, INT64_MAX, 1), (-1, INT32_MAX, 1), (0, 1, 1), (0, INT64_MAX, "seq")],
)
def test_what_every_size_gives_is_plain(start: int, end: int, expected: Dim) -> None:
    _, (size,) = sliced((start, end, 1))
    assert str(size) == str(expected)


def test_constraints_say_that_an_end_lies_inside() -> None:
    assert sliced((0, 5, 1))[1] != [5]
    assert sliced((0, 5, 1), seq=Symbol(min=5))[1] == [5]


def test_slice_of_a_size_that_depends_on_data_is_not_known() -> None:
    env = shapes_of(
        """g (float[seq] x) => (int64[1, n] y)
        <int64[1] s = {0}, int64[1] e = {1}, int64[1] a = {1}>
        { hits = NonZero(x) y = Slice(hits, s, e, a) }"""
    )
    size = env.shapes["y"][1]
    assert symbols_of(size) and not any(name in env.table for name in symbols_of(size))


def test_constant_of_a_computed_shape() -> None:
    env = shapes_of(
        """g (float[batch, seq, 4] x) => (float[b, s, c] y)
        { shape = Shape(x) y = ConstantOfShape<value = float[1] {2.0}>(shape) }"""
    )
    values = {"batch": 3, "seq": 7}
    assert tuple(env.table.evaluate(d, values) for d in env.shapes["y"]) == (3, 7, 4)


def test_of_two_symbolic_dims_that_are_broadcast_either_may_be_1() -> None:
    env = shapes_of(
        "g (float[a, 3] x, float[b, 3] y) => (float[n, 3] z, float[n, 3] w, float[n, 3] e) "
        "{ z = Add(x, y) c = Less(x, y) w = Where(c, x, y) s = Shape(y) e = Expand(x, s) }"
    )
    for a, b in ((1, 5), (5, 1), (4, 4)):
        for name in "zwe":
            assert env.table.evaluate(env.shapes[name][0], {"a": a, "b": b}) == max(a, b)


def test_a_quotient_that_is_a_number_broadcasts_as_one() -> None:
    env = shapes_of(
        """g (float[batch, 3] x) => (float[n, k, 3] y) <int64[2] rest = {-1, 3}>
        {
            size = Shape<start = 0, end = 1>(x)
            target = Concat<axis = 0>(size, rest)
            tall = Reshape(x, target)
            y = Sub(tall, x)
        }"""
    )
    assert [str(d) for d in env.shapes["tall"]] == ["batch", "1", "3"]
    assert [str(d) for d in env.shapes["y"]] == ["batch", "batch", "3"]


def test_parts_of_sizes_that_are_not_constant_are_not_taken_to_be_equal() -> None:
    text = "g (float[n,6] x, int64[2] s) => (float[n,a] y, float[n,b] z) "
    found = shapes_of(text + "{ y, z = Split <axis=1> (x, s) }").shapes
    sizes = {str(found[name][1]) for name in ("y", "z")}
    assert len(sizes) == 2 and "3" not in sizes


def test_a_size_that_is_expanded_is_still_known() -> None:
    """As `torch.onnx.export` writes the zeros in the place of a convolution's bias."""
    ones = ", ".join(["1"] * 216)
    env = shapes_of(
        f"""g (float[n, 3, 5, 5] x) => (float[n, 8, a, b] y)
        <float[8, 3, 3, 3] w = {{{ones}}}, int64[1] one = {{1}}, float zero = {{0}}>
        {{
          size = Shape<start = 0, end = 1>(w)
          same = Expand(size, one)
          bias = Expand(zero, same)
          y = Conv(x, w, bias)
        }}"""
    )
    assert env.shapes["bias"] == (8,)
    assert env.shapes["y"][1:] == (8, 3, 3)


@pytest.mark.parametrize(
    ("start", "step", "count"), [(0, 1, [3, 8]), (1, 1, [2, 7]), (0, 2, [2, 4]), (0.5, 1, None)]
)
def test_a_range_of_numbers_that_were_sizes(
    start: float, step: float, count: list[int] | None
) -> None:
    """As `torch.arange(x.shape[1], dtype=torch.float32)` is exported."""
    env = shapes_of(
        f"""g (float[seq, 4] x) => (float[n] y)
        <float start = {{{start}}}, float step = {{{step}}}> {{
            f = Shape <start = 0, end = 1> (x)
            n = Squeeze (f)
            limit = Cast <to = 1> (n)
            y = Range (start, limit, step)
        }}"""
    )
    (size,) = env.shapes["y"]
    if count is None:
        assert not isinstance(size, int) and "seq" not in symbols_of(size)
    else:
        assert [env.table.evaluate(size, {"seq": seq}) for seq in (3, 8)] == count


def analysed_slice() -> None:
    text = "g (float[n] x, int64[1] end) => (float[m] y) { y = Slice(x, zero, end) }"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1, np.int64), "zero"))
    analyse(ir.from_proto(proto), {})


def test_the_librarys_own_registry_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others in the process infer with it, while we do and afterwards."""
    registry.collect()
    known = {
        (domain, op_type, version): registry.get(domain, op_type, version)
        for domain, op_type, versions in registry.iter_supported()
        for version in versions
    }
    seen = []
    during = CORRECTED.get

    def watched(domain: str, op_type: str, version: int) -> object:
        seen.append(_registry.registry)
        return during(domain, op_type, version)

    monkeypatch.setattr(CORRECTED, "get", watched)
    analysed_slice()
    assert seen and all(found is registry for found in seen)
    supported = {(d, o, v) for d, o, versions in registry.iter_supported() for v in versions}
    assert supported == set(known)
    assert all(registry.get(*key) is found for key, found in known.items())
    assert CORRECTED.get("", "Slice", 10) is not registry.get("", "Slice", 10)


def test_what_a_user_registers_with_the_library_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever that is: also after a model has been read."""
    analysed_slice()
    for table in ("_registrations", "_cache", "_max_version"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))

    @registry.register("user.domain", "Twice")
    def infer_twice(context: ShapeInferenceContext, node: ir.Node) -> None:
        value = node.inputs[0]
        context.set_shape_and_dtype(node.outputs[0], value.shape, value.dtype)

    text = "g (float[n] x) => (float[m] y) { h = user.domain.Twice(x) y = Relu(h) }"
    head = '<ir_version: 10, opset_import: ["": 20, "user.domain": 1]>'
    found = analyse(ir.from_proto(onnx.parser.parse_model(f"{head} {text}")), {})
    assert str(found.env.shapes["y"]) == "(n,)"

"""`onnxpar.shard`: what it returns computes what the undivided function computes."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import three_blocks
import transformer
import two_layer
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnxscript import opset20 as op
from onnxscript import script

import onnxpar
from onnxpar.core.errors import CallError, ModelError, StrategyError

Array = NDArray[Any]
EIGHT = onnxpar.Layout((2, 2, 2), ("dp", "sp", "mp"))
# Sums of 128 products below 1, added in another order: 128 roundings of 2^-24 of at most 128.
TOLERANCE = 128 * 2.0**-24 * 128


@script()
def dense_relu(x, weight, bias):  # type: ignore[no-untyped-def]
    return op.Relu(op.Add(op.MatMul(x, weight), bias))


def expected(x: Array, weight: Array, bias: Array) -> Array:
    return np.asarray(np.maximum(x.astype(np.float64) @ weight + bias, 0))


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(np.float32)


def close(got: Array, want: Array) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def shards(fn: onnxpar.Sharded, node: str, program: int = 0) -> tuple[list[Any], list[Any]]:
    """The numbers of shards of a node's operands and results."""
    (entry,) = [n for n in fn.programs[program].report["nodes"] if n["name"] == node]
    return tuple([t["strategy"] for t in entry[k]] for k in ("inputs", "outputs"))  # type: ignore[return-value]


def collectives(fn: onnxpar.Sharded, program: int = 0) -> list[str]:
    return [c["op"] for c in fn.programs[program].report["collectives"]]


@pytest.fixture
def sharded() -> Iterator[Callable[..., onnxpar.Sharded]]:
    made: list[onnxpar.Sharded] = []

    def make(*arguments: Any, **named: Any) -> onnxpar.Sharded:
        made.append(onnxpar.shard(*arguments, **named))
        return made[-1]

    yield make
    for fn in made:
        fn.close()


Make = Callable[..., onnxpar.Sharded]


def test_reports_speak_of_dims_by_their_names(sharded: Make) -> None:
    fn = sharded(dense_relu, ((1, 4), (4, 2), None), devices=8)
    x, weight, bias = numbers(32, 128), numbers(128, 10), numbers(10)
    close(fn(x, weight, bias), expected(x, weight, bias))
    sizes = str([c["bytes"] for c in fn.programs[0].report["collectives"]])
    assert "x.0" in sizes and "weight.1" in sizes and "sym__" not in str(fn.programs[0].report)


def test_the_tutorial(sharded: Make) -> None:
    fn = sharded(dense_relu, in_strategy=((4, 2), None, None))
    weight, bias = numbers(128, 10), numbers(10)
    assert fn.devices == 8
    for rows in (32, 64, 8):
        x = numbers(rows, 128)
        close(fn(x, weight, bias), expected(x, weight, bias))
    assert len(fn.programs) == 1
    assert shards(fn, "n0")[0] == [[4, 2], [2, 1]]


def test_sizes_that_do_not_divide_need_a_program_of_their_own(sharded: Make) -> None:
    fn = sharded(dense_relu, ((4, 2), None, None))
    weight, bias = numbers(128, 10), numbers(10)
    for rows, count in ((32, 1), (30, 2), (64, 2), (26, 2), (31, 3), (7, 3), (1, 3)):
        x = numbers(rows, 128)
        close(fn(x, weight, bias), expected(x, weight, bias))
        assert len(fn.programs) == count, rows


def test_sizes_that_are_equal_by_accident_hold_for_calls_alike(sharded: Make) -> None:
    fn = sharded(dense_relu, ((2, 1), None, None), devices=2)
    for rows, inner in ((16, 16), (32, 32), (32, 16), (8, 16)):
        x, weight, bias = numbers(rows, inner), numbers(inner, 16), numbers(16)
        close(fn(x, weight, bias), expected(x, weight, bias))
    assert len(fn.programs) <= 3


def test_another_type_needs_another_program(sharded: Make) -> None:
    fn = sharded(dense_relu, ((2, 1), None, None))
    for dtype in (np.float32, np.float64, np.float32):
        arguments = [a.astype(dtype) for a in (numbers(8, 6), numbers(6, 4), numbers(4))]
        got = fn(*arguments)
        assert got.dtype == dtype
        close(got, expected(*arguments))
    assert len(fn.programs) == 2


@pytest.mark.parametrize(
    "layout",
    [EIGHT("dp", ("sp", "mp")), EIGHT("None", ("mp", "dp")), EIGHT(("dp", "sp"), "None")],
    ids=["two-and-four", "in-another-order", "rows"],
)
def test_layouts_on_sizes_that_change(sharded: Make, layout: Any) -> None:
    fn = sharded(dense_relu, (layout, None, None))
    weight, bias = numbers(24, 10), numbers(10)
    for rows in (16, 8, 5):
        x = numbers(rows, 24)
        close(fn(x, weight, bias), expected(x, weight, bias))
    assert fn.devices == 8
    wanted = [8 if n > 1 else n for n in (1, 1)]
    first = shards(fn, "n0")[0][0]
    assert np.prod(first) in (4, 8) and first != wanted


def test_every_input_derived(sharded: Make) -> None:
    fn = sharded(dense_relu, (None, None, None), devices=4)
    x, weight, bias = numbers(64, 128), numbers(128, 32), numbers(32)
    close(fn(x, weight, bias), expected(x, weight, bias))
    with pytest.raises(
        StrategyError, match="devices: expected a number of ranks, since no strategy"
    ):
        onnxpar.shard(dense_relu, (None, None, None))


def test_the_layout_of_the_output_is_kept_and_makes_a_reduction_scatter(sharded: Make) -> None:
    @script()
    def product(a, b):  # type: ignore[no-untyped-def]
        return op.MatMul(a, b)

    a, b = numbers(16, 24), numbers(24, 8)
    for out, after in (((4, 1), ["ReduceScatter", "AllGather"]), ((2, 1), ["AllReduce"])):
        fn = sharded(product, ((2, 2), (2, 1)), (out,))
        close(fn(a, b), a.astype(np.float64) @ b)
        assert shards(fn, "shard/made/0")[0] == [list(out)]
        assert collectives(fn)[: len(after)] == after


@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_level_is_right(sharded: Make, level: int) -> None:
    fn = sharded(dense_relu, ((2, 1), None, None), None, None, level, devices=4)
    weight, bias = numbers(128, 64), numbers(64)
    for rows in (64, 128):
        x = numbers(rows, 128)
        close(fn(x, weight, bias), expected(x, weight, bias))


def test_the_level_is_what_is_sought(sharded: Make, tmp_path: Path) -> None:
    """For least memory the weights are sharded; for speed they are replicated if rows are many."""
    path = tmp_path / "two.onnx"
    ir.save(two_layer.build(inputs=256, hidden=256, outputs=256), path)
    held = {}
    x = numbers(4096, 256)
    for level in (1, 2):
        fn = sharded(path, (None,), None, None, level, devices=4)
        fn(x)
        weights = [shards(fn, f"/matmul{i}/MatMul")[0][1] for i in (1, 2)]
        held[level] = sum(256 * 256 // int(np.prod(w)) for w in weights)
    assert held[1] < held[2]


def test_each_level_has_a_plan_of_its_own(sharded: Make, tmp_path: Path) -> None:
    """If the rows cannot be sharded four ways, each level finds another plan."""
    path = tmp_path / "two.onnx"
    ir.save(two_layer.build(inputs=512, hidden=512, outputs=512), path)
    x = numbers(34, 512)
    session = onnxruntime.InferenceSession(path)
    expected = session.run(None, {session.get_inputs()[0].name: x})[0]
    found = set()
    for level in (0, 1, 2):
        fn = sharded(path, (None,), None, None, level, devices=4)
        close(fn(x), expected)
        found.add(tuple(str(shards(fn, f"/matmul{i}/MatMul")) for i in (1, 2)))
    assert len(found) == 3


def net(x: Array, blocks: list[int]) -> Array:
    """The blocks of the three-block net, undivided."""
    for block in blocks:
        model = onnxpar.part(three_blocks.build(), f"/block{block}/*")
        session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
        (x,) = session.run(None, {session.get_inputs()[0].name: x})
    return x


def test_blocks_are_sharded_one_by_one(sharded: Make) -> None:
    model = three_blocks.build()
    block1 = sharded(
        onnxpar.part(model, "/block1/*"), ((1, 8),), parameter_plan={"block1.dense2.weight": (8, 1)}
    )
    block2 = sharded(onnxpar.part(model, "/block2/*"), ((8, 1),))
    undivided = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    for rows in (16, 40, 6):
        x = numbers(rows, 32)
        got = net(block2(block1(x)), [3])
        np.testing.assert_allclose(got, undivided.run(None, {"x": x})[0], rtol=0, atol=1e-5)
    assert shards(block1, "/block1/dense1/Gemm")[0][0] == [1, 8]
    assert shards(block1, "/block1/dense2/Gemm")[0][1] == [8, 1]
    assert shards(block2, "/block2/dense1/Gemm")[0][0] == [8, 1]
    assert len(block1.programs) == 1 + 1  # 16 and 40 rows; 6, which 8 does not divide


def test_a_transformer_at_sizes_that_change(sharded: Make) -> None:
    model = transformer.build(layers=1, d_model=32)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    fn = sharded(model, ((1, 2),), ((2, 1, 2),), level=1, devices=4)
    for shape in ((4, 8), (8, 12), (3, 7)):
        tokens = np.random.default_rng(0).integers(0, 50, shape)
        (want,) = session.run(None, {"input_ids": tokens})
        # Logits are sums of 32 products after a few layers of such sums, all below 1.
        np.testing.assert_allclose(fn(tokens), want, rtol=0, atol=1e-5)
    assert len(fn.programs) == 2


def test_functions_of_onnx_ir(sharded: Make) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 20, "own": 1]>
    g (float[n, 6] x) => (float[n, 4] y) { y = own.f (x) }
    <domain: "own", opset_import: ["": 20]>
    f (a, b) => (c, d) { c = MatMul (a, b)
      d = Transpose (c) }
    """
    (function,) = onnx.parser.parse_model(text).functions
    fn = sharded(ir.from_proto(function), ((2, 1), (1, 2)))
    for rows in (6, 8):
        a, b = numbers(rows, 6), numbers(6, 4)
        c, d = fn(b=b, a=a)
        close(c, a.astype(np.float64) @ b)
        close(d, (a.astype(np.float64) @ b).T)


def test_a_constant_that_holds_for_one_size(sharded: Make) -> None:
    @script()
    def heads(x, weight):  # type: ignore[no-untyped-def]
        split = op.Reshape(op.MatMul(x, weight), op.Constant(value_ints=[-1, 4, 3]))
        return op.ReduceSum(split, op.Constant(value_ints=[2]), keepdims=0)

    fn = sharded(heads, ((2, 1), (1, 2)))
    weight = numbers(5, 12)
    for rows in (8, 12):
        x = numbers(rows, 5)
        want = (x.astype(np.float64) @ weight).reshape(-1, 4, 3).sum(2)
        close(fn(x, weight), want)


def test_scalars_and_outputs_that_are_inputs(sharded: Make) -> None:
    @script()
    def scale(x, factor):  # type: ignore[no-untyped-def]
        return op.ReduceSum(op.Mul(x, factor), keepdims=0), x

    fn = sharded(scale, ((2, 2), ()), ((), (4, 1)))
    x = numbers(9, 6)
    total, same = fn(x, np.float32(3))
    assert total.shape == ()
    close(total, np.asarray(3 * x.astype(np.float64).sum()))
    assert np.array_equal(same, x)


# -- slices ----------------------------------------------------------------------------------------


def test_slices_in_and_out(sharded: Make) -> None:
    fn = sharded(
        dense_relu,
        ((2, 2), None, None),
        dataset=("data_parallel", "full_batch", "full_batch"),
        devices=4,
    )
    weight, bias = numbers(128, 10), numbers(10)
    for slices in ([8, 8, 8, 8], [3, 3, 3, 3], [3, 2, 3, 2]):
        x = numbers(sum(slices), 128)
        parts = np.split(x, np.cumsum(slices)[:-1])
        got = fn(parts, weight, bias)
        assert [len(g) for g in got] == slices
        close(np.concatenate(got), expected(x, weight, bias))
    assert shards(fn, "shard/in/x")[1] == [[2, 2]]
    with pytest.raises(CallError, match=r"input 'x': expected shards of \[3, 2, 3, 2\] rows"):
        fn(np.split(numbers(10, 128), [1, 3, 6]), weight, bias)
    with pytest.raises(CallError, match="expected a sequence of 4 shards"):
        fn(x, weight, bias)


def test_slices_of_every_input_and_an_output_with_a_strategy(sharded: Make) -> None:
    fn = sharded(dense_relu, (None, None, None), ((1, 4),), dataset="data_parallel", devices=4)
    x, weight, bias = numbers(16, 24), numbers(24, 8), numbers(8)
    got = fn(np.split(x, 4), np.split(weight, 4), np.split(bias, 4))
    assert [g.shape for g in got] == [(16, 2)] * 4
    close(np.concatenate(got, 1), expected(x, weight, bias))


# -- parts -----------------------------------------------------------------------------------------


def test_a_part_has_what_enters_and_leaves() -> None:
    part = onnxpar.part(three_blocks.build(), "/block1/gelu/*", "/block1/dense2/*", "/block2/*")
    assert [v.name for v in part.graph.inputs] == ["/block1/dense1/Gemm_output_0"]
    assert str(part.graph.inputs[0].shape) == "[batch,32]"
    assert sorted(part.graph.initializers) == [
        f"block{b}.dense{d}.{n}" for b, d in ((1, 2), (2, 1), (2, 2)) for n in ("bias", "weight")
    ]
    onnx.checker.check_model(ir.to_proto(part), full_check=True)


def test_a_part_with_bodies_is_a_model_of_its_own() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 20]>
    g (float[n, 4] x, bool c) => (float[n, 4] y) <float[4] w = {1.0, 2.0, 3.0, 4.0}> {
      [first] a = Relu (x)
      [choice] b = If (c) <
        then_branch = t () => (float[n, 4] p) { [add] p = Add (a, w) },
        else_branch = e () => (float[n, 4] q) { [sub] q = Sub (a, w) }>
      [last] y = Neg (b)
    }
    """
    part = onnxpar.part(onnx.parser.parse_model(text), "choice", "last")
    proto = ir.to_proto(part)
    onnx.checker.check_model(proto, full_check=True)
    assert sorted(v.name for v in proto.graph.input) == ["a", "c"]
    a = numbers(3, 4)
    (y,) = ReferenceEvaluator(proto).run(None, {"a": a, "c": np.array(True)})
    assert np.array_equal(y, -(a + np.float32([1, 2, 3, 4])))


def test_parts_that_are_none() -> None:
    model = three_blocks.build()
    with pytest.raises(ModelError, match="which matches no node; nearest: '/block1/gelu/Gelu'"):
        onnxpar.part(model, "/block1/gelu/Gel")
    with pytest.raises(ModelError, match="expected names or patterns of nodes, got none"):
        onnxpar.part(model)
    with pytest.raises(
        ModelError, match=r"'/block3/dense1/Gemm' \(Gemm\) reads a value that nodes outside"
    ):
        onnxpar.part(model, "/block1/*", "/block3/*")


# -- mistakes --------------------------------------------------------------------------------------

PART = onnxpar.part(three_blocks.build(), "/block1/*")


@pytest.mark.parametrize(
    ("fn", "arguments", "message"),
    [
        (dense_relu, {"in_strategy": ((4, 2),)}, "in_strategy: expected 3 entries for the inputs"),
        (dense_relu, {"in_strategy": 3}, "in_strategy: expected a tuple with an entry for each"),
        (PART, {"in_strategy": ((0, 2),)}, r"in_strategy\[0\], input 'x': expected a number of"),
        (PART, {"in_strategy": (("dp", None),)}, "expected numbers of shards, or a Layout"),
        (PART, {"in_strategy": ((2, 2, 2),)}, r"expected 2 entries for the shape \(batch, 32\)"),
        (PART, {"in_strategy": ((3, 1),), "devices": 8}, r"divides the 8 devices, got 3·1 = 3"),
        (PART, {"in_strategy": ((2, 1),), "level": 3}, "level: expected one of"),
        (PART, {"in_strategy": ((2, 1),), "dataset": "sliced"}, "dataset: expected one of full_b"),
        (PART, {"in_strategy": ((2, 1),), "dataset": ()}, "one for each of the 1 inputs, got 0"),
        (PART, {"in_strategy": (None,), "devices": 0}, "expected from 1 to 65536 ranks, got 0"),
        (PART, {"in_strategy": (None,), "devices": True}, "devices: expected a number of ranks"),
        (
            PART,
            {"in_strategy": (None,), "out_strategy": (None, None)},
            "out_strategy: expected 1 entries for the outputs",
        ),
        (
            PART,
            {"in_strategy": ((2, 1),), "parameter_plan": {"block1.dense2.wieght": (2, 1)}},
            "nearest: 'block1.dense2.weight'",
        ),
        (
            dense_relu,
            {"in_strategy": ((2, 1), None, None), "parameter_plan": {"weight": (2, 1)}},
            "which matches no parameter; there are none",
        ),
    ],
)
def test_mistakes_are_reported_before_anything_is_called(
    fn: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        onnxpar.shard(fn, **arguments)


def test_a_sharded_function_or_model_is_not_sharded_again(sharded: Make, tmp_path: Path) -> None:
    fn = sharded(PART, ((2, 1),))
    with pytest.raises(ModelError, match="shard cannot be nested"):
        onnxpar.shard(fn, ((2, 1),))
    path = tmp_path / "two.onnx"
    ir.save(two_layer.build(), path)
    onnxpar.shard_model(path, "tp=2", tmp_path / "out")
    with pytest.raises(
        ModelError,
        match=r"collective .* already sharded, and shard cannot be "
        r"nested",
    ):
        onnxpar.shard(tmp_path / "out" / "rank0000.model.onnx", ((2, 1),))


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(ModelError, match=r"expected an onnxscript function, .* got function"):
        onnxpar.shard(lambda x: x, ((2, 1),))  # type: ignore[arg-type]

    @script()
    def leaky(x, alpha: float):  # type: ignore[no-untyped-def]
        return op.LeakyRelu(x, alpha=alpha)

    with pytest.raises(ModelError, match="required attributes"):
        onnxpar.shard(leaky, ((2, 1),))
    with pytest.raises(ModelError, match="got the attribute 'alpha'"):
        onnxpar.shard(ir.from_proto(leaky.to_function_proto()), ((2, 1),))


def test_calls_that_do_not_fit(sharded: Make) -> None:
    fn = sharded(PART, ((2, 1),))
    x = numbers(4, 32)
    for arguments, named, message in (
        ((), {}, "expected an array for input 'x', got none"),
        ((x, x), {}, "expected 1 inputs, got 2 arguments"),
        ((x,), {"x": x}, "'x' is given twice"),
        ((x,), {"z": x}, "'z' is not an input; inputs are 'x'"),
        ((numbers(4, 31),), {}, "input 'x', dim 1: expected 32, got 31"),
        ((numbers(32),), {}, r"input 'x': expected 2 dims \(batch, 32\), got the shape \(32,\)"),
        ((np.array(["a"]),), {}, "expected an array of numbers"),
    ):
        with pytest.raises(CallError, match=message):
            fn(*arguments, **named)
    # A call that is refused leaves the others as they are.
    assert fn(x).shape == (4, 32)
    assert len(fn.programs) == 1


def test_sizes_that_do_not_fit_together_are_refused_before_ranks_run(sharded: Make) -> None:
    """In the program each size is a separate symbol, which does not show that they differ."""
    fn = sharded(dense_relu, ((4, 2), None, None))
    x, weight = numbers(32, 128), numbers(128, 10)
    with pytest.raises(ModelError, match=r"\(Add\): Incompatible dimensions, .* shape \[32,10\]"):
        fn(x, weight, numbers(5))
    assert fn.programs == []


def test_an_out_strategy_of_another_rank_is_refused(sharded: Make) -> None:
    fn = sharded(dense_relu, ((4, 2), None, None), ((8,),))
    message = r"^out_strategy\[0\], output 'return_val': expected 2 entries .* \(32, 10\)"
    with pytest.raises(StrategyError, match=message):
        fn(numbers(32, 128), numbers(128, 10), numbers(10))


def test_after_a_failed_run_the_function_is_sharded_again(sharded: Make) -> None:
    @script()
    def rows(x, shape):  # type: ignore[no-untyped-def]
        return op.Reshape(x, shape)

    fn = sharded(rows, ((2, 1), None), devices=2)
    x = numbers(6, 4)
    assert fn(x, np.array([4, 6])).shape == (4, 6)
    with pytest.raises(RuntimeError):
        fn(x, np.array([5, 6]))
    assert fn(x, np.array([3, 8])).shape == (3, 8)


def test_nothing_is_left_behind(sharded: Make, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = threading.active_count()
    fn = sharded(PART, ((2, 1),))
    fn(numbers(4, 32))
    assert list(tmp_path.iterdir()) == []
    fn(numbers(6, 32))
    with fn:
        pass
    assert fn.programs == [] and threading.active_count() <= before
    assert fn(numbers(4, 32)).shape == (4, 32)

"""Weights of several products in one tensor: divided, sharded part by part, with equal results."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_ir.external_data import unload_from_model

from onnxpar.api.shard_model import analyse, shard_model
from onnxpar.core.errors import StrategyError
from onnxpar.graph.tensor_parts import TensorPart, part_of
from onnxpar.strategy import Strategy
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.compare import verify
from tests.tiers import covering

TEXT = """
    <ir_version: 10, opset_import: ["" : 21]>
    fused (float[batch, seq, 8] x) => (float[batch, seq, {results}] y{more})
    {{
        {body}
    }}
"""
SCORES = """
    [scores] s = Mul(q, kk)
    [mixed] m = Add(s, vv)
    [out] y = MatMul(m, wo)
"""
WIDE = "kk = Concat<axis = 2>(k, k) vv = Concat<axis = 2>(v, v)" + SCORES
OF_ROWS = """
    qr, kr, vr = Split<axis = 1>(g, sizes)
    outer = Shape<end = 2>(x)
    rest = Concat<axis = 0>(outer, last)
    q = Reshape(qr, rest) k = Reshape(kr, rest) v = Reshape(vr, rest)
"""
CASES = {
    "split": "[qkv] f = MatMul(x, w) [parts] q, k, v = Split<axis = -1>(f, sizes)" + WIDE,
    "slices": """
        [qkv] f = MatMul(x, w)
        q = Slice(f, zero, a, last) k = Slice(f, a, b, last, second) v = Slice(f, b, end, last)
    """
    + WIDE,
    "transposed": """
        turned = Transpose<perm = [1, 0]>(wt)
        [qkv] f = MatMul(x, turned)
        biased = Add(bias, f)
        [parts] q, k, v = Split<axis = 2>(biased, sizes)
    """
    + WIDE,
    "gemm": """
        one_row = Reshape(x, flat)
        [qkv] g = Gemm<transB = 1>(one_row, wt, bias)
    """
    + OF_ROWS
    + WIDE,
    "heads": """
        [qkv] f = MatMul(x, w)
        h = Reshape(f, heads)
        q4 = Slice(h, zero, two, two)
        front = Transpose<perm = [2, 0, 1, 3]>(h)
        k4 = GatherND(front, place)
        v3 = Gather(front, three)
        q = Reshape(q4, merged)
        k = Squeeze(k4, zero)
        kk = Concat<axis = 2>(k, k) vv = Concat<axis = 2>(v3, v3)
    """
    + SCORES,
    "quantised": """
        one_row = Reshape(x, flat)
        w8 = DequantizeLinear<axis = 0>(w_int8, scales, points)
        [qkv] g = Gemm<transB = 1>(one_row, w8)
    """
    + OF_ROWS
    + WIDE,
    "convolved": """
        [qkv] f = MatMul(x, w)
        z, rest = Split<axis = 2>(f, equal)
        turned = Transpose<perm = [0, 2, 1]>(rest)
        c = Conv<group = 8, kernel_shape = [3], pads = [1, 1]>(turned, filters, cbias)
        gate = Sigmoid(c)
        act = Mul(c, gate)
        turned_back = Transpose<perm = [0, 2, 1]>(act)
        [parts] u, v1, v2 = Split<axis = 2>(turned_back, inner)
        kk = Concat<axis = 2>(v1, u, v2)
        vv = Concat<axis = 2>(v2, v1, u)
        q = Identity(z)
    """
    + SCORES,
}
SHAPES = {
    "w": (8, 16),
    "wt": (16, 8),
    "bias": (16,),
    "w3": (1, 8, 16),
    "wo": (8, 8),
    "filters": (8, 1, 3),
    "cbias": (8,),
}
INTEGERS = {
    "zero": [0],
    "second": [1],
    "two": [2],
    "three": 3,
    "last": [-1],
    "a": [8],
    "b": [12],
    "end": [99],
    "place": [[-2]],
    "sizes": [8, 4, 4],
    "equal": [8, 8],
    "inner": [4, 2, 2],
    "uneven": [15, 1],
    "heads": [0, 0, 4, 4],
    "merged": [0, 0, -1],
    "flat": [-1, 8],
}


def model(body: str, results: int = 8, more: str = "") -> onnx.ModelProto:
    proto = onnx.parser.parse_model(TEXT.format(body=body, results=results, more=more))
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        n: draw.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()
    }
    arrays |= {n: np.array(v, np.int64) for n, v in INTEGERS.items()}
    arrays["w_int8"] = draw.integers(-128, 128, (16, 8)).astype(np.int8)
    arrays["scales"] = draw.uniform(0.01, 0.1, 16).astype(np.float32)
    arrays["points"] = draw.integers(-8, 8, 16).astype(np.int8)
    read = {name for node in proto.graph.node for name in node.input}
    for name, array in arrays.items():
        if name in read:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def parts(proto: onnx.ModelProto) -> dict[str, TensorPart]:
    """The parts into which the weights of a model are divided."""
    held = analyse(ir.from_proto(proto), {}).graph.initializers
    return {n: found for n, v in held.items() if (found := part_of(v)) is not None}


def check(folder: Path, proto: onnx.ModelProto, strategy: str | Strategy) -> Manifest:
    path = folder / "m.onnx"
    onnx.save(proto, path)
    shard_model(path, strategy, folder / "out")
    cases = verify(folder / "out", path, [{"batch": 2, "seq": 3}, {"batch": 1, "seq": 5}])
    assert [problem for case in cases for problem in case.problems] == []
    return Manifest.load(folder / "out")


@pytest.mark.parametrize(
    ("case", "preset"), covering(CASES, ["tp=2", "tp=4", "tp=3", "dp=2,tp=2", "dp=2"])
)
def test_results_are_equal(tmp_path: Path, case: str, preset: str) -> None:
    check(tmp_path, model(CASES[case]), preset)


@pytest.mark.parametrize("case", ["split", "slices", "transposed"])
def test_each_part_is_sharded(tmp_path: Path, case: str) -> None:
    """A rank holds half of each part, and one sum is reduced at the end."""
    elementwise = CASES[case].split("kk =")[0]
    body = f"""{elementwise}
        qo = MatMul(q, wo) ko = MatMul(k, w4) vo = MatMul(v, w4)
        sum = Add(qo, ko)
        y = Add(sum, vo)
    """
    proto = model(body)
    w4 = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w4, "w4"))
    manifest = check(tmp_path, proto, "tp=2")
    shards = {p.name: p.split_atoms for p in manifest.parameters.values()}
    fused = [name for name in shards if name.startswith("w") and "." in name]
    assert len(fused) == 3
    assert all(shards[name] for name in fused)
    assert [c.op for c in manifest.program("model").collectives] == ["AllReduce"]


def test_the_parts_of_parts() -> None:
    """A Split of a Split divides the weight into all parts, and the convolution's with it."""
    found = parts(model(CASES["convolved"]))
    assert {n: (p.tensor, p.axis, p.start) for n, p in found.items()} == {
        "w.0": ("w", 1, 0),
        "w.1": ("w", 1, 8),
        "w.2": ("w", 1, 12),
        "w.3": ("w", 1, 14),
        "filters.0": ("filters", 0, 0),
        "filters.1": ("filters", 0, 4),
        "filters.2": ("filters", 0, 6),
        "cbias.0": ("cbias", 0, 0),
        "cbias.1": ("cbias", 0, 4),
        "cbias.2": ("cbias", 0, 6),
    }


def test_scales_and_zero_points_of_a_quantised_weight() -> None:
    found = parts(model(CASES["quantised"]))
    assert {p.tensor for p in found.values()} == {"w_int8", "scales", "points"}
    assert len(found) == 9


QKV = "[qkv] f = MatMul(x, w) "
WHOLE = {
    "equal parts of one Split": QKV + "q, k = Split<axis = -1>(f, equal) y = Mul(q, k)",
    "the product is read as a whole": QKV
    + "q, k, v = Split<axis = -1>(f, sizes) n = Softmax(f) kk = Concat<axis = 2>(k, v, n)"
    + "y = Slice(kk, zero, a, two)",
    "the product is an output": QKV + "q, k, v = Split<axis = -1>(f, sizes) y = Identity(q)",
    "a part is not read": QKV + "k = Slice(f, zero, b, last) v = Slice(f, zero, a, last)"
    "y = Identity(v)",
    "ranges overlap, so that a range is no part": QKV
    + "k = Slice(f, zero, b, last) v = Slice(f, a, end, last) y = Concat<axis = 2>(k, v)",
    "the weight is read elsewhere": QKV
    + "q, k, v = Split<axis = -1>(f, sizes) kk = Concat<axis = 2>(k, v) s = Mul(q, kk)"
    "total = ReduceSum<keepdims = 0>(w) y = Mul(s, total)",
    "the operand is divided, not the weight": "q, k = Split<axis = -1>(x, inputs) "
    "y = Concat<axis = 2>(k, q)",
    "parts of a normalised dim": QKV
    + "n = Softmax(f) q, k, v = Split<axis = -1>(n, sizes) kk = Concat<axis = 2>(k, v)"
    "y = Mul(q, kk)",
    "a part of one element would be squeezed": """
        matrix = Squeeze(w3)
        [qkv] f = MatMul(x, matrix)
        q, k = Split<axis = -1>(f, uneven)
        front = Slice(q, zero, a, last)
        y = Mul(front, k)
    """,
    "a step": QKV + "y = Slice(f, zero, end, last, two)",
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_stays_whole(case: str) -> None:
    proto = model(
        WHOLE[case], 16 if "overlap" in case else 8, ", float[batch, seq, 16] f"
        if "output" in case
        else "",
    )  # fmt: skip
    if "operand" in case:
        inputs = onnx.numpy_helper.from_array(np.array([6, 2], np.int64), "inputs")
        proto.graph.initializer.append(inputs)
    assert parts(proto) == {}


def test_a_narrow_product_stays_whole() -> None:
    """Its rows are sharded and its few results reduced: at once, not part by part."""
    proto = model("[qkv] f = MatMul(x, narrow) q, k = Split<axis = -1>(f, three2) "
                  "kk = Concat<axis = 2>(k, q) y = MatMul(kk, up)")  # fmt: skip
    for name, array in {
        "narrow": np.ones((8, 5), np.float32),
        "up": np.ones((5, 8), np.float32),
        "three2": np.array([3, 2], np.int64),
    }.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    assert parts(proto) == {}


@pytest.mark.parametrize("case", ["split", "transposed"])
def test_external_data(tmp_path: Path, case: str) -> None:
    """Parts along dim 0 are ranges of the file; parts along dim 1 are read element by element."""
    proto, path = model(CASES[case]), tmp_path / "m.onnx"
    outside = unload_from_model(ir.from_proto(proto), tmp_path, "m.data", size_threshold_bytes=100)
    ir.save(outside, path)
    shard_model(path, "tp=2", tmp_path / "out")
    cases = verify(tmp_path / "out", path, [{"batch": 2, "seq": 3}])
    assert [problem for each in cases for problem in each.problems] == []


@pytest.mark.parametrize(
    "entries",
    [
        {"parameters": {"w": [None, "tp"]}},
        {"parameters": {"w*": [None, "tp"], "wo": ["tp", None], "w.1": [None, None]}},
        {"nodes": {"qkv": {"in": [["dp", None, None], [None, "tp"]]}}},
        {"nodes": {"qkv": {"in": [[2, 1, 1], [1, 2]]}}},
        {"nodes": {"parts": {"in": [["dp", None, "tp"], None]}}},
        {"nodes": {"parts": {"in": [["dp", None, "tp"], None],
                             "out": [["dp", None, "tp"], ["dp", None, None], None]}}},
    ],
)  # fmt: skip
def test_entries_for_the_names_of_the_file(tmp_path: Path, entries: dict[str, object]) -> None:
    """They apply to all parts; one for a part wins."""
    strategy = Strategy.from_dict({"mesh": {"dp": 2, "tp": 2}, "parameter_axes": [], **entries})
    found = check(tmp_path, model(CASES["split"]), strategy).parameters
    assert [bool(found[f"w.{i}"].split_atoms) for i in (0, 2)] == [True, True]
    assert bool(found["w.1"].split_atoms) == ("w.1" not in str(entries))


def test_the_strategy_that_shard_writes_gives_the_same_plan(tmp_path: Path) -> None:
    first = check(tmp_path, model(CASES["convolved"]), "dp=2,tp=2")
    shard_model(tmp_path / "m.onnx", tmp_path / "out" / "strategy.yaml", tmp_path / "again")
    again = Manifest.load(tmp_path / "again")
    assert again.strategy["nodes"] == first.strategy["nodes"]
    assert again.strategy["parameters"] == first.strategy["parameters"]


def test_an_unknown_name_names_the_nearest(tmp_path: Path) -> None:
    strategy = Strategy.from_dict({"mesh": {"tp": 2}, "nodes": {"qvk": {"in": [[1, 1, 1]]}}})
    with pytest.raises(StrategyError, match="'qkv'"):
        check(tmp_path, model(CASES["split"]), strategy)

"""Old models are brought to one opset, and mean the same as before."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxpar.core.errors import ModelError
from onnxpar.frontend.load import normalise
from onnxpar.frontend.upgrade import upgrade_model
from onnxpar.ops.old_node import OPSET
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from tests.onnxpar.ops.op_harness import chosen
from tools.operators import backend

# ONNX makes all of its cases at once, in ten seconds.
pytestmark = pytest.mark.xdist_group("backend")

Array = np.ndarray[Any, Any]


def _run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    made: list[Array] = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    ).run(None, dict(feeds))
    return made


def _upgraded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model when it was brought to `OPSET` and nothing else was done."""
    read = ir.from_proto(model)
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    for index, node in enumerate(read.graph.all_nodes()):
        node.name = node.name or f"node{index}"
    assert upgrade_model(read, opset, REGISTRY) == max(OPSET, opset)
    read.ir_version = max(read.ir_version or 0, 10)
    return ir.to_proto(read)


def _check(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> onnx.ModelProto:
    made = _upgraded(model)
    onnx.checker.check_model(made)
    for old, new in zip(_run(model, feeds), _run(made, feeds), strict=True):
        assert old.dtype == new.dtype and old.shape == new.shape
        if old.dtype.kind == "f":
            # The kernels may add in another order: at most 100 roundings of 6e-8.
            np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(new, old)
    return made


# Opset, node in ONNX's text form, and types of its operands; b is a batch whose size is not known.
_NODES: Sequence[tuple[int, str, str]] = (
    (7, "y = Upsample<mode='nearest', scales=[1.0, 1.0, 2.0, 2.0]>(x)", "float[2,3,4,5] x"),
    (7, "y = Upsample<mode='linear', scales=[1.0, 1.0, 2.0, 3.0]>(x)", "float[2,3,4,5] x"),
    (7, "y, z = TopK<k=3>(x)", "float[4,5] x"),
    (7, "y, z = TopK<k=3, axis=0>(x)", "float[4,5] x"),
    (7, "y = Clip<min=-0.5, max=0.25>(x)", "float[4,5] x"),
    (7, "y = Clip<max=0.25>(x)", "float[4,5] x"),
    (7, "y = Pad<pads=[0,1,2,0], value=3.0>(x)", "float[4,5] x"),
    (7, "y = Pad<pads=[0,1,2,0], value=3.0>(x)", "double[4,5] x"),
    (7, "y = Pad<pads=[0,1,2,0], mode='reflect'>(x)", "float[4,5] x"),
    (7, "y = Slice<starts=[1,0], ends=[3,-1], axes=[0,1]>(x)", "float[4,5] x"),
    (7, "y = Slice<starts=[1], ends=[3]>(x)", "float[4,5] x"),
    (7, "y, z = Split<axis=1>(x)", "float[4,6] x"),
    (7, "y, z = Split<axis=1, split=[2,4]>(x)", "float[4,6] x"),
    (13, "y, z = Split<axis=1>(x)", "float[4,6] x"),
    (7, "y = Squeeze<axes=[1]>(x)", "float[4,1,6] x"),
    (7, "y = Squeeze(x)", "float[4,1,6] x"),
    (7, "y = Unsqueeze<axes=[1,3]>(x)", "float[4,6] x"),
    (7, "y = Dropout<ratio=0.3>(x)", "float[4,6] x"),
    (10, "y = Dropout<ratio=0.3>(x)", "float[4,6] x"),
    (7, "y = Softmax(x)", "float[2,3,4] x"),
    (7, "y = Softmax(x)", "float[b,3,4] x"),
    (7, "y = Softmax(x)", "float[2,3] x"),
    (7, "y = Softmax<axis=2>(x)", "float[2,3,4] x"),
    (7, "y = Softmax<axis=0>(x)", "float[2,3,4] x"),
    (11, "y = Softmax<axis=-2>(x)", "float[2,3,4] x"),
    (11, "y = Softmax<axis=1>(x)", "float[2,3,1,1] x"),
    (11, "y = LogSoftmax<axis=1>(x)", "float[2,3,4] x"),
    (11, "y = Hardmax<axis=1>(x)", "float[2,3,4] x"),
    (7, "y = BatchNormalization(x, s, s, s, s)", "float[2,3,4] x, float[3] s"),
    (7, "y = BatchNormalization<spatial=0>(x, s, s, s, t)",
     "float[2,3,4] x, float[3,4] s, float[3,4] t"),
    (9, "y = Scatter<axis=1>(x, i, u)", "float[3,5] x, int64[2,5] i, float[2,5] u"),
    (10, "y = Resize<mode='linear'>(x, s)", "float[2,3,4,5] x, float[4] s"),
    (10, "y = Resize<mode='nearest'>(x, s)", "float[2,3,4,5] x, float[4] s"),
    (10, "y = RoiAlign<output_height=2, output_width=2>(x, r, i)",
     "float[2,3,8,8] x, float[2,4] r, int64[2] i"),
    (16, "y = GridSample(x, g)", "float[2,3,4,5] x, float[2,6,7,2] g"),
    (16, "y = GridSample<mode='bicubic'>(x, g)", "float[2,3,4,5] x, float[2,6,7,2] g"),
    (17, "y = DFT(x)", "float[2,8,1] x"),
    (17, "y = DFT<axis=2>(x)", "float[2,8,6,1] x"),
    *((11, f"y = Reduce{kind}<axes=[1]>(x)", "float[4,6] x")
      for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")),
    (11, "y = ReduceMean<axes=[0,-1], keepdims=0>(x)", "float[4,6,2] x"),
    (17, "y = ReduceMax(x)", "float[4,6] x"),
)  # fmt: skip
_GIVEN = {"s": np.array([1, 1, 2.0, 0.5], np.float32), "i": np.array([[0, 1, 2, 1, 0]] * 2)}


@pytest.mark.parametrize(("opset", "node", "types"), _NODES, ids=str)
def test_an_upgraded_node_gives_what_it_gave(opset: int, node: str, types: str) -> None:
    proto = onnx.parser.parse_node(node.replace("'", '"'))
    proto.name = "node"
    graph = onnx.parser.parse_graph(f"g ({types}) => () {{}}")
    graph.node.append(proto)
    graph.output.extend(onnx.ValueInfoProto(name=n) for n in proto.output)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=7
    )
    model = onnx.shape_inference.infer_shapes(model)
    rng = np.random.default_rng(list(node.encode()))
    feeds = {}
    for value in graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [d.dim_value or 2 for d in value.type.tensor_type.shape.dim]
        data = rng.uniform(0.1, 1.9, shape) if value.name == "t" else rng.standard_normal(shape)
        feeds[value.name] = data.astype(kind)
        if value.name == "s" and "Batch" in node:
            feeds["s"] = np.abs(feeds["s"]) + np.float32(0.5)
        elif value.name in _GIVEN and "RoiAlign" not in node:
            feeds[value.name] = _GIVEN[value.name].astype(kind)
    made = _check(model, feeds)
    assert [n.name for n in made.graph.node].count("node") == 1
    assert {n.op_type for n in made.graph.node} != set()


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_rows_of_several_dims_are_sharded(op_type: str) -> None:
    """What becomes several nodes is sharded along each of their factors, and run by all ranks."""
    model = onnx.parser.parse_model(
        '<ir_version: 7, opset_import: ["": 11]> g (float[5,3,4] x) => (float[5,3,4] y) '
        f"{{ y = {op_type}<axis=1>(x) }}"
    )
    feeds = {"x": np.random.default_rng(2).standard_normal((5, 3, 4)).astype(np.float32)}
    case = backend.Case(op_type, model, feeds, _run(model, feeds), 1e-5, 1e-6)
    outcome = backend.examine(case, None)
    assert outcome is not None and outcome.status == backend.PASSED, outcome
    assert outcome.splits > 3


def test_scan_of_a_batch_is_a_scan_of_scans() -> None:
    case = backend.cases()["test_scan_sum"]
    made = _check(case.model, case.feeds)
    assert [n.op_type for n in made.graph.node] == ["Scan"]


def test_statistics_of_groups_are_repeated() -> None:
    """onnxruntime has no kernel for the old version; ONNX's body of it is what is compared."""
    for channels in ("6", "C"):
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 18]> g (float[2,{channels},4] x, float[3] s) '
            "=> (float[2,6,4] y) { y = GroupNormalization<num_groups=3>(x, s, s) }"
        )
        rng = np.random.default_rng(1)
        x, s = rng.standard_normal((2, 6, 4)), rng.standard_normal(3)
        feeds = {"x": x.astype(np.float32), "s": s.astype(np.float32)}
        rows = x.reshape(2, 3, 8)
        rows = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
        want = (rows * s[:, None] + s[:, None]).reshape(2, 6, 4)
        (got,) = _run(_upgraded(model), feeds)
        # Some 20 roundings of 6e-8, of values below 8.
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_each_version_that_means_something_else_has_an_upgrade() -> None:
    """What a version takes away, or a default that it changes, is written by an upgrade."""
    history: dict[str, list[Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            history.setdefault(schema.name, []).append(schema)
    for name, schemas in history.items():
        schemas.sort(key=lambda s: s.since_version)
        for old, new in pairwise(schemas):
            if not 7 < new.since_version <= OPSET or new.since_version in REGISTRY.upgrades(name):
                continue
            assert not new.deprecated, name
            assert old.max_input <= new.max_input, (name, new.since_version)
            for attribute, described in old.attributes.items():
                other = new.attributes.get(attribute)
                assert other is not None, (name, new.since_version, attribute)
                assert other.default_value == described.default_value, (name, attribute)


def test_onnx_s_own_tests_of_old_opsets_pass_when_upgraded() -> None:
    """No node that onnxruntime runs is lost or gives another result."""
    old = [
        case
        for case in backend.cases().values()
        if any(not o.domain and o.version < OPSET for o in case.model.opset_import)
    ]
    for case in chosen(old, 20):
        if backend.undivided_results(case) is not None:
            made = replace(case, model=_upgraded(case.model))
            assert backend.undivided_results(made) is not None, case.name


def test_a_function_of_an_older_opset_is_upgraded() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18, "own": 1]> g (float[4,6] x) => (float[4] y) '
        "{ y = own.rows<axes=[1]>(x) } "
        '<domain: "own", opset_import: ["": 11]> rows <axes>(x) => (y) '
        "{ y = ReduceSum<axes: ints = @axes, keepdims=0>(x) }"
    )
    made = normalise(ir.from_proto(model))
    assert made.opset_imports[""] == OPSET
    (node,) = made.graph
    axes = node.inputs[1]
    assert axes is not None and axes.const_value is not None
    assert axes.const_value.numpy().tolist() == [1]


def test_what_no_later_opset_has_is_refused() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 7, opset_import: ["": 9]> g (float[2,3,4] x, float[3] s) '
        "=> (float[2,3,4] y, float[3] v) "
        "{ y, m, n, v, w = BatchNormalization(x, s, s, s, s) }"
    )
    with pytest.raises(ModelError, match="saved statistics"):
        normalise(ir.from_proto(model))


def test_the_table_is_asked() -> None:
    """A table without an operator has no upgrade of it."""
    model = onnx.parser.parse_model(
        '<ir_version: 7, opset_import: ["": 11]> g (float[4,6] x) => (float[4,1,6] y) '
        "{ y = Unsqueeze<axes=[1]>(x) }"
    )
    read = ir.from_proto(model)
    upgrade_model(read, 11, Registry(()))
    assert "axes" in read.graph[0].attributes

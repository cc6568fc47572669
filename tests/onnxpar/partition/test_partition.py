"""Complete models, partitioned and run on all devices in lockstep, equal the undivided model."""

from collections.abc import Callable, Mapping
from functools import cache

import mlp
import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
import transformer
import two_layer

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, Sharding
from onnxpar.core.symbols import Symbol
from onnxpar.facts.program import Program
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.partition.partitioned_model import PartitionedModel
from tests.lockstep import Array, run_model

# float32, sums of at most 512 terms in another order: sqrt(512) * 2^-24 ~ 1.4e-6 of the largest
# term, and terms may cancel.
RTOL = 1e-5


def preset(analysed: Program, **axes: int) -> Seeds:
    mesh = Mesh.of(**axes)
    data = mesh.axis_atoms("dp") if "dp" in axes else ()
    inputs = {}
    for value in analysed.model.graph.inputs:
        shape = analysed.env.shapes[value.name or ""]
        inputs[value.name or ""] = Sharding.of(shape, [data, *[()] * (len(shape) - 1)])
    return Seeds(mesh, {}, inputs, {}, (mesh.axis_atoms("tp"),) if "tp" in axes else ())


def check(
    model: ir.Model, parted: PartitionedModel, feeds: Mapping[str, Array], symbols: dict[str, int]
) -> None:
    reference = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [o.name for o in reference.get_outputs()]
    want = dict(zip(names, reference.run(None, dict(feeds)), strict=True))
    got = run_model(parted, feeds, symbols)
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].shape == array.shape
        assert np.abs(got[name] - array).max() <= RTOL * np.abs(array).max(), (name, symbols)


def reductions(parted: PartitionedModel, axis: str) -> list[str]:
    mesh = parted.plan.mesh
    return [c.op for c in parted.builder.collectives if c.atoms == mesh.axis_atoms(axis)]


@pytest.mark.parametrize(
    "form",
    [
        *({}, {"fused_qkv": True}, {"tied_head": True}),
        *(pytest.param({name: True}, marks=pytest.mark.full) for name in ("merged_heads", "loss")),
    ],
    ids=str,
)
def test_transformer_dp2_tp4(form: dict[str, bool]) -> None:
    model = transformer.build(layers=4, **form)
    analysed = analyse(transformer.build(layers=4, **form), {})
    parted = propagate_and_partition(analysed, preset(analysed, dp=2, tp=4))
    assert not parted.replicated
    if "loss" not in form:
        # One for the embeddings, two for each layer; logits stay sharded by vocabulary.
        assert reductions(parted, "tp") == ["AllReduce"] * (1 + 2 * 4)
        assert len(parted.builder.collectives) == 9
    rng = np.random.default_rng(1)
    for batch, seq in ((4, 8), (1, 5), (3, 7), (7, 1)):
        feeds = {"input_ids": rng.integers(0, 256, (batch, seq))}
        if "loss" in form:
            feeds["labels"] = rng.integers(0, 256, (batch, seq))
        check(model, parted, feeds, {"batch": batch, "seq": seq})


@pytest.mark.parametrize(
    "form",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"fused_qkv": True, "merged_heads": True, "loss": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("axes", [{"tp": 8}, {"tp": 3}, {"dp": 2, "tp": 3}], ids=str)
def test_heads_and_vocabulary_that_the_axis_does_not_divide(
    form: dict[str, bool], axes: dict[str, int]
) -> None:
    """4 heads over 8 devices are sharded by 4; 4 heads and 257 words over 3 unevenly."""
    analysed = analyse(transformer.build(layers=2, vocab=257, **form), {})
    parted = propagate_and_partition(analysed, preset(analysed, **axes))
    model = transformer.build(layers=2, vocab=257, **form)
    rng = np.random.default_rng(4)
    for batch, seq in ((3, 7), (1, 1)):
        feeds = {"input_ids": rng.integers(0, 257, (batch, seq))}
        if "loss" in form:
            feeds["labels"] = rng.integers(0, 257, (batch, seq))
        check(model, parted, feeds, {"batch": batch, "seq": seq})


def test_every_weight_of_the_transformer_is_split_over_tp() -> None:
    analysed = analyse(transformer.build(layers=2), {})
    plan = propagate_and_partition(analysed, preset(analysed, dp=2, tp=4)).plan
    tensor = set(plan.mesh.axis_atoms("tp"))
    for name, sharding in plan.parameters.items():
        if sharding.rank == 2:
            assert set(sharding.split_atoms) == tensor, name


@cache
def on_four_data_ranks(build: Callable[[], ir.Model]) -> PartitionedModel:
    analysed = analyse(build(), {})
    return propagate_and_partition(analysed, preset(analysed, dp=4))


def one_layer() -> ir.Model:
    return transformer.build(layers=1)


@pytest.mark.parametrize("batch", range(1, 18))
def test_every_model_on_four_data_ranks_without_constraints(batch: int) -> None:
    rng = np.random.default_rng(batch)
    for build, feeds in (
        (mlp.build, {"x": rng.standard_normal((batch, 1, 28, 28)).astype(np.float32)}),
        (two_layer.build, {"x": rng.standard_normal((batch, 32)).astype(np.float32)}),
        (one_layer, {"input_ids": rng.integers(0, 256, (batch, 3))}),
    ):
        parted = on_four_data_ranks(build)
        assert parted.builder.collectives == []
        check(build(), parted, feeds, {"batch": batch, "seq": 3})


def numeric(analysed: Program, mesh: Mesh, name: str, **atoms: tuple[int, ...]) -> NodeSeed:
    rule = analysed.rules.by_node[name]
    view = analysed.rules.views[name]
    sizes = {
        factor: size
        for index, operand in enumerate(rule.inputs)
        for names, size in zip(operand.dims, view.shape(index), strict=True)
        for factor in names
    }
    return NodeSeed(name, {f: (Component(sizes[f], a),) for f, a in atoms.items()})


def test_two_layer_tutorial() -> None:
    """MatMul ((2,4),(4,1)): the sum over {0,1,2,3} is scattered, and what follows is ((2,4))."""
    analysed = analyse(two_layer.build(), {"batch": Symbol(divisor=2)})
    mesh = Mesh.refine(8, [(2, 4, 1)])
    seeds = Seeds(
        mesh,
        {
            "/matmul1/MatMul": numeric(
                analysed, mesh, "/matmul1/MatMul", M=mesh.run(1, 2), K=mesh.run(2, 4)
            )
        },
        {"x": Sharding.of(analysed.env.shapes["x"], [(0, 1, 2), ()])},
    )
    parted = propagate_and_partition(analysed, seeds)
    plan, table = parted.plan, analysed.env.table
    strategies = {
        name: tuple(s.strategy(mesh) for s in node.inputs if s) for name, node in plan.nodes.items()
    }
    assert strategies == {
        "/matmul1/MatMul": ((2, 4), (4, 1)),
        "/relu/Relu": ((2, 4),),
        "/matmul2/MatMul": ((2, 4), (4, 1)),
    }
    locals_at_16 = {
        name: [
            tuple(table.evaluate(d, {"batch": 16}) for d in s.local_shape(mesh, table))
            for s in node.inputs
            if s
        ]
        for name, node in plan.nodes.items()
    }
    assert locals_at_16["/matmul1/MatMul"] == [(8, 8), (8, 16)]
    assert locals_at_16["/matmul2/MatMul"] == [(8, 4), (4, 16)]
    sums = [c for c in parted.builder.collectives if c.op in ("ReduceScatter", "AllReduce")]
    assert [mesh.group(0, c.atoms) for c in sums] == [(0, 1, 2, 3), (0, 1, 2, 3)]
    rng = np.random.default_rng(0)
    for batch in (2, 16, 22):
        feeds = {"x": rng.standard_normal((batch, 32)).astype(np.float32)}
        check(two_layer.build(), parted, feeds, {"batch": batch})


@pytest.mark.parametrize("divisor", [1, 8])
def test_mlp_tutorial(divisor: int) -> None:
    analysed = analyse(mlp.build(), {"batch": Symbol(divisor=divisor)})
    mesh = Mesh.refine(8, [(2, 4, 1), (4, 1), (1, 8, 1), (8, 1)])
    two, four, eight = mesh.run(1, 2), mesh.run(1, 4), mesh.run(1, 8)
    seeds = Seeds(
        mesh,
        {
            "/fc1/MatMul": numeric(analysed, mesh, "/fc1/MatMul", M=two, K=mesh.run(2, 4)),
            "/relu1/Relu": numeric(analysed, mesh, "/relu1/Relu", a=four),
            "/fc2/MatMul": numeric(analysed, mesh, "/fc2/MatMul", K=eight),
            "/relu2/Relu": numeric(analysed, mesh, "/relu2/Relu", a=eight),
        },
        {"x": Sharding.of(analysed.env.shapes["x"], [eight, (), (), ()])},
    )
    parted = propagate_and_partition(analysed, seeds)
    assert parted.plan.nodes["/fc3/MatMul"].inputs[0].strategy(mesh) == (8, 1)
    rng = np.random.default_rng(0)
    for batch in (8, 24) if divisor == 8 else (1, 3, 7, 16):
        feeds = {"x": rng.standard_normal((batch, 1, 28, 28)).astype(np.float32)}
        check(mlp.build(), parted, feeds, {"batch": batch})


MATMUL = """<ir_version: 10, opset_import: ["": 20]>
g (float[16, 8] x, float[8, 32] w) => (float[16, 32] y) { y = MatMul(x, w) }"""


def single(devices: int, matrix: tuple[int, int, int]) -> PartitionedModel:
    analysed = analyse(ir.serde.deserialize_model(onnx.parser.parse_model(MATMUL)), {})
    mesh = Mesh.refine(devices, [matrix])
    m, k, n = mesh.matrix(matrix)
    name = next(iter(analysed.model.graph)).name or ""
    return propagate_and_partition(
        analysed, Seeds(mesh, {name: numeric(analysed, mesh, name, M=m, K=k, N=n)})
    )


@pytest.mark.parametrize(
    ("devices", "matrix"),
    [
        (8, (2, 4, 1)),
        (8, (2, 2, 1)),
        (24, (3, 8, 1)),
        (24, (8, 1, 3)),
        (6, (2, 3, 1)),
        (12, (1, 2, 6)),
    ],
)
def test_one_matmul_on_any_mesh(devices: int, matrix: tuple[int, int, int]) -> None:
    parted = single(devices, matrix)
    model = ir.serde.deserialize_model(onnx.parser.parse_model(MATMUL))
    rng = np.random.default_rng(2)
    feeds = {
        "x": rng.standard_normal((16, 8)).astype(np.float32),
        "w": rng.standard_normal((8, 32)).astype(np.float32),
    }
    check(model, parted, feeds, {})

"""What options a node has."""

import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.core.machine import PRESETS
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component
from onnxpar.cost.cost_model import CostModel
from onnxpar.frontend.load import normalise
from onnxpar.graph.plan import shardings
from onnxpar.search.node_options import Option, options
from onnxpar.search.value_flow import flow

TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[64,64] x, float[64,64] w, float[64,64] v, float[64,64] bias) => (float[64,64] y) {
    a = MatMul(x, w)
    b = MatMul(x, v)
    s = Add(a, b)
    y = Add(s, bias)
}"""


def test_only_what_a_node_made_may_wait_for_a_sum() -> None:
    program = analyse(normalise(ir.from_proto(onnx.parser.parse_model(TEXT))), {})
    mesh = Mesh.of({"x": 2})
    cost = CostModel(PRESETS["cpu"], mesh, program.env.table)
    *_, both, biased = flow(program).items
    partials = [o for o in options(both, [mesh.axis_atoms("x")], cost) if o.plan.carried]
    assert partials
    assert not [o for o in options(biased, [mesh.axis_atoms("x")], cost) if o.plan.carried]


@pytest.mark.parametrize(("devices", "counts"), [(3, {1, 3}), (5, {1, 5}), (65, {1})])
def test_fixed_sizes_need_not_divide_evenly(devices: int, counts: set[int]) -> None:
    """But each shard has an element."""
    program = analyse(normalise(ir.from_proto(onnx.parser.parse_model(TEXT))), {})
    mesh = Mesh.of({"x": devices})
    cost = CostModel(PRESETS["cpu"], mesh, program.env.table)
    first, *_ = flow(program).items
    found = options(first, [mesh.axis_atoms("x")], cost)
    assert {max(o.plan.outputs[0].strategy(mesh)) for o in found} == counts
    assert len(found) == (4 if devices < 64 else 1)


def test_a_decision_that_is_no_option_is_kept() -> None:
    """Propagation shards a dim of 64 over 65 devices, if the user shards a parameter so."""
    program = analyse(normalise(ir.from_proto(onnx.parser.parse_model(TEXT))), {})
    mesh = Mesh.of({"x": 65, "y": 2})
    cost = CostModel(PRESETS["cpu"], mesh, program.env.table)
    first, *_ = flow(program).items
    axes = [mesh.axis_atoms("x"), mesh.axis_atoms("y")]
    factor = first.rule.outputs[0].dims[0][0]
    plan = shardings(first.rule, first.view, {factor: (Component(64, axes[0]),)}, mesh)
    before = Option(plan, ((factor, 0),))
    assert options(first, axes, cost, before) == (Option(plan, ((factor, 0), None)),)


def test_what_a_reduction_reads_is_masked_if_it_is_uneven() -> None:
    """Inputs and parameters arrive with zeros."""
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[64,64] x, float[64,64] w) => (float[64,64] z) { y = Relu(x) z = MatMul(y, w) }"""
    program = analyse(normalise(ir.from_proto(onnx.parser.parse_model(text))), {})
    for devices, masked in ((2, False), (3, True)):
        mesh = Mesh.of({"x": devices})
        cost = CostModel(PRESETS["cpu"], mesh, program.env.table)
        relu, product = flow(program).items
        for item in (relu, product):
            for option in options(item, [mesh.axis_atoms("x")], cost):
                local = cost.elements(option.plan.inputs[0])
                contracted = "K" in option.plan.factors
                expected = cost.copying(4 * local) if contracted and masked else 0.0
                assert cost.masking(item.rule, item.view, option.plan) == expected


HEADS = """<ir_version: 11, opset_import: ["": 23]>
g (float[4,8,16,8] q, float[4,8,16,8] k, float[4,8,16,8] v) => (float[4,8,16,8] y) {
    y = Attention(q, k, v)
}"""


def test_a_rule_may_say_a_size_that_is_no_factor_of_its_operands() -> None:
    """Each head of keys has one of queries, and there is no dim of queries of a head."""
    program = analyse(normalise(ir.from_proto(onnx.parser.parse_model(HEADS))), {})
    mesh = Mesh.of({"x": 2})
    cost = CostModel(PRESETS["cpu"], mesh, program.env.table)
    (item,) = flow(program).items
    assert item.rule.sizes.keys() - item.rule.kinds.keys()
    counts = {o.plan.outputs[0].strategy(mesh) for o in options(item, [mesh.axis_atoms("x")], cost)}
    assert {(2, 1, 1, 1), (1, 2, 1, 1)} <= counts

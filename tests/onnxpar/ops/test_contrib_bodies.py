"""Bodies of contrib operators give the results of the operators."""

import numpy as np
import onnx_ir as ir
import pytest

from onnxpar.core.mesh import Mesh
from onnxpar.facts.program import Program
from onnxpar.frontend.load import normalise, symbol_table
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.seeds import Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.table import REGISTRY
from onnxpar.partition.partition import partition
from onnxpar.propagation.propagate import propagate
from tests.lockstep import evaluator, run_model
from tests.onnxpar.ops.contrib_cases import BODIES, FUSED, MULTI_HEAD, ROTARY
from tests.onnxpar.ops.op_harness import Case

CASES = (*FUSED, *MULTI_HEAD, *ROTARY, *BODIES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.node)
def test_a_body_is_the_operator(case: Case) -> None:
    """Both compute in float32: sums of a few products differ by a few ulp, here up to 25."""
    model = normalise(ir.from_proto(case.model))
    env = shapes(model, symbol_table(model, {}))
    builder = GlobalBuilder.over(model.graph, model.opset_imports[""], env)
    (operator,) = (n.op_type for n in case.model.graph.node)
    nodes = [n for n in model.graph if n.op_type == operator]
    # A node without a rule of its own was replaced when the model was read.
    assert bool(nodes) == (case not in BODIES)
    for node in nodes:
        body = case.definition.body
        assert body is not None
        made = body(BodyNode(NodeView(node, env, builder.opset), builder))
        for index, (old, new) in enumerate(zip(node.outputs, made, strict=True)):
            assert new is not None
            assert builder.shape_of(new) == env.shapes[old.name or ""]
            model.graph.outputs[index] = new
        model.graph.remove(node)
    program = Program.of(model, builder.env, REGISTRY)
    partitioned = partition(program, propagate(program, Seeds(Mesh.of())))
    arrays = {**case.arrays, **case.consts}
    got = run_model(partitioned, arrays, case.sizes).values()
    want = evaluator(case.model, False)(case.arrays)
    for value, expected in zip(got, (want[o.name] for o in case.model.graph.output), strict=True):
        assert value.dtype == expected.dtype
        limit = 3e-6 * float(np.max(np.abs(expected)))
        np.testing.assert_allclose(value, expected, rtol=0, atol=limit)

"""Optimizer programs with sharded states and partial gradients, against one device."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from onnxpar.autodiff.optimizer import (
    GRAD_NORM,
    HYPER,
    OptimizerKind,
    StateKind,
    StateProgram,
    optimizer_model,
)
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import SymbolTable
from onnxpar.facts.program import Program
from onnxpar.graph.plan import factor_sizes, project
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.ops.table import REGISTRY
from onnxpar.parameters.trainable import ParameterInfo
from onnxpar.partition.partition import partition
from onnxpar.partition.partitioned_model import PartitionedModel, States
from onnxpar.propagation.propagate import propagate
from tests.lockstep import run_model

Array = NDArray[Any]
FLOAT = ir.DataType.FLOAT
MESH = Mesh.of(dp=2, tp=3)
DP, TP = 0, 1

# Each parameter: shape, atoms of its dims, atoms over which its gradient is partial. The splits of
# 7 by 3 and of 5 by 2 are uneven.
PARAMETERS: dict[str, tuple[tuple[int, ...], list[list[int]], list[int]]] = {
    "rows": ((7, 4), [[TP], []], [DP]),
    "columns": ((4, 6), [[], [TP]], [DP]),
    "bias": ((6,), [[TP]], [DP]),
    "norm": ((4,), [[]], [DP, TP]),
    "sharded": ((5, 3), [[DP], []], []),
    "replicated": ((2, 2, 2), [[], [], []], []),
}
INFOS = [
    ParameterInfo(name, FLOAT, shape, len(shape) > 1, str(sorted(chain(*atoms))))
    for name, (shape, atoms, _) in PARAMETERS.items()
]
SCALARS = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.25,
    "momentum_first": 0.0,
    "beta1": 0.9,
    "beta1_complement": 0.1,
    "beta2": 0.99,
    "beta2_complement": 0.01,
    "eps": 1e-3,
    "weight_decay": 0.1,
    "decay": 0.99,
    "lr_corrected": 0.2,
    "correction2_sqrt": 0.3,
    "clip_norm": 2.0,
}


def sharding_of(kind: StateKind, parameter: str) -> Sharding:
    shape, atoms, partial = PARAMETERS[parameter]
    gradient = kind in (StateKind.GRADIENT, StateKind.MICRO_GRADIENT)
    return Sharding.of(shape, atoms, partial if gradient else ())


def sharded(update: StateProgram) -> PartitionedModel:
    env = shapes(update.model, SymbolTable({}))
    program = Program.of(update.model, env, REGISTRY)
    rules = program.rules
    assert not rules.reasons
    held = {s.name: sharding_of(s.kind, s.parameter) for s in update.states}
    nodes = {}
    for node in program.graph:
        made = node.outputs[0].name
        for gradient, reduced in update.reduced.items():
            if made == reduced:
                name = node.name or ""
                rule, view = rules.by_node[name], rules.views[name]
                sharding, sizes = held[gradient].with_partial(()), factor_sizes(rule, view)
                factors = project(rule.inputs[0], sharding, sizes, MESH, env.table)
                nodes[name] = NodeSeed(name, factors)
    outputs = {output: held[state] for output, state in update.updated.items()}
    plan = propagate(program, Seeds(MESH, nodes, held, outputs=outputs))
    states = States(frozenset(held), dict(update.updated))
    return partition(program, plan, name="p", states=states)


def draw(program: StateProgram) -> dict[str, Array]:
    """Content of every buffer, and the scalars; second moments are positive."""
    rng = np.random.default_rng(0)
    feed: dict[str, Array] = {}
    for state in program.states:
        value = rng.standard_normal(state.shape).astype(np.float32)
        feed[state.name] = value**2 if state.kind is StateKind.MOMENT2 else value
    for name in program.hyperparameters:
        feed[HYPER + name] = np.array(SCALARS[name])
    return feed


def on_one_device(program: StateProgram, feed: Mapping[str, Array]) -> dict[str, Array]:
    """One device's results; a partial gradient is the sum of what devices hold, all the same."""
    feed = dict(feed)
    for state in program.states:
        sharding = sharding_of(state.kind, state.parameter)
        if sharding.partial and program.reduced:
            holders = np.prod([MESH.atoms[a] for a in sharding.partial])
            feed[state.name] = feed[state.name] * np.float32(holders)
    data = ir.serde.serialize_model(program.model).SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_a_sharded_step_is_the_step(kind: OptimizerKind) -> None:
    program = optimizer_model(kind, INFOS)
    model = sharded(program)
    feed = draw(program)
    got, wanted = run_model(model, feed, {}), on_one_device(program, feed)
    assert set(got) == {*program.updated, GRAD_NORM}
    for name, array in wanted.items():
        # Sums of 99 squares in another order, at most: sqrt(99) roundings of 6e-8 are 6e-7 of the
        # norm, which scales all gradients. The update itself has some 20 more roundings.
        np.testing.assert_allclose(got[name], array, rtol=2e-6, atol=2e-6, err_msg=name)
    # One reduction for each partial gradient, one for each sharded group of the norm, and two norms
    # of LAMB for each sharded parameter.
    moved = [c.op for c in model.builder.collectives]
    assert set(moved) == {"AllReduce"}
    norms = 2 * 4 if kind is OptimizerKind.LAMB else 0
    assert len(moved) == 4 + 2 + norms, [c.value for c in model.builder.collectives]

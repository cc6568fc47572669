"""How the states of a parameter are split over its replicas."""

import itertools

import onnx_ir as ir
import pytest

from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, Sharding
from onnxpar.core.symbols import NO_CONSTRAINTS
from onnxpar.core.symbols.symbol_table import SymbolTable
from onnxpar.cost.optimizer_parallel import OptimizerParallel, shard_further, shard_states, within
from onnxpar.facts.program import Program
from onnxpar.graph.plan import Plan
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.registry import Registry

MESH = Mesh.of(dp=4, tp=3)
A, B, TP = 0, 1, 2


def plan_of(parameter: Sharding, partial: tuple[int, ...], batch: tuple[int, ...]) -> Plan:
    data = Sharding.of((8, 2), [batch, ()])
    outputs = {"grad.w": parameter.with_partial(partial)}
    return Plan(MESH, {}, {"x": data}, {"w": parameter}, outputs)


@pytest.mark.parametrize(
    ("shape", "held", "wanted"),
    [
        # Even in both: the first dim, whose pieces are contiguous.
        ((8, 4), [(), ()], [(A, B), ()]),
        # 10 over 4 is padded to 12, 8 is not.
        ((10, 8), [(), ()], [(), (A, B)]),
        # Padded to 12 of 10, and to 8 of 7: 12/10 is more than 8/7.
        ((10, 7), [(), ()], [(), (A, B)]),
        ((7,), [()], [(A, B)]),
        # Each third of 12 rows is sharded in four, under the sharding that is there.
        ((12, 2), [(TP,), ()], [(TP, A, B), ()]),
        # A third of 9 columns makes no quarters.
        ((12, 9), [(), (TP,)], [(A, B), (TP,)]),
        # A device without elements is better than a copy.
        ((3,), [()], [(A, B)]),
    ],
)
def test_the_dim_that_pads_least_is_split(
    shape: tuple[int, ...], held: list[tuple[int, ...]], wanted: list[tuple[int, ...]]
) -> None:
    found = shard_further(Sharding.of(shape, held), (A, B), MESH)
    assert found == Sharding.of(shape, wanted)


def test_what_cannot_become_smaller_stays() -> None:
    for shape in ((), (1,), (1, 1)):
        assert shard_further(Sharding.replicated(shape), (A, B), MESH) is None
    assert shard_further(Sharding.replicated((8,)), (), MESH) is None


def test_a_component_of_a_dim_is_sharded() -> None:
    """Three projections in one dim, heads sharded: further shards stay within a component."""
    dim = (Component(3), Component(12, (TP,)))
    given = Sharding((dim, (Component(5),)))
    found = shard_further(given, (A, B), MESH)
    assert found is not None
    assert found == Sharding(((Component(3), Component(12, (TP, A, B))), (Component(5),)))
    assert found == found.canonical(MESH, NO_CONSTRAINTS)


def test_a_group_is_of_neighbours_and_within_its_limit() -> None:
    mesh = Mesh.of(dp=12)  # atoms 2, 2, 3
    assert mesh.atoms == (2, 2, 3)
    assert within((0, 1, 2), mesh, None) == (0, 1, 2)
    assert [within((0, 1, 2), mesh, n) for n in (2, 3, 4, 5, 6, 11, 12)] == [
        (1,), (2,), (0, 1), (0, 1), (1, 2), (1, 2), (0, 1, 2)
    ]  # fmt: skip
    assert within((2,), mesh, 2) == ()


def nothing() -> Program:
    """A program without nodes."""
    model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    return Program.of(model, ShapeEnv({}, {}, SymbolTable({})), Registry(()))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_levels_split_more_and_more(level: int) -> None:
    given = Sharding.of((8, 6), [(), (TP,)])
    shard = Sharding.of((8, 6), [(A, B), (TP,)])
    options = OptimizerParallel(level, threshold=0)
    found = shard_states(plan_of(given, (A, B), (A, B)), {"w": "grad.w"}, {"w": 4}, options)
    assert found.moment("w") == (shard if level >= 1 else given)
    assert found.gradient("w") == (shard if level >= 2 else given.with_partial((A, B)))
    assert found.parameter("w") == (shard if level >= 3 else given)
    laid = found.training(nothing())
    assert laid.gathered == (frozenset({"w"}) if level == 3 else frozenset())
    assert laid.plan.outputs["grad.w"] == found.gradient("w")
    assert laid.plan.parameters["w"] == found.parameter("w")
    assert ("grad.w" in laid.plan.resharded) == (level >= 2)


def test_a_group_leaves_the_rest_of_a_gradient_pending() -> None:
    given = Sharding.replicated((8, 6))
    options = OptimizerParallel(2, threshold=0, group=2)
    found = shard_states(plan_of(given, (A, B), (A, B)), {"w": "grad.w"}, {"w": 4}, options)
    assert found.gradient("w") == Sharding.of((8, 6), [(B,), ()], (A,))


def test_the_threshold_counts_a_devices_bytes() -> None:
    """8 x 6 in three parts: 16 elements of 4 bytes."""
    given = Sharding.of((8, 6), [(), (TP,)])
    for threshold, dtype in itertools.product((63, 64, 65), (2, 4)):
        options = OptimizerParallel(1, threshold)
        found = shard_states(plan_of(given, (A,), (A,)), {"w": "grad.w"}, {"w": dtype}, options)
        assert ("w" in found.shards) == (16 * dtype >= threshold)


def test_a_parameter_without_replicas_has_no_shard() -> None:
    """Split over the batch's axis already, or nothing splits the batch."""
    options = OptimizerParallel(1, threshold=0)
    for held, batch in ((((A, B), ()), (A, B)), (((), ()), ())):
        given = Sharding.of((8, 6), list(held))
        found = shard_states(plan_of(given, (), batch), {"w": "grad.w"}, {"w": 4}, options)
        assert found.shards == {} and found.moment("w") == given

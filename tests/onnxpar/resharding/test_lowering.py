"""Resharding: planned by shortest path and executed on all devices, for every pair of shardings."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import permutations, product

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, Sharding, split
from onnxpar.core.symbols import Symbol, SymbolTable, dim_symbol
from onnxpar.graph.builder import ir_shape
from onnxpar.graph.local_builder import COORD_PREFIX, SYMBOL_PREFIX, LocalBuilder
from onnxpar.ops.old_node import OPSET
from onnxpar.resharding.lowering import emit_reshard, permutation
from onnxpar.resharding.routes import ReshardStep, plan_reshard
from tests.lockstep import COMBINE, Array, Lockstep
from tests.shards import concrete
from tests.tiers import FULL

SAMPLE = 60 if FULL else 25
NONE = SymbolTable({})
RANDOM_SEED = 20


@dataclass
class Counting(Lockstep):
    """Also counts what a device sends in each collective, by the runtime's formulas."""

    counted: list[int]

    def _custom(self, node: ir.Node, memory: list[dict[str, Array]]) -> None:
        operand = memory[0][node.inputs[0].name or ""].nbytes  # type: ignore[union-attr]
        g = self.mesh.count(node.meta["atoms"])
        self.counted.append(
            {
                "AllReduce": 2 * operand * (g - 1) // g,
                "AllGather": operand * (g - 1),
                "ReduceScatter": operand * (g - 1) // g,
                "AllToAll": operand * (g - 1) // g,
                "Permute": operand,
            }[node.op_type]
        )
        super()._custom(node, memory)


def partial_shards(array: Array, sharding: Sharding, mesh: Mesh) -> list[Array]:
    """What each device holds: shards; of a pending reduction, parts that reduce to the shard."""
    shards = []
    for rank in range(mesh.size):
        shard = split(array, sharding, mesh, rank)
        if sharding.partial:
            group = mesh.group(rank, sharding.partial)
            noise = np.random.default_rng([7, *group])
            if sharding.reduction == "sum":
                parts = noise.integers(-9, 9, (len(group), *shard.shape)).astype(shard.dtype)
                parts[0] += shard - parts.sum(0)
            else:
                low = noise.integers(1, 9, (len(group), *shard.shape)).astype(shard.dtype)
                sign = -1 if sharding.reduction == "max" else 1
                parts = shard + sign * low
                parts[noise.integers(len(group))] = shard
            shard = parts[group.index(rank)]
        shards.append(shard)
    return shards


def run(
    steps: Sequence[ReshardStep],
    source: Sharding,
    target: Sharding,
    array: Array,
    mesh: Mesh,
    table: SymbolTable = NONE,
    symbols: dict[str, int] | None = None,
) -> LocalBuilder:
    """Emits the steps, runs all devices, and compares what each one then holds."""
    symbols = symbols or {}
    builder = LocalBuilder(table, OPSET, mesh)
    builder.scope = "reshard"
    dtype = ir.DataType.from_numpy(array.dtype)
    local = ir.Value(
        name="x",
        type=ir.TensorType(dtype),
        shape=ir_shape(source.local_shape(mesh, table)),
    )
    out = emit_reshard(builder, local, steps, dtype=dtype, name="x", reason="test")
    shards = partial_shards(array, concrete(source, table, symbols), mesh)
    feeds = []
    for rank in range(mesh.size):
        here = {"x": shards[rank]}
        for name in builder.system_inputs:
            if name.startswith(COORD_PREFIX):
                value = mesh.coords(rank)[int(name.removeprefix(COORD_PREFIX))]
            else:
                value = symbols[name.removeprefix(SYMBOL_PREFIX)]
            here[name] = np.array([value], np.int64)
        feeds.append(here)
    counted: list[int] = []
    (got,) = Counting(mesh, builder, False, counted).run(feeds, [out])
    assert counted == [table.evaluate(c.bytes, symbols) for c in builder.collectives]
    goal = concrete(target, table, symbols)
    for rank in range(mesh.size):
        want = split(array, goal, mesh, rank)
        mine = [got[member] for member in mesh.group(rank, goal.partial)]
        total = reduce(COMBINE[goal.reduction], mine)
        valid: NDArray[np.bool_] = split(np.ones(array.shape, bool), goal, mesh, rank) != 0
        assert total.shape == want.shape
        assert np.array_equal(total[valid], want[valid]), f"device {rank}"
        if not goal.partial:
            assert not total[~valid].any(), f"device {rank}: padding is not zero"
    return builder


def shardings(mesh: Mesh, shape: Sequence[int], *, partial: bool) -> Iterator[Sharding]:
    """Every placement of atoms on dims, in every order, the rest replicated or all partial."""
    atoms = range(len(mesh.atoms))
    for homes in product(range(-1, len(shape)), repeat=len(mesh.atoms)):
        dims = [[a for a in atoms if homes[a] == d] for d in range(len(shape))]
        rest = [a for a in atoms if homes[a] == -1]
        for orders in product(*(permutations(d) for d in dims)):
            yield Sharding.of(shape, orders)
            if partial and rest:
                yield Sharding.of(shape, orders, rest)


def pairs(mesh: Mesh, shape: Sequence[int]) -> list[tuple[Sharding, Sharding]]:
    every = [
        (a, b)
        for a in shardings(mesh, shape, partial=True)
        for b in shardings(mesh, shape, partial=False)
        if a != b
    ]
    random.Random(RANDOM_SEED).shuffle(every)
    return every if FULL else every[:SAMPLE]


MESHES = [
    Mesh.of(a=2),
    Mesh.of(a=2, b=2),
    Mesh.of(a=2, b=3),
    Mesh.of(a=3, b=2),
    Mesh.of(a=2, b=2, c=2),
]
SHAPES = [(8,), (7,), (8, 12), (5, 7), (3, 4, 5)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.atoms)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair(mesh: Mesh, shape: tuple[int, ...]) -> None:
    """Runs all steps of a sample of the reshards; in the full tier every step of all of them.

    A step is written knowing nothing of those before and after it, and moves elements by position
    alone, so a step that is right once is right in every reshard.
    """
    array = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    seen: set[ReshardStep] = set()
    for index, (source, target) in enumerate(pairs(mesh, shape)):
        steps = plan_reshard(source, target, mesh, NONE, 4)
        assert [source, *(s.after for s in steps)] == [*(s.before for s in steps), target]
        try:
            if index < SAMPLE:
                run(steps, source, target, array, mesh)
            elif unseen := [step for step in steps if step not in seen]:
                for step in unseen:
                    run([step], step.before, step.after, array, mesh)
                seen.update(unseen)
        except AssertionError as error:
            raise AssertionError(
                f"{source.describe(mesh)} -> {target.describe(mesh)} by "
                f"{[(s.kind, s.atoms) for s in steps]}: {error}"
            ) from error


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_pending_reductions(reduction: str) -> None:
    mesh = Mesh.of(a=2, b=2)
    array = np.arange(1, 36, dtype=np.int64).reshape(5, 7)
    for source in (
        Sharding.of((5, 7), [(), ()], (0, 1), reduction),
        Sharding.of((5, 7), [(0,), ()], (1,), reduction),
    ):
        for target in (
            Sharding.replicated((5, 7)),
            Sharding.of((5, 7), [(1,), (0,)]),
            Sharding.of((5, 7), [(0, 1), ()]),
            Sharding.of((5, 7), [(), ()], (1,), reduction),
        ):
            run(plan_reshard(source, target, mesh, NONE, 8), source, target, array, mesh)


def fused(mesh: Mesh) -> list[Sharding]:
    """A dim of 3*4*2 elements, seen in several ways, beside a plain one of 5."""
    other = (Component(5),)
    dims = [
        (Component(24),),
        (Component(24, (0,)),),
        (Component(24, (1, 0)),),
        (Component(3), Component(8, (0,))),
        (Component(3, (0,)), Component(8, (1,))),
        (Component(12, (1,)), Component(2, (0,))),
        (Component(3, (1,)), Component(4, (0,)), Component(2)),
        (Component(6), Component(4, (0, 1))),
    ]
    return [Sharding((d, other)) for d in dims]


def test_fused_dims() -> None:
    mesh = Mesh.of(a=2, b=2)
    array = np.arange(1, 121, dtype=np.float32).reshape(24, 5)
    for source, target in product(fused(mesh), fused(mesh)):
        steps = plan_reshard(source, target, mesh, NONE, 4)
        run(steps, source, target, array, mesh)


def test_dynamic_sizes_are_planned_once_and_run_at_many() -> None:
    mesh = Mesh.of(a=2, b=2)
    n = dim_symbol("n")
    for divisor in (1, 2, 4):
        table = SymbolTable({"n": Symbol(divisor=divisor)})
        layouts = [
            Sharding.of((n, 8), [(), ()]),
            Sharding.of((n, 8), [(0, 1), ()]),
            Sharding.of((n, 8), [(1,), (0,)]),
            Sharding.of((n, 8), [(), (0, 1)]),
            Sharding.of((n, 8), [(0,), ()], (1,)),
        ]
        for source, target in product(layouts, layouts[:-1]):
            steps = plan_reshard(source, target, mesh, table, 4)
            for size in (divisor, 3 * divisor, 4 * divisor):
                array = np.arange(1, 1 + 8 * size, dtype=np.float32).reshape(size, 8)
                builder = run(steps, source, target, array, mesh, table, {"n": size})
            if divisor == 4:
                ops = {node.op_type for node in builder.nodes}
                assert "Pad" not in ops, "a split proved even is not padded"


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int16", "uint16", "int64", "float16", "float64"]
)
def test_every_type_is_padded_sliced_and_resharded(dtype: str) -> None:
    mesh = Mesh.of(a=2, b=2)
    array = (np.arange(35) % 3 + 1).astype(dtype).reshape(5, 7)
    uneven = [
        Sharding.replicated((5, 7)),
        Sharding.of((5, 7), [(0, 1), ()]),
        Sharding.of((5, 7), [(), (1,)]),
        Sharding.of((5, 7), [(1,), (0,)]),
    ]
    for source, target in product(uneven, uneven):
        steps = plan_reshard(source, target, mesh, NONE, array.itemsize)
        run(steps, source, target, array, mesh)


def test_bfloat16_is_padded_without_a_pad_kernel() -> None:
    mesh = Mesh.of(a=2)
    source, target = Sharding.replicated((5,)), Sharding.of((5,), [(0,)])
    builder = LocalBuilder(NONE, 20, mesh)
    local = ir.Value(name="x", type=ir.TensorType(ir.DataType.BFLOAT16), shape=ir.Shape([5]))
    steps = plan_reshard(source, target, mesh, NONE, 2)
    out = emit_reshard(builder, local, steps, dtype=ir.DataType.BFLOAT16, name="x", reason="test")
    assert out.dtype == ir.DataType.BFLOAT16
    assert "Pad" not in {node.op_type for node in builder.nodes}
    # onnxruntime takes no bfloat16 arrays from Python, so the graph is fed and read through Cast.
    before = ir.Value(name="f", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([5]))
    to = ir.DataType.BFLOAT16
    first = ir.node("Cast", [before], {"to": to}, outputs=[local])
    last = ir.node("Cast", [out], {"to": ir.DataType.FLOAT}, num_outputs=1)
    last.outputs[0].name = "y"
    coordinate = builder.coord(0)
    graph = ir.Graph(
        [before, coordinate],
        last.outputs,
        nodes=[first, *builder.nodes, last],
        initializers=builder.initializers,
        opset_imports={"": 20},
        name="g",
    )
    last.outputs[0].type, last.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([3])
    proto = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(proto, providers=["CPUExecutionProvider"])
    for rank, want in enumerate(([1, 2, 3], [4, 5, 0])):
        feeds = {"f": np.arange(1, 6, dtype=np.float32), coordinate.name: np.array([rank])}
        assert np.asarray(session.run(None, feeds)[0]).tolist() == want


def test_an_even_split_over_many_atoms_is_one_slice() -> None:
    mesh = Mesh.of(a=2, b=2, c=2)
    source, target = Sharding.replicated((16, 3)), Sharding.of((16, 3), [(0, 1, 2), ()])
    array = np.arange(48, dtype=np.float32).reshape(16, 3)
    builder = run(plan_reshard(source, target, mesh, NONE, 4), source, target, array, mesh)
    assert [n.op_type for n in builder.nodes if n.op_type in ("Slice", "Pad")] == ["Slice"]


def test_a_permute_leaves_in_place_what_may_stay() -> None:
    mesh = Mesh.of(a=2, b=2)
    source, target = Sharding.of((64,), [(0,)]), Sharding.of((64,), [(1,)])
    (step,) = plan_reshard(source, target, mesh, NONE, 4096)
    # Devices (a, b): (0, 0) and (1, 1) hold what they need; (0, 1) and (1, 0) trade.
    assert sorted(permutation(step, mesh)) == [(0, 0), (1, 2), (2, 1), (3, 3)]


# -- facts of MindSpore's documents: device matrix, tensor map counted from the right, -1 unsharded


def from_map(devices: Sequence[int], tensor_map: Sequence[int], shape: Sequence[int]) -> Sharding:
    mesh = Mesh.refine(8, [(4, 2), (8,), (1, 8)])
    runs = mesh.matrix(devices)
    return Sharding.of(shape, [() if m < 0 else runs[len(devices) - 1 - m] for m in tensor_map])


def test_gather_over_two_dims() -> None:
    mesh = Mesh.refine(8, [(4, 2)])
    source = from_map((4, 2), (1, 0), (32, 256))
    target = Sharding.replicated((32, 256))
    steps = plan_reshard(source, target, mesh, NONE, 4)
    assert [s.kind for s in steps] == ["all_gather", "all_gather"]
    assert {mesh.group(0, s.atoms) for s in steps} == {(0, 2, 4, 6), (0, 1)}
    # Gathering the larger group first, while shards are smallest, moves fewer bytes in all:
    # 8·128·4·3 + 32·128·4·1 against 8·128·4·1 + 8·256·4·3.
    assert sum(s.bytes for s in steps) == 8 * 128 * 4 * 3 + 32 * 128 * 4
    array = np.arange(32 * 256, dtype=np.float32).reshape(32, 256)
    run(steps, source, target, array, mesh)


def test_gather_a_minor_part() -> None:
    mesh = Mesh.refine(8, [(4, 2)])
    source = from_map((8,), (0, -1), (32, 256))
    target = from_map((4, 2), (1, -1), (32, 256))
    (step,) = plan_reshard(source, target, mesh, NONE, 4)
    assert step.kind == "all_gather"
    assert mesh.group(0, step.atoms) == (0, 1)
    assert step.after.local_shape(mesh, NONE) == (8, 256)


def test_a_split_that_moves_is_one_all_to_all() -> None:
    mesh = Mesh.of(a=8)
    source = Sharding.of((32, 256), [(0, 1, 2), ()])
    target = Sharding.of((32, 256), [(), (0, 1, 2)])
    (step,) = plan_reshard(source, target, mesh, NONE, 4)
    assert (step.kind, step.bytes) == ("all_to_all", 4 * 256 * 4 * 7 // 8)


def test_reduce_scatter_rather_than_all_reduce_and_slice() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    tp = mesh.axis_atoms("tp")
    source = Sharding.of((16, 16), [mesh.axis_atoms("dp"), ()], tp)
    target = Sharding.of((16, 16), [mesh.axis_atoms("dp"), tp])
    (step,) = plan_reshard(source, target, mesh, NONE, 4)
    assert step.kind == "reduce_scatter"


def test_a_swap_of_equal_axes_is_one_permute() -> None:
    mesh = Mesh.of(a=2, b=2)
    (step,) = plan_reshard(
        Sharding.of((64,), [(0, 1)]), Sharding.of((64,), [(1, 0)]), mesh, NONE, 4096
    )
    assert step.kind == "permute"


def test_a_partial_target_needs_a_partial_source() -> None:
    mesh = Mesh.of(a=2)
    with pytest.raises(ShardingError, match="cannot make a value partial"):
        plan_reshard(Sharding.replicated((4,)), Sharding.of((4,), [()], (0,)), mesh, NONE, 4)


def test_a_large_mesh_is_planned_quickly_enough_to_be_planned_at_all() -> None:
    mesh = Mesh.of(a=1024)
    atoms = tuple(range(10))
    source = Sharding.of((2**12, 2**12, 2**12), [atoms[:4], atoms[4:7], atoms[7:]])
    target = Sharding.of((2**12, 2**12, 2**12), [atoms[7:], (), (*atoms[4:7], *atoms[:4])])
    steps = plan_reshard(source, target, mesh, NONE, 2)
    assert steps[-1].after == target
    assert all(isinstance(s.bytes, int) for s in steps)

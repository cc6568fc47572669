"""Virtual stages: the chain, its stage boundaries, and nodes that several stages compute."""

from itertools import combinations, pairwise

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.core.errors import StrategyError
from onnxpar.graph.pipeline_places import virtual_stage_of
from onnxpar.ops.table import REGISTRY
from onnxpar.stages.partition_chain import (
    BALANCE,
    Chain,
    Costs,
    chain_of,
    partition_chain,
    where_needed,
)
from onnxpar.stages.place_nodes import put_stages


def graph(text: str, initializers: str = "") -> ir.Graph:
    """A graph of matrices from its body: on `x`, with the result `y`."""
    head = '<ir_version: 10, opset_import: ["": 20]> g (float[n, n] x) => (float[n, n] y)'
    model = onnx.parser.parse_model(f"{head} {initializers} {{ {text} }}")
    made = ir.from_proto(model).graph
    for node in made:
        node.name = node.outputs[0].name
    return made


def chain(edges: list[tuple[int, int]], count: int) -> Chain:
    """A chain of `count` nodes; an edge (a, b) makes node b read the result of node a."""
    values: list[ir.Value] = []
    nodes = []
    for i in range(count):
        read = [values[a] for a, b in edges if b == i]
        node = ir.Node("", "Sum", read, num_outputs=1, name=f"n{i}")
        node.outputs[0].name = f"v{i}"
        values.append(node.outputs[0])
        nodes.append(node)
    reads = {n: tuple(v for v in n.inputs if v is not None) for n in nodes}
    return Chain(tuple(nodes), reads)


@pytest.mark.parametrize(
    ("seed", "long"), [*((seed, False) for seed in range(60)), *((seed, True) for seed in range(8))]
)
def test_boundaries_are_the_best_of_all(seed: int, long: bool) -> None:
    """Compares with all choices of boundaries: near the least bottleneck, the least traffic.

    For a long chain, the search begins with a partition with boundaries at few positions.
    """
    virtual_stages = 2 + seed % (2 if long else 3)
    rng = np.random.default_rng(seed)
    count = int(rng.integers(48, 60) if long else rng.integers(virtual_stages, 9))
    edges = [(i, i + 1) for i in range(count - 1)]
    share = 0.02 if long else 0.2
    edges += [
        (a, b) for a, b in combinations(range(count), 2) if b > a + 1 and rng.random() < share
    ]
    line = chain(edges, count)
    seconds = {f"n{i}": float(rng.integers(1, 9)) for i in range(count)}
    crossing = {f"v{i}": float(rng.integers(1, 5)) for i in range(count)}

    def move(boundary: int) -> float:
        if boundary in (0, count):
            return 0.0
        passing = {a for a, b in edges if a < boundary <= b}
        return sum(crossing[f"v{a}"] for a in passing)

    def judged(boundaries: tuple[int, ...]) -> tuple[float, float]:
        ends = (0, *boundaries, count)
        times = [
            sum(seconds[f"n{i}"] for i in range(a, b)) + move(a) + move(b)
            for a, b in pairwise(ends)
        ]
        return max(times), sum(move(b) for b in boundaries)

    every = [judged(chosen) for chosen in combinations(range(1, count), virtual_stages - 1)]
    least = min(worst for worst, _ in every)
    want = min(traffic for worst, traffic in every if worst <= least * (1 + BALANCE) + 1e-12)
    found = partition_chain(line, virtual_stages, {}, Costs(seconds, crossing))
    where = [found[node] for node in line.nodes]
    assert where == sorted(where) and set(where) == set(range(virtual_stages))
    worst, traffic = judged(tuple(where.index(p) for p in range(1, virtual_stages)))
    assert worst <= least * (1 + BALANCE) + 1e-12
    assert traffic == pytest.approx(want)


@pytest.mark.parametrize(
    ("count", "fixed", "want"),
    [
        (2, {}, [0, 0, 0, 0, 1, 1, 1, 1]),
        (2, {"n1": 1}, [0, 1, 1, 1, 1, 1, 1, 1]),
        (2, {"n6": 0}, [0, 0, 0, 0, 0, 0, 0, 1]),
        (3, {"n2": 1, "n5": 1}, [0, 0, 1, 1, 1, 1, 2, 2]),
    ],
)
def test_assigned_nodes_stay_and_the_others_follow_cost(
    count: int, fixed: dict[str, int], want: list[int]
) -> None:
    line = chain([(i, i + 1) for i in range(7)], 8)
    costs = Costs({f"n{i}": 1.0 for i in range(8)})
    assert list(partition_chain(line, count, fixed, costs).values()) == want


def _slowest_stage(virtual: list[int], seconds: list[float], stages: int) -> float:
    times = [0.0] * stages
    for each, spent in zip(virtual, seconds, strict=True):
        times[each % stages] += spent
    return max(times)


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "slowest"), [(40, 8, 2, 5), (80, 8, 4, 10), (96, 16, 4, 6)]
)
def test_stages_of_equal_layers_have_equally_many(
    layers: int, stages: int, chunks: int, slowest: int
) -> None:
    """Layers of two nodes, between which more is sent than between layers."""
    line = chain([(i, i + 1) for i in range(2 * layers - 1)], 2 * layers)
    costs = Costs(
        {f"n{i}": 0.5 for i in range(2 * layers)},
        {f"v{i}": 0.01 + 2.0 * (1 - i % 2) for i in range(2 * layers)},
    )
    virtual = list(partition_chain(line, stages * chunks, {}, costs, stages=stages).values())
    assert virtual == sorted(virtual)
    assert all(a == b for a, b in zip(virtual[::2], virtual[1::2], strict=True))
    assert _slowest_stage(virtual, [0.5] * 2 * layers, stages) == slowest


@pytest.mark.parametrize("seed", range(20))
def test_stages_of_unequal_nodes_are_near_the_best(seed: int) -> None:
    """Compares with all choices of boundaries that have the same limit on virtual stages."""
    rng = np.random.default_rng(seed)
    count, stages, virtual_stages = 14, 2, 4
    line = chain([(i, i + 1) for i in range(count - 1)], count)
    seconds = [float(rng.integers(4, 9)) for _ in range(count)]
    costs = Costs({f"n{i}": s for i, s in enumerate(seconds)})
    virtual = list(partition_chain(line, virtual_stages, {}, costs, stages=stages).values())

    def parts(inner: tuple[int, ...]) -> list[int]:
        return [sum(i >= b for b in inner) for i in range(count)]

    every = [parts(inner) for inner in combinations(range(1, count), virtual_stages - 1)]
    bottleneck = [_slowest_stage(each, seconds, virtual_stages) for each in every]
    limit = min(bottleneck) * (1 + BALANCE)
    allowed = [e for e, most in zip(every, bottleneck, strict=True) if most <= limit + 1e-9]
    assert virtual in allowed
    best = min(_slowest_stage(each, seconds, stages) for each in allowed)
    # Half of the longest node is the least by which one boundary cannot improve on two stages.
    assert _slowest_stage(virtual, seconds, stages) <= best + max(seconds) / 2


def test_nodes_beside_the_line_go_where_they_must() -> None:
    """n2 depends on nothing before it and must be early, although it comes late in the graph."""
    beside = chain([(0, 1), (2, 3), (1, 4), (3, 4)], 5)
    costs = Costs({"n0": 1.0, "n1": 1.0, "n2": 1.0, "n3": 1.0, "n4": 3.0})
    found = partition_chain(beside, 2, {"n1": 1, "n3": 0}, costs)
    assert [found[node] for node in beside.nodes] == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("count", "fixed", "message"),
    [
        (2, {"n1": 1, "n3": 0}, "node 'n3' is assigned to virtual stage 0, but it reads a value "
         "from node 'n1' of virtual stage 1"),
        (3, {"n0": 0, "n1": 2}, "no room for the stage boundary before virtual stage 2: it must "
                                "come after "),
        (2, {"n0": 1}, "before virtual stage 1: it must come before node 'n0', with a"),
        (9, {}, "expected at least 9 nodes, one for each virtual stage, got 4"),
    ],
)  # fmt: skip
def test_contradictions_name_nodes(count: int, fixed: dict[str, int], message: str) -> None:
    line = chain([(i, i + 1) for i in range(3)], 4)
    with pytest.raises(StrategyError, match=message):
        partition_chain(line, count, fixed, Costs())


WEIGHTS = "<float[2, 2] w = {1, 2, 3, 4}, float[2, 2] v = {1, 2, 3, 4}>"


def test_masks_and_prepared_weights_are_not_in_the_chain() -> None:
    made = graph(
        "m = Sign(x) t = Transpose(w) a = MatMul(x, t) b = Mul(a, m) "
        "c = MatMul(b, t) y = Mul(c, m)",
        WEIGHTS,
    )
    found = chain_of(made, {"w", "v"}, REGISTRY)
    assert [n.name for n in found.nodes] == ["a", "b", "c", "y"]
    by_name = {n.name: n for n in found.nodes}
    virtual = {by_name[n]: p for n, p in (("a", 0), ("b", 0), ("c", 1), ("y", 1))}
    copies = put_stages(made, where_needed(made, virtual), {"w"}, 2)
    stages = {n.name: virtual_stage_of(n) for n in made}
    assert stages == {"m": 0, "m@1": 1, "t": 0, "t@1": 1, "a": 0, "b": 0, "c": 1, "y": 1}
    reads = {n.name: [v.name for v in n.inputs if v is not None] for n in made}
    assert reads["y"] == ["c", "m@1"] and reads["b"] == ["a", "m"]
    assert reads["c"] == ["b", "t@1"]
    # The weight that both read is one for each stage.
    assert reads["t"] == ["w"] and reads["t@1"] == ["w@1"]
    assert {name: (c.original, c.stage) for name, c in copies.items()} == {"w@1": ("w", 1)}


def test_virtual_stages_of_one_stage_share_a_weight() -> None:
    made = graph("a = MatMul(x, w) b = MatMul(a, v) y = MatMul(b, w)", WEIGHTS)
    found = chain_of(made, {"w", "v"}, REGISTRY)
    virtual = dict(zip(found.nodes, (0, 1, 2), strict=True))
    # Virtual stage 2 is on stage 0 again.
    assert put_stages(made, where_needed(made, virtual), {"w", "v"}, 2) == {}


def test_without_weights_all_nodes_are_in_the_chain() -> None:
    made = graph("a = Relu(x) y = Sigmoid(a)")
    assert [n.name for n in chain_of(made, set(), REGISTRY).nodes] == ["a", "y"]


def test_a_node_that_draws_is_in_the_chain() -> None:
    made = graph(
        "t = Constant<value = bool {1}>() r = Constant<value = float {0.5}>() "
        "d = Dropout(x, r, t) a = MatMul(d, w) b = MatMul(a, w) y = Add(b, d)",
        WEIGHTS,
    )
    assert chain_of(made, {"w"}, REGISTRY).nodes[0].name == "d"

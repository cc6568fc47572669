"""Which reshards the planner chooses: never dearer than an exhaustive search, never too long."""

import random
import time
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import combinations, count, pairwise, permutations
from math import prod

import pytest
import sympy

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import Component, Sharding
from onnxpar.core.symbols import Symbol, SymbolTable, dim_symbol
from onnxpar.resharding.routes import Route, cheapest_route, moved_bytes, plan_reshard
from onnxpar.resharding.shortest_path import Move, PathState, RouteFinder, cheapest

NONE = SymbolTable({})


def kinds(source: Sharding, target: Sharding, mesh: Mesh, itemsize: int = 4) -> list[str]:
    return [step.kind for step in plan_reshard(source, target, mesh, NONE, itemsize)]


# -- against an exhaustive search --------------------------------------------------------------


def every_move(state: PathState, sizes: tuple[int, ...], atoms: tuple[int, ...]) -> Iterator[Move]:
    """All legal moves, atom by atom, written apart from the planner's."""
    slots, partial = state
    free = [a for a in range(len(atoms)) if a not in partial]

    def put(**runs: Atoms) -> tuple[Atoms, ...]:
        return tuple(runs.get(f"s{i}", run) for i, run in enumerate(slots))

    def sides(run: Atoms) -> list[int]:
        return [atoms[a] for a in run]

    for s, run in enumerate(slots):
        replicated = [a for a in free if not any(a in other for other in slots)]
        for length in range(1, len(replicated) + 1):
            for moved in permutations(replicated, length):
                yield Move("slice", moved, None, s, (put(**{f"s{s}": run + moved}), partial))
        for length in range(len(run)):
            kept, moved = run[:length], run[length:]
            yield Move("all_gather", moved, s, None, (put(**{f"s{s}": kept}), partial))
            for t, other in enumerate(slots):
                if t != s:
                    after = put(**{f"s{s}": kept, f"s{t}": other + moved})
                    yield Move("all_to_all", moved, s, t, (after, partial))
        for length in range(1, len(partial) + 1):
            for moved in permutations(sorted(partial), length):
                after = put(**{f"s{s}": run + moved})
                yield Move("reduce_scatter", moved, None, s, (after, partial - set(moved)))
    for length in range(1, len(partial) + 1):
        for chosen in combinations(sorted(partial), length):
            yield Move("all_reduce", chosen, None, None, (slots, partial - set(chosen)))
    for order in permutations(free, sum(map(len, slots))):
        left = list(order)
        after = tuple(tuple(left.pop(0) for _ in run) for run in slots)
        changed = [(s, a, b) for s, (a, b) in enumerate(zip(slots, after, strict=True)) if a != b]
        if changed and all(
            sides(a) == sides(b)
            or (prod(sides(a)) == prod(sides(b)) and sizes[s] % prod(sides(a)) == 0)
            for s, a, b in changed
        ):
            moved = tuple(sorted({atom for _, a, b in changed for atom in a + b}))
            yield Move("permute", moved, None, None, (after, partial))


def exhaustive(
    search: RouteFinder, start: PathState, sizes: tuple[int, ...], atoms: tuple[int, ...]
) -> float:
    """The cost of the cheapest of all paths."""
    tie = count()
    queue: list[tuple[float, int, PathState]] = [(0.0, next(tie), start)]
    best = {start: 0.0}
    while queue:
        price, _, state = heappop(queue)
        if state == search.goal:
            return price
        if price > best[state]:
            continue
        for move in every_move(state, sizes, atoms):
            after = price + search.cost(state, move)
            if after < best.get(move.after, float("inf")):
                best[move.after] = after
                heappush(queue, (after, next(tie), move.after))
    raise AssertionError("every goal can be reached")


def random_state(rng: random.Random, atoms: int, slots: int, partial: bool) -> PathState:
    runs: list[list[int]] = [[] for _ in range(slots + 2)]
    for a in rng.sample(range(atoms), atoms):
        runs[rng.randrange(slots + 1 + partial)].append(a)
    # The run before the last one is replicated.
    return tuple(tuple(r) for r in runs[:slots]), frozenset(runs[slots + 1])


@pytest.mark.parametrize(
    ("atoms", "sizes"),
    [((2, 2, 2), (64, 64)), ((2, 2), (64, 32, 16)), ((2, 3, 2), (96, 48)), ((2, 2, 2), (7, 5))],
    ids=str,
)
def test_no_path_is_cheaper(atoms: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    mesh = Mesh.of({f"x{i}": size for i, size in enumerate(atoms)})

    def even(s: int, shards: int) -> bool:
        return sizes[s] % shards == 0

    seed = random.randrange(2**32)
    rng = random.Random(seed)
    compared = 0
    while compared < 20:
        start = random_state(rng, len(atoms), len(sizes), True)
        goal = random_state(rng, len(atoms), len(sizes), False)
        itemsize = rng.choice([4, 4096])
        path = cheapest(mesh, sizes, even, start, goal, itemsize)
        search = RouteFinder(tuple((n,) for n in atoms), sizes, even, goal, itemsize)
        price = search.price(start, path)
        least = exhaustive(search, start, sizes, atoms)
        text = f"seed {seed}: {start} -> {goal}: {[(m.kind, m.atoms) for m in path]}"
        # The planner leaves alone what agrees and what neither side uses, and keeps neighbours
        # together; only where none of that holds must it find the best of all paths.
        if every_atom_moves(start, goal, len(atoms)):
            compared += 1
            # Two slices where one would do count one byte more.
            assert price <= least + len(atoms), text
        else:
            assert price >= least * (1 - 1e-9), text


def every_atom_moves(start: PathState, goal: PathState, atoms: int) -> bool:
    used = {a for run in (*start[0], *goal[0]) for a in run} | start[1]
    agree = any(a[:1] == b[:1] != () for a, b in zip(start[0], goal[0], strict=True))
    pairs = [{p for run in state[0] for p in pairwise(run)} for state in (start, goal)]
    placed = [{a for run in state[0] for a in run} for state in (start, goal)]
    together = (
        pairs[0] & pairs[1]
        or {p for p in pairs[0] if not set(p) & placed[1]}
        or {p for p in pairs[1] if set(p) <= start[1] or not set(p) & (placed[0] | start[1])}
        or len(start[1] - placed[1]) > 1
    )
    return len(used) == atoms and not agree and not together


# -- what is chosen -------------------------------------------------------------------------------


def test_nothing_to_do_is_no_step() -> None:
    mesh = Mesh.of(a=2, b=2)
    assert kinds(Sharding.of((8,), [(0,)]), Sharding.of((8,), [(0,)]), mesh) == []
    # The same elements on every device, in terms of other components.
    fused = Sharding(((Component(2, (0,)), Component(32, (1,))),))
    assert kinds(fused, Sharding.of((64,), [(0, 1)]), mesh) == []
    split = Sharding(((Component(16, (0,)), Component(4)),))
    assert kinds(split, Sharding.of((64,), [(0,)]), mesh) == []


def test_an_atom_behind_another_is_put_first_by_a_permute() -> None:
    mesh = Mesh.of(a=2, b=2)
    # [a] -> [b, a]: a slice by b at the minor end sends nothing, and the permute a quarter of the
    # value; gathering a first would send half of it.
    source, target = Sharding.of((64,), [(0,)]), Sharding.of((64,), [(1, 0)])
    steps = plan_reshard(source, target, mesh, NONE, 4096)
    assert [s.kind for s in steps] == ["slice", "permute"]
    assert steps[1].bytes == 64 * 4096 // 4


def test_a_major_atom_is_dropped_by_permute_and_gather() -> None:
    mesh = Mesh.of(a=2, b=2)
    source, target = Sharding.of((64,), [(0, 1)]), Sharding.of((64,), [(1,)])
    steps = plan_reshard(source, target, mesh, NONE, 4096)
    assert [s.kind for s in steps] == ["permute", "all_gather"]
    # Half of the value in all, where gathering both atoms sends three quarters of it.
    assert sum(int(s.bytes) for s in steps) == 64 * 4096 // 2


def test_a_small_value_takes_the_path_of_fewest_collectives() -> None:
    mesh = Mesh.of(a=2, b=2)
    source, target = Sharding.of((64,), [(0, 1)]), Sharding.of((64,), [(1,)])
    assert kinds(source, target, mesh, itemsize=1) == ["all_gather", "slice"]


def test_slices_that_cost_nothing_come_before_a_gather() -> None:
    mesh = Mesh.of(a=2, b=4)
    source = Sharding.of((64, 64), [(0,), ()])
    target = Sharding.of((64, 64), [(), (1, 2)])
    assert kinds(source, target, mesh, itemsize=64) == ["slice", "all_gather"]


def test_a_part_of_the_pending_reduction_is_left_pending() -> None:
    mesh = Mesh.of(a=2, b=2)
    source = Sharding.of((64,), [()], (0, 1))
    (step,) = plan_reshard(source, Sharding.of((64,), [()], (1,)), mesh, NONE, 4)
    assert (step.kind, step.atoms, step.after.partial) == ("all_reduce", (0,), (1,))


def test_two_pending_atoms_are_one_reduction() -> None:
    mesh = Mesh.of(a=2, b=2)
    source = Sharding.of((64,), [()], (0, 1))
    (step,) = plan_reshard(source, Sharding.replicated((64,)), mesh, NONE, 4)
    assert (step.kind, step.atoms) == ("all_reduce", (0, 1))
    assert step.bytes == 2 * 64 * 4 * 3 // 4


def test_components_that_line_up_stay_where_they_are() -> None:
    mesh = Mesh.of(dp=2, tp=2)
    batch = dim_symbol("batch")
    table = SymbolTable({"batch": Symbol()})
    # (batch, 6) against (batch, 4), where batch is split unevenly: only the heads move.
    source = Sharding(((Component(batch, (0,)), Component(6, (1,)), Component(4)),))
    target = Sharding(((Component(batch, (0,)), Component(4, (1,)), Component(6)),))
    steps = plan_reshard(source, target, mesh, table, 4)
    assert all(step.atoms == (1,) for step in steps)
    assert all(0 in step.after.split_atoms for step in steps)


def test_components_that_do_not_line_up_are_gathered_run_by_run() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    batch = dim_symbol("batch")
    source = Sharding(((Component(8, (1, 2)), Component(batch, (0,))),))
    target = Sharding(((Component(batch, (0,)), Component(8, (1, 2))),))
    steps = plan_reshard(source, target, mesh, SymbolTable({"batch": Symbol()}), 4)
    assert [(s.kind, s.atoms) for s in steps] == [
        ("all_gather", (1, 2)),
        ("all_gather", (0,)),
        ("slice", (1, 2)),
        ("slice", (0,)),
    ]


def test_a_value_is_brought_from_where_it_costs_least() -> None:
    mesh = Mesh.of(a=2, b=2)
    rows, columns = (Sharding.of((64, 64), dims) for dims in ([(0, 1), ()], [(), (0, 1)]))
    partials = Sharding.of((64, 64), [(), ()], (0, 1))
    replicated = Sharding.replicated((64, 64))
    there = (partials, columns, rows)
    assert cheapest_route(there, columns, mesh, NONE, 4) == Route(columns, (), 0)
    route = cheapest_route(there, Sharding.of((64, 64), [(0,), ()]), mesh, NONE, 4)
    assert route.source == rows and [s.kind for s in route.steps] == ["all_gather"]
    # Of two equally cheap sources the first is taken; a replicated value is sliced at no cost.
    assert cheapest_route(there, replicated, mesh, NONE, 4).source == columns
    halves = Sharding.of((64, 64), [(1,), ()])
    assert cheapest_route((*there, replicated), halves, mesh, NONE, 4).bytes == 0
    # Only a partial value can stay partial.
    half = Sharding.of((64, 64), [(), ()], (0,))
    assert cheapest_route(there[::-1], half, mesh, NONE, 4).source == partials
    with pytest.raises(ShardingError, match="cannot make a value partial sum"):
        cheapest_route((rows, columns), half, mesh, NONE, 4)


def test_padding_is_sent_too_and_counted() -> None:
    mesh = Mesh.of(a=4)
    source = Sharding.of((5, 8), [(), (0, 1)])
    target = Sharding.of((5, 8), [(0, 1), ()])
    (step,) = plan_reshard(source, target, mesh, NONE, 4)
    # 5 rows over 4 devices are 2 rows each, 8 with padding, of 2 columns: 3 quarters of 64 bytes.
    assert (step.kind, step.bytes) == ("all_to_all", 3 * 8 * 2 * 4 // 4)


@pytest.mark.parametrize(
    ("kind", "operand", "group", "sent"),
    [
        ("all_reduce", 10, 4, 15),
        ("all_reduce", 1, 4, 1),
        ("all_gather", 10, 4, 30),
        ("reduce_scatter", 40, 4, 30),
        ("all_to_all", 40, 4, 30),
        ("permute", 10, 4, 10),
    ],
)
def test_bytes_of_static_and_symbolic_operands_agree(
    kind: str, operand: int, group: int, sent: int
) -> None:
    n = dim_symbol("n")
    assert moved_bytes(kind, operand, group) == sent
    symbolic = moved_bytes(kind, n, group)
    assert isinstance(symbolic, sympy.Expr)
    assert SymbolTable({"n": Symbol()}).evaluate(symbolic, {"n": operand}) == sent


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (Sharding.replicated((4,)), Sharding.of((4,), [()], (0,)), "cannot make a value partial"),
        (
            Sharding.of((4,), [()], (0,), "max"),
            Sharding.of((4,), [()], (0,), "sum"),
            "cannot make a value partial sum over a: it is .* partial max",
        ),
        (Sharding.replicated((4,)), Sharding.replicated((4, 1)), "shape"),
        (Sharding.replicated((4,)), Sharding.replicated((5,)), "shape"),
    ],
)
def test_what_cannot_be_done_is_refused(source: Sharding, target: Sharding, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        plan_reshard(source, target, Mesh.of(a=2), NONE, 4)


def test_a_thousand_devices_do_not_explode() -> None:
    """Random reshards of a three-dim value over ten atoms; each in seconds at the very worst."""
    mesh = Mesh.of(x=1024)
    table = SymbolTable({"n": Symbol()})
    shape = (dim_symbol("n"), 4096, 4096)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    longest = 0.0
    for _ in range(30):
        start, goal = (random_state(rng, 10, 3, partial) for partial in (True, False))
        source = Sharding.of(shape, start[0], start[1])
        target = Sharding.of(shape, goal[0])
        begin = time.process_time()
        steps = plan_reshard(source, target, mesh, table, 4)
        longest = max(longest, time.process_time() - begin)
        state = steps[-1].after if steps else source
        assert state.canonical(mesh, table) == target.canonical(mesh, table), f"seed {seed}"
    # Some tens of milliseconds are usual; the bound tells a bounded search from an unbounded one.
    assert longest < 3, f"seed {seed}"

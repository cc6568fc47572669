"""Every operator against numpy: element types, reductions, axes and groups.

Reductions of floats use small integers, whose sums and products are exact in every type here
(|sum| <= 4*8 and |product| <= 2^4 need 6 bits, bfloat16 has 8), so that equality is exact whatever
the order. Rounding is tested apart.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest

from onnxpar_runtime.collectives import Rank
from tests.runtime.collectives.teams import (
    ON_DEVICE,
    UNDER_MPI,
    Team,
    feed,
    group_of,
    groups_of,
    run_text,
    same_everywhere,
    session,
)

FLOATS = {
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
INTEGERS = {
    f"{u}int{bits}": np.dtype(f"{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)
}
TYPES = {**FLOATS, **INTEGERS, "bool": np.dtype(np.bool_)}
REDUCERS = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
SHAPES = [(8,), (4, 8), (4, 3, 8), (8, 1, 4)]


def values(kind: str, shape: tuple[int, ...], rank: int, small: bool = True) -> np.ndarray:
    """The local tensor of a rank: the same on every process that asks."""
    rng = np.random.default_rng([rank, *shape])
    dtype = TYPES[kind]
    if kind == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    if kind in INTEGERS:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    low, high = (-2, 2) if small else (-8, 8)
    return rng.integers(low, high, shape, endpoint=True).astype(dtype)


def reduced(reduction: str, arrays: list[np.ndarray]) -> np.ndarray:
    """The reduction with numpy; integers wrap, bool is "or" and "and"."""
    out = arrays[0]
    for array in arrays[1:]:
        out = REDUCERS[reduction](out, array)
    return out.astype(arrays[0].dtype)


def refused(team: Team, kind: str) -> bool:
    """Whether the transport has no arithmetic of the type."""
    return ON_DEVICE == "nccl" and kind in ("int16", "uint16") and team.size > 1


not_by_nccl = pytest.mark.skipif(
    ON_DEVICE == "nccl", reason="NCCL's own arithmetic: rounds at every step, drops NaN in max"
)


@pytest.mark.parametrize("kind", TYPES)
def test_all_reduce(team: Team, kind: str) -> None:
    shape = (3, 67)
    cases = list(itertools.product(groups_of(team.size), REDUCERS))

    def act(rank: Rank) -> None:
        nodes, names = [], []
        for i, (groups, reduction) in enumerate(cases):
            token = f", t{i - 1}" if i else ""
            group = group_of(groups, rank)
            nodes.append(
                f'y{i}, t{i} = onnxpar.AllReduce <group={group}, reduction="{reduction}"> '
                f"(x{token})"
            )
            names.append(f"{kind}[n, m] y{i}")
        text = f"g ({kind}[n, m] x) => ({', '.join(names)}) {{ {' '.join(nodes)} }}"
        got = run_text(rank, text, x=values(kind, shape, rank.index))
        for (groups, reduction), y in zip(cases, got, strict=True):
            members = [values(kind, shape, r) for r in group_of(groups, rank)]
            np.testing.assert_array_equal(y, reduced(reduction, members), err_msg=reduction)

    if refused(team, kind):
        if UNDER_MPI:
            pytest.skip("an error ends the job")
        with pytest.raises(Exception, match=f"AllReduce .*NCCL has no [a-z]+ of {kind}; cast it"):
            team.run(act)
    else:
        team.run(act)


@pytest.mark.parametrize("kind", TYPES)
def test_movement_of_every_type(team: Team, kind: str) -> None:
    n = team.size
    group = list(range(n))
    pairs = [p for r in range(n) for p in (r, (r + 1) % n)]
    scatter = f'onnxpar.ReduceScatter <group={group}, axis=0, reduction="max"> (x, t0)'
    if refused(team, kind):  # the same values without arithmetic
        scatter = f"onnxpar.AllToAll <group={group}, split_axis=0, concat_axis=0> (x, t0)"
    text = f"""g ({kind}[a, b] x) => ({kind}[c, b] g0, {kind}[d, b] s0, {kind}[e, f] a0,
      {kind}[a, b] b0, {kind}[a, b] p0) {{
      g0, t0 = onnxpar.AllGather <group={group}, axis=0> (x)
      s0, t1 = {scatter}
      a0, t2 = onnxpar.AllToAll <group={group}, split_axis=1, concat_axis=0> (x, t1)
      b0, t3 = onnxpar.Broadcast <group={group}, root={n - 1}> (x, t2)
      p0, t4 = onnxpar.Permute <group={group}, pairs={pairs}> (x, t3) }}"""
    xs = [values(kind, (4, 8), r) for r in range(n)]

    def act(rank: Rank) -> None:
        r = rank.index
        got = run_text(rank, text, x=xs[r])
        columns = [np.split(x, n, axis=1)[r] for x in xs]
        rows = [np.split(x, n)[r] for x in xs]
        expected = [
            np.concatenate(xs),
            np.concatenate(rows) if refused(team, kind) else np.split(reduced("max", xs), n)[r],
            np.concatenate(columns, axis=0),
            xs[n - 1],
            xs[(r - 1) % n],
        ]
        for y, want in zip(got, expected, strict=True):
            assert y.dtype == want.dtype
            np.testing.assert_array_equal(y, want)

    team.run(act)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_axis_and_group(team: Team, shape: tuple[int, ...]) -> None:
    dims = ", ".join(f"d{i}" for i in range(len(shape)))
    axes = range(-len(shape), len(shape))
    plans = []
    for groups in groups_of(team.size):
        g = len(groups[0])
        divides = [a for a in axes if shape[a] % g == 0]
        plans += [("AllGather", groups, (a,)) for a in axes]
        plans += [("ReduceScatter", groups, (a,)) for a in divides]
        plans += [("AllToAll", groups, (a, b)) for a in divides for b in axes]
    xs = [values("int32", shape, r) for r in range(team.size)]

    def expected(op: str, group: list[int], arguments: tuple[int, ...], r: int) -> np.ndarray:
        members = [xs[m] for m in group]
        at, g = group.index(r), len(group)
        if op == "AllGather":
            return np.concatenate(members, axis=arguments[0])
        if op == "ReduceScatter":
            return np.split(reduced("sum", members), g, axis=arguments[0])[at]
        split, concat = arguments
        return np.concatenate([np.split(m, g, axis=split)[at] for m in members], axis=concat)

    def act(rank: Rank) -> None:
        nodes, names = [], []
        for i, (op, groups, arguments) in enumerate(plans):
            keys = ["axis"] if len(arguments) == 1 else ["split_axis", "concat_axis"]
            attributes = ", ".join(f"{k}={v}" for k, v in zip(keys, arguments, strict=True))
            token = f", t{i - 1}" if i else ""
            nodes.append(
                f"y{i}, t{i} = onnxpar.{op} <group={group_of(groups, rank)}, {attributes}> "
                f"(x{token})"
            )
            sizes = ", ".join(f"y{i}d{d}" for d in range(len(shape)))
            names.append(f"int32[{sizes}] y{i}")
        text = f"g (int32[{dims}] x) => ({', '.join(names)}) {{ {' '.join(nodes)} }}"
        got = run_text(rank, text, x=xs[rank.index])
        for (op, groups, arguments), y in zip(plans, got, strict=True):
            want = expected(op, group_of(groups, rank), arguments, rank.index)
            np.testing.assert_array_equal(y, want, err_msg=f"{op} {groups} {arguments}")

    team.run(act)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1_000, 1_048_577 + 5, 2_500_003])
def test_sizes_around_pieces_and_cache_lines(team: Team, count: int) -> None:
    """4 MiB pieces have 1,048,576 elements of float32; a rank's share is a multiple of 64."""
    text = """g (float[n] x) => (float[n] y) {
        y, t = onnxpar.AllReduce <reduction="sum"> (x) }"""
    x = (np.arange(count) % 97).astype(np.float32)
    size = team.size
    scale = size * (size + 1) / 2  # exact: 96 * 10 < 2^24

    def act(rank: Rank) -> None:
        np.testing.assert_array_equal(run_text(rank, text, x=x * (rank.index + 1))[0], x * scale)

    team.run(act)


def test_large_reduce_scatter_goes_in_pieces(team: Team) -> None:
    """More than 4 MiB in all, and a share that the pieces do not divide."""
    n = team.size
    share = 600_001
    text = """g (int32[n] x) => (int32[m] y) {
        y, t = onnxpar.ReduceScatter <axis=0, reduction="sum"> (x) }"""
    x = np.arange(share * n, dtype=np.int32)

    def act(rank: Rank) -> None:
        want = n * x[rank.index * share : (rank.index + 1) * share] + n * (n - 1) // 2
        np.testing.assert_array_equal(run_text(rank, text, x=x + rank.index)[0], want)

    team.run(act)


@not_by_nccl
@pytest.mark.parametrize("op", ["AllReduce", "ReduceScatter"])
@pytest.mark.parametrize("reduction", ["sum", "prod"])
@pytest.mark.parametrize(("kind", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_16_bit_floats_are_rounded_once(
    team: Team, kind: str, bits: int, reduction: str, op: str
) -> None:
    """They accumulate in float32 on every transport, and only the result is rounded.

    The rounding is at most 2^-bits of the result (2^-25 below the smallest normal float16). Each of
    the size - 1 float32 steps errs by at most 2^-24 of the sum of |x|, or of the product, whatever
    the order. Two operands commute, so that nothing is left open.
    """
    dtype = TYPES[kind]
    xs = [
        np.random.default_rng(r).standard_normal(4096).astype(np.float32).astype(dtype)
        for r in range(team.size)
    ]
    single = REDUCERS[reduction].reduce([x.astype(np.float32) for x in xs])
    exact = REDUCERS[reduction].reduce([x.astype(np.float64) for x in xs])
    scale = sum(np.abs(x.astype(np.float64)) for x in xs) if reduction == "sum" else np.abs(exact)
    bound = 2.0**-bits * np.abs(exact) + 2.0**-25 + (team.size - 1) * 2.0**-24 * scale
    attributes = f'reduction="{reduction}"' + (", axis=0" if op == "ReduceScatter" else "")
    text = f"g ({kind}[n] x) => ({kind}[m] y) {{ y, t = onnxpar.{op} <{attributes}> (x) }}"

    def act(rank: Rank) -> None:
        share = 4096 // team.size
        mine = slice(rank.index * share, (rank.index + 1) * share)
        mine = mine if op == "ReduceScatter" else slice(None)
        y = run_text(rank, text, x=xs[rank.index])[0]
        if team.size <= 2:
            assert y.tobytes() == single[mine].astype(dtype).tobytes()
        assert np.all(np.abs(y.astype(np.float64) - exact[mine]) <= bound[mine])
        assert op == "ReduceScatter" or same_everywhere(rank, y.tobytes()), "ranks differ"

    team.run(act)


def test_16_bit_floats_in_several_pieces(team: Team) -> None:
    """Longer than what MPI reduces at a time; small integers are exact."""
    count = (1 << 21) + 4
    text = """g (float16[n] x) => (float16[n] a, float16[m] b) {
        a, t = onnxpar.AllReduce (x)
        b, u = onnxpar.ReduceScatter <axis=0> (x, t) }"""
    x = (np.arange(count) % 61).astype(np.float16)
    total = x * team.size + team.size * (team.size - 1) // 2

    def act(rank: Rank) -> None:
        a, b = run_text(rank, text, x=x + np.float16(rank.index))
        np.testing.assert_array_equal(a, total)
        share = count // team.size
        np.testing.assert_array_equal(b, total[rank.index * share : (rank.index + 1) * share])

    team.run(act)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_every_16_bit_float_survives_conversion(team: Team, kind: str) -> None:
    """All 65,536 patterns, through float32 and back: max(x, x) is x, with NaN kept NaN."""
    dtype = TYPES[kind]
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    text = f"""g ({kind}[n] x) => ({kind}[n] y) {{
        y, t = onnxpar.AllReduce <reduction="max"> (x) }}"""

    def act(rank: Rank) -> None:
        y = run_text(rank, text, x=x)[0]
        nan = np.isnan(x.astype(np.float32))
        np.testing.assert_array_equal(y.view(np.uint16)[~nan], x.view(np.uint16)[~nan])
        assert np.isnan(y.astype(np.float32)[nan]).all()

    team.run(act)


@not_by_nccl
@pytest.mark.parametrize("kind", FLOATS)
def test_nan_and_signed_zero_are_the_same_on_every_rank(team: Team, kind: str) -> None:
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]
    rows = list(itertools.product(special, repeat=2))
    columns = np.array(rows).T.astype(TYPES[kind])
    text = f"""g ({kind}[n] x) => ({kind}[n] a, {kind}[n] b) {{
        a, t = onnxpar.AllReduce <reduction="max"> (x)
        b, u = onnxpar.AllReduce <reduction="min"> (x, t) }}"""

    def act(rank: Rank) -> None:
        top, bottom = run_text(rank, text, x=columns[rank.index % 2])
        used = columns[: min(team.size, 2)].astype(np.float32)
        np.testing.assert_array_equal(top.astype(np.float32), used.max(axis=0))
        np.testing.assert_array_equal(bottom.astype(np.float32), used.min(axis=0))
        assert same_everywhere(rank, top.tobytes() + bottom.tobytes()), "ranks differ"

    team.run(act)


def test_float_sums_are_equal_on_all_ranks_and_from_run_to_run(team: Team) -> None:
    text = "g (float[n] x) => (float[n] y) { y, t = onnxpar.AllReduce (x) }"

    def act(rank: Rank) -> None:
        sess = session(rank, text)
        for count in (7, 4096, 300_000):
            x = np.random.default_rng(rank.index).standard_normal(count).astype(np.float32)
            first = feed(sess, {"x": x})[0].tobytes()
            assert feed(sess, {"x": x})[0].tobytes() == first
            assert same_everywhere(rank, first)

    team.run(act)


def test_permute_gives_zeros_where_nobody_sends(team: Team) -> None:
    pairs = [0, team.size - 1]
    text = f"g (float[n] x) => (float[n] y) {{ y, t = onnxpar.Permute <pairs={pairs}> (x) }}"

    def act(rank: Rank) -> None:
        got = run_text(rank, text, x=np.full(5, rank.index + 1.0, np.float32))[0]
        want = 1.0 if rank.index == team.size - 1 else 0.0
        np.testing.assert_array_equal(got, np.full(5, want, np.float32))

    team.run(act)


def test_send_and_receive_around_the_ring(team: Team) -> None:
    """Every rank sends before it receives, and twice with one tag: order is kept, none blocks."""
    if team.size == 1:
        pytest.skip("needs a peer")

    def act(rank: Rank) -> None:
        after, before = (rank.index + 1) % team.size, (rank.index - 1) % team.size
        text = f"""g (float[n] x, float16[m] z, int64[1] s) => (float[k] a, float16[l] b) {{
            t0 = onnxpar.Send <peer={after}, tag=7> (x)
            t1 = onnxpar.Send <peer={after}, tag=7> (z, t0)
            a, t2 = onnxpar.Recv <peer={before}, tag=7, dtype=1> (s, t1)
            b, t3 = onnxpar.Recv <peer={before}, tag=7, dtype=10> (s, t2) }}"""
        x = np.full(300_000, rank.index, np.float32)
        z = np.full(300_000, rank.index, np.float16)
        a, b = run_text(rank, text, x=x, z=z, s=np.array([300_000]))
        assert a.dtype == np.float32 and b.dtype == np.float16
        assert (a == before).all() and (b == before).all()

    team.run(act)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)], ids=str)
def test_empty_tensors(team: Team, shape: tuple[int, ...]) -> None:
    n = team.size
    dims = ", ".join("abc"[: len(shape)])
    outs = ", ".join("def"[: len(shape)])
    text = f"""g (float[{dims}] x) => (float[{dims}] y, float[{outs}] z, float[{dims}] w) {{
        y, t = onnxpar.AllReduce (x)
        z, u = onnxpar.AllGather <axis=0> (x, t)
        w, v = onnxpar.Broadcast <root=0> (x, u) }}"""

    def act(rank: Rank) -> None:
        y, z, w = run_text(rank, text, x=np.zeros(shape, np.float32))
        assert y.shape == shape and w.shape == shape and z.shape == (n * shape[0], *shape[1:])

    team.run(act)


def test_scalars(team: Team) -> None:
    text = "g (float x) => (float y) { y, t = onnxpar.AllReduce (x) }"

    def act(rank: Rank) -> None:
        got = run_text(rank, text, x=np.array(rank.index + 1.0, np.float32))[0]
        assert got.shape == () and got == team.size * (team.size + 1) / 2

    team.run(act)

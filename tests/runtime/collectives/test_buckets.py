"""Bucket: a collective of several tensors in one call has the bits of a call for each."""

import numpy as np
import pytest

from onnxpar_runtime.collectives import OpCounter, Rank, World
from tests.runtime.collectives.teams import (
    UNDER_MPI,
    Array,
    Team,
    feed,
    group_of,
    groups_of,
    session,
)
from tests.runtime.collectives.test_values import FLOATS

# Rows of 8 elements. Pieces of data are of 32 KiB between machines and 512 KiB in shared memory, so
# that some have parts of several tensors, and some tensors have several pieces.
ROWS = {
    "small": (1, 3, 1),
    "of_one_message": (30, 1, 40),
    "in_pieces": (5, 0, 700, 1, 33, 1500, 2),
    "large": (60_000, 7, 40_000),
}
FORMS = {
    "AllReduce": [
        "",
    ],
    "ReduceScatter": ["axis=0", 'axis=1, reduction="prod"'],
    "AllGather": ["axis=0", "axis=1"],
}


def programs(op: str, attributes: str, count: int, kind: str, group: list[int]) -> list[str]:
    """A graph with one Bucket, and one with a collective for each tensor."""
    xs, ys = ([f"{letter}{i}" for i in range(count)] for letter in "xy")
    head = (
        f"g ({', '.join(f'{kind}[r{i}, 8] {x}' for i, x in enumerate(xs))}) => "
        f"({', '.join(f'{kind}[s{i}, t{i}] {y}' for i, y in enumerate(ys))})"
    )
    more = ", ".join(filter(None, [f"group={group}", attributes]))
    bucket = f'onnxpar.Bucket <op="{op}", {more}> (none, {", ".join(xs)})'
    first = "none = Constant <value = uint8[1] {0}> ()"
    apart = [
        f"{y}, t{i + 1} = onnxpar.{op} <{more}> ({x}{f', t{i}' if i else ''})"
        for i, (x, y) in enumerate(zip(xs, ys, strict=True))
    ]
    return [
        f"{head} {{ {first} t, {', '.join(ys)} = {bucket} }}",
        f"{head} {{ {' '.join(apart)} }}",
    ]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        *(("float", rows) for rows in ROWS if rows != "large"),
        pytest.param("float", "large", marks=pytest.mark.full),
        ("bfloat16", "in_pieces"),
    ],
)
@pytest.mark.parametrize("op", FORMS)
def test_the_bits_of_a_call_for_each(team: Team, op: str, rows: str, kind: str) -> None:
    def act(rank: Rank) -> None:
        for groups in groups_of(team.size):
            group = group_of(groups, rank)
            # The dims that are divided hold for every group.
            sizes = [12 * n if op == "ReduceScatter" else n for n in ROWS[rows]]
            rng = np.random.default_rng([rank.index, len(group)])
            inputs: dict[str, Array] = {
                f"x{i}": rng.standard_normal((n, 8)).astype(FLOATS[kind])
                for i, n in enumerate(sizes)
            }
            for attributes in FORMS[op]:
                together, apart = (
                    session(rank, text)
                    for text in programs(op, attributes, len(sizes), kind, group)
                )
                rank.reset_counters()
                want = feed(apart, inputs)
                sent = rank.counters()[op].bytes
                rank.reset_counters()
                got = feed(together, inputs)
                for i, (a, b) in enumerate(zip(got, want, strict=True)):
                    assert a.shape == b.shape and a.tobytes() == b.tobytes(), (group, i)
                assert rank.counters()[op] == OpCounter(1, sent)

    team.run(act)


HERE = "g ({k}[n] x0, {k}[m] x1) => ({k}[p] y0, {k}[q] y1) {{ [here] t, y0, y1 = {node} }}"


def _bucket(
    values: str = "w.first; w.second", op: str = "AllReduce", inputs: str = "x0, x1"
) -> str:
    first = "none = Constant <value = uint8[1] {0}> ()"
    text = f'onnxpar.Bucket <op="{op}", values="{values}"> (none, {inputs})'
    return HERE.format(k="float", node=text).replace("{ [here]", f"{{ {first} [here]", 1)


@pytest.mark.threads_only
def test_a_disagreement_names_the_tensor() -> None:
    with World.threads(2) as world:

        def act(rank: Rank) -> None:
            sizes = 3, 4 + rank.index
            inputs = {f"x{i}": np.ones(n, np.float32) for i, n in enumerate(sizes)}
            feed(session(rank, _bucket()), inputs)

        _, errors = Team(world).attempt(act, abort=False)
    for error in errors:
        text = str(error)
        assert "Bucket 'here' (AllReduce) on group [0, 1]" in text
        assert "w.second [4]" in text and "w.second [5]" in text and "w.first" not in text


@pytest.mark.skipif(UNDER_MPI, reason="about one rank")
def test_what_a_bucket_refuses() -> None:
    with World.threads(1) as world:
        rank = world.rank(0)
        with pytest.raises(Exception, match="op is 'Broadcast', expected AllReduce, Reduce"):
            session(rank, _bucket(op="Broadcast"))

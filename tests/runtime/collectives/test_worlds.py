"""Worlds side by side, and collectives of the program outside sessions."""

import threading

import numpy as np
import pytest

from onnxpar_runtime.collectives import Rank, World
from tests.runtime.collectives.teams import Team, feed, session

SUM = "g (float[n] x) => (float[n] y) { y, t = onnxpar.AllReduce (x) }"


@pytest.mark.threads_only
def test_two_worlds_at_once() -> None:
    """Different sizes, the same groups and names, all running at the same time."""
    sizes = [2, 3, 2]
    outcomes: dict[int, list[float]] = {}

    def drive(number: int) -> None:
        with World.threads(sizes[number]) as world:

            def act(rank: Rank) -> float:
                sess = session(rank, SUM)
                x = np.full(5000, 10.0**number, np.float32)
                totals = {float(feed(sess, {"x": x})[0].max()) for _ in range(50)}
                assert len(totals) == 1
                assert rank.counters()["AllReduce"].calls == 50
                return totals.pop()

            outcomes[number] = Team(world).run(act)

    threads = [threading.Thread(target=drive, args=(i,), daemon=True) for i in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == {0: [2.0] * 2, 1: [30.0] * 3, 2: [200.0] * 2}


@pytest.mark.threads_only
def test_an_abort_stays_in_its_world() -> None:
    with World.threads(2) as one, World.threads(2) as other:
        one.abort(0, "over")
        totals = Team(other).run(lambda rank: float(rank.all_reduce(np.ones(2))[0]))
        assert totals == [2.0, 2.0]


def test_two_sessions_of_a_rank(team: Team) -> None:
    """Two graphs with nodes of the same name, run in turns."""
    top = 'g (float[n] x) => (float[n] y) { y, t = onnxpar.AllReduce <reduction="max"> (x) }'

    def act(rank: Rank) -> None:
        total, largest = session(rank, SUM), session(rank, top)
        x = {"x": np.full(10, rank.index + 1.0, np.float32)}
        for _ in range(5):
            assert feed(total, x)[0][0] == team.size * (team.size + 1) / 2
            assert feed(largest, x)[0][0] == team.size

    team.run(act)


@pytest.mark.parametrize("dtype", ["int64", "float32", "uint8", "bool", "float16"])
def test_all_reduce_of_the_program(team: Team, dtype: str) -> None:
    def act(rank: Rank) -> None:
        before = rank.counters()
        x = np.array([[rank.index % 2, 1, 0]]).astype(dtype)
        expected = {
            "max": [[team.size > 1, 1, 0]],
            "min": [[0, 1, 0]],
            "prod": [[0, 1, 0]],
            "sum": [[team.size // 2, team.size, 0]],
        }
        for op, want in expected.items():
            got = rank.all_reduce(x, op=op)
            assert got.dtype == x.dtype and got.shape == (1, 3)
            np.testing.assert_array_equal(got, np.array(want).astype(dtype))
        assert rank.counters() == before, "only operators are counted"

    team.run(act)


def test_all_reduce_of_a_group(team: Team) -> None:
    if team.size < 4:
        pytest.skip("needs 4 ranks")

    def act(rank: Rank) -> None:
        group = [3, 0] if rank.index in (0, 3) else [1, 2]
        assert rank.all_reduce(np.array(rank.index), group).tolist() == 3

    team.run(act)


def test_what_the_program_may_not_reduce(team: Team) -> None:
    def act(rank: Rank) -> None:
        with pytest.raises(ValueError, match="complex128"):
            rank.all_reduce(np.zeros(2, complex))
        with pytest.raises(ValueError, match="'mean'"):
            rank.all_reduce(np.zeros(2), op="mean")
        with pytest.raises(ValueError, match="expected distinct ranks"):
            rank.all_reduce(np.zeros(2), [rank.index, rank.index])

    team.run(act)

"""FinishLater: gathers that one session leaves running, and another one finishes."""

import numpy as np
import pytest

from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.tensors import to_host
from tests.runtime.collectives.teams import Array, Team, run_in_place, session, zeros

SIZE = 4096
GATHER = 'op = "AllGather", axis = 0'
# The call that the program makes first comes last.
LEAVES = f"""g (uint8[1] token, int64[1] run, float[n] x, float[n] y, float[n] z)
    => (float[m] a, float[m] b, float[m] c) {{
    t, a, b = onnxpar.FinishLater <{GATHER}, order = 1, first = 1, last = 0> (token, run, x, y)
    u, c = onnxpar.FinishLater <{GATHER}, order = 0, first = 0, last = 1> (t, run, z) }}"""
# Fails between its calls, where `index` is out of range. The other program has no call of order 2.
FAILS = f"""g (uint8[1] token, int64[1] run, float[n] x, float[n] y, int64[1] index)
    => (float[m] a, float[m] b) {{
    t, a = onnxpar.FinishLater <{GATHER}, order = 2, first = 1, last = 0> (token, run, x)
    z = Gather (y, index)
    u, b = onnxpar.FinishLater <{GATHER}, order = 0, first = 0, last = 1> (t, run, z) }}"""
FINISHES = """g (float[m] a, float[m] b, float[m] c) => (float[m] p, float[m] q, float[m] r) {
    d = onnxpar.Finish (c)
    r = Neg (d)
    e = onnxpar.Finish (a, r)
    p = Neg (e)
    f = onnxpar.Finish (b, p)
    q = Neg (f) }"""


class Buffers:
    """States that both sessions have, and the operands of the first."""

    def __init__(self, rank: Rank) -> None:
        """Makes the sessions."""
        self._rank = rank
        self._leaves, self._finishes = session(rank, LEAVES), session(rank, FINISHES)
        self._operands = {name: zeros(SIZE) for name in "xyz"}
        self._states = {name: zeros(rank.world.size * SIZE) for name in "abc"}

    def fill(self, step: int) -> list[Array]:
        """Writes other operands, which differ between ranks; returns what all of them gather."""
        ranks = range(self._rank.world.size)
        drawn = [np.random.default_rng([r, step]).random((3, SIZE), np.float32) for r in ranks]
        for value, own in zip(self._operands.values(), drawn[self._rank.index], strict=True):
            value.update_inplace(own)
        return list(np.concatenate(drawn, axis=1))

    def leave(self, run: int) -> None:
        """Runs the first session."""
        system = {"token": np.zeros(1, np.uint8), "run": np.array([run])}
        run_in_place(self._leaves, self._operands, self._states, **system)

    def finish(self) -> list[Array]:
        """Runs the second session and returns what it read."""
        return [-array for array in run_in_place(self._finishes, self._states)]

    def states(self) -> list[Array]:
        """Returns the states, when they are complete."""
        self._rank.settle()
        return [to_host(value) for value in self._states.values()]


@pytest.mark.parametrize("run", [0, 1])
def test_the_next_session_reads_what_is_gathered(team: Team, run: int) -> None:
    def act(rank: Rank) -> None:
        buffers = Buffers(rank)
        for step in range(5):
            want = buffers.fill(step)
            rank.reset_counters()
            buffers.leave(run)
            assert rank.counters()["AllGather"].calls == 2
            # As memory of the first session that is used again.
            buffers.fill(99)
            np.testing.assert_array_equal(buffers.finish(), want)
            np.testing.assert_array_equal(buffers.finish(), want)

    team.run(act)


def test_settling_completes_the_states(team: Team) -> None:
    def act(rank: Rank) -> None:
        buffers = Buffers(rank)
        for step in range(5):
            want = buffers.fill(step)
            buffers.leave(1)
            np.testing.assert_array_equal(buffers.states(), want)
            if step % 2:
                np.testing.assert_array_equal(buffers.finish(), want)

    team.run(act)


def test_what_nobody_finished_is_left_anew(team: Team) -> None:
    """As after a step that failed before the next training program."""

    def act(rank: Rank) -> None:
        buffers = Buffers(rank)
        buffers.fill(0)
        buffers.leave(1)
        want = buffers.fill(1)
        buffers.leave(1)
        np.testing.assert_array_equal(buffers.finish(), want)

    team.run(act)


def test_another_program_does_not_start_what_a_failed_one_left(team: Team) -> None:
    """Two trainers on one rank, of which one fails inside its optimizer's program."""

    def act(rank: Rank) -> None:
        if not rank.overlaps(range(rank.world.size)):
            return  # Ranks that share memory, and a single one, gather at once and leave nothing.
        buffers, failing = Buffers(rank), session(rank, FAILS)
        left = {name: zeros(rank.world.size * SIZE) for name in "ab"}
        left["a"].update_inplace(np.full(rank.world.size * SIZE, 7, np.float32))
        operands = {name: zeros(SIZE) for name in "xy"}
        system = {"token": np.zeros(1, np.uint8), "run": np.array([1]), "index": np.array([SIZE])}
        # On one rank only: what the others do not send never arrives, if this rank asks for it.
        if rank.index == 0:
            with pytest.raises(Exception, match="indices element out of data bounds"):
                run_in_place(failing, operands, left, **system)
        want = buffers.fill(0)
        buffers.leave(1)
        np.testing.assert_array_equal(buffers.finish(), want)
        assert (to_host(left["a"]) == 7).all()

    team.run(act)

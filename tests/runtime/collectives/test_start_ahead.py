"""StartAhead: a collective that one session starts, and another one carries out on the memory."""

import numpy as np
import pytest

from onnxpar_runtime.collectives import OpCounter, Rank, World
from tests.runtime.collectives.teams import (
    ON_DEVICE,
    UNDER_MPI,
    Array,
    Team,
    run_in_place,
    session,
    zeros,
)

STARTS = """g (uint8[1] token, int64[1] run, float[n] x, float[n] y) => (uint8[1] done) {{
    done = onnxpar.StartAhead <op="{op}", {attributes}> (token, run, x, y) }}"""
TAKES = """g (float[n] x, float[n] y) => (float[m] a, float[m] b) {{
    a, t = onnxpar.{op} <{attributes}> (x)
    b, u = onnxpar.{op} <{attributes}> (y, t) }}"""
FORMS = {"AllReduce": 'reduction="sum"', "ReduceScatter": "axis=0", "AllGather": "axis=0"}


class Buffers:
    """Two tensors that stay in one place, and the sessions that read them."""

    def __init__(self, rank: Rank, op: str, later: str = "") -> None:
        """Makes the sessions; `later` is the collective that is carried out, by default `op`."""
        later = later or op
        self._rank = rank
        self._starts = session(rank, STARTS.format(op=op, attributes=FORMS[op]))
        self._takes = session(rank, TAKES.format(op=later, attributes=FORMS[later]))
        self._values = {name: zeros(4096) for name in "xy"}

    def fill(self, step: int) -> None:
        """Writes other numbers, which differ between ranks."""
        rng = np.random.default_rng([self._rank.index, step])
        for value in self._values.values():
            value.update_inplace(rng.standard_normal(4096).astype(np.float32))

    def start(self, run: int) -> None:
        """Runs the first session."""
        system = {"token": np.zeros(1, np.uint8), "run": np.array([run])}
        run_in_place(self._starts, self._values, **system)

    def take(self) -> list[Array]:
        """Runs the second session and returns its results."""
        return run_in_place(self._takes, self._values)


@pytest.mark.parametrize("op", FORMS)
def test_results_are_those_without(team: Team, op: str) -> None:
    def act(rank: Rank) -> None:
        buffers = Buffers(rank, op)
        for step in range(5):
            buffers.fill(step)
            buffers.start(0)
            expected = buffers.take()
            buffers.fill(step)
            rank.reset_counters()
            buffers.start(1)
            assert rank.counters().get(op, OpCounter(0, 0)).calls == 0
            np.testing.assert_array_equal(buffers.take(), expected)
            # Each is counted once, by the node that takes the result.
            assert rank.counters()[op].calls == 2
            if op != "AllReduce":  # whose result replaces the operand
                np.testing.assert_array_equal(buffers.take(), expected)

    team.run(act)


def test_what_nobody_took_is_started_anew(team: Team) -> None:
    """As after a step that failed between the two programs."""

    def act(rank: Rank) -> None:
        buffers = Buffers(rank, "ReduceScatter")
        buffers.fill(0)
        buffers.start(1)
        buffers.fill(1)
        buffers.start(1)
        got = buffers.take()
        np.testing.assert_array_equal(buffers.take(), got)

    team.run(act)


@pytest.mark.skipif(UNDER_MPI or bool(ON_DEVICE), reason="only where all groups overlap")
def test_another_collective_on_the_operand_is_an_error() -> None:
    with World.threads(2) as world:

        def act(rank: Rank) -> None:
            buffers = Buffers(rank, "AllReduce", "ReduceScatter")
            buffers.start(1)
            with pytest.raises(Exception, match="its attributes differ from those of StartAhead"):
                buffers.take()

        Team(world).run(act)

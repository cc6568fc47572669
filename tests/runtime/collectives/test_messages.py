"""Messages from rank to rank outside of sessions: order, overlap, and what ends them."""

import threading
import time
from functools import partial

import numpy as np
import pytest

from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.errors import RankError
from onnxpar_runtime.pipeline.inbox import Inbox
from tests.runtime.collectives.teams import Team


def test_messages_of_one_tag_keep_their_order(team: Team) -> None:
    """Every rank sends to all others before it receives; large messages block nobody."""
    sizes = (0, 1, 300_000)

    def action(rank: Rank) -> None:
        others = [r for r in range(team.size) if r != rank.index]
        for other in others:
            for number, size in enumerate(sizes):
                rank.send(np.full(size, 10.0 * rank.index + number), other, 7, "numbers")
        for other in reversed(others):
            for number, size in enumerate(sizes):
                got = np.empty(size)
                rank.recv(got, other, 7, "numbers")
                assert (got == 10.0 * other + number).all()
        counts = rank.counters()
        sent = 8 * sum(sizes) * len(others)
        if others:
            assert (counts["Send"].bytes, counts["Recv"].bytes) == (sent, 0)
            assert counts["Send"].calls == counts["Recv"].calls == len(sizes) * len(others)

    team.run(action)


def test_messages_of_many_sizes_and_tags_arrive_complete(team: Team) -> None:
    """Many are on their way at once, and are received in another order than they were sent."""
    draw = np.random.default_rng(1)
    rounds = [draw.integers(0, 400_000, 12).tolist() for _ in range(4)]

    def contents(sender: int, turn: int, tag: int, size: int) -> np.ndarray:
        return np.arange(size, dtype=np.uint32) * (1 + sender + 10 * tag + 1000 * turn)

    def action(rank: Rank) -> None:
        others = [r for r in range(team.size) if r != rank.index]
        for turn, sizes in enumerate(rounds):
            for other in others:
                for tag, size in enumerate(sizes):
                    rank.send(contents(rank.index, turn, tag, size), other, tag, "numbers")
            for other in others:
                for tag in draw_order(turn, len(sizes)):
                    got = np.empty(sizes[tag], np.uint32)
                    rank.recv(got, other, tag, "numbers")
                    np.testing.assert_array_equal(got, contents(other, turn, tag, sizes[tag]))

    def draw_order(turn: int, count: int) -> list[int]:
        order: list[int] = np.random.default_rng(turn).permutation(count).tolist()
        return order

    team.run(action)


def test_receives_that_are_posted_early_leave_the_rank_free(team: Team) -> None:
    """Receives wait in the background, from all peers at once, while collectives run."""

    def action(rank: Rank) -> None:
        rank.reset_counters()
        inbox = Inbox(rank)
        others = [r for r in range(team.size) if r != rank.index]

        def receive(other: int, background: bool) -> np.ndarray:
            got = np.empty(1000)
            rank.recv(got, other, 3, "early", background=background)
            return got

        posted = {
            other: [
                inbox.post(other, partial(receive, other), "early", background=rank.concurrent)
                for _ in range(3)
            ]
            for other in others
        }
        for step in range(3):
            assert rank.all_reduce(np.ones(5))[0] == team.size
            for other in others:
                rank.send(np.full(1000, rank.index + 100.0 * step), other, 3, "early")
        for other in reversed(others):
            for step, ticket in enumerate(posted[other]):
                assert (inbox.wait(other, ticket) == other + 100.0 * step).all()
        inbox.close()

    team.run(action)


def test_a_message_of_another_size_is_an_error() -> None:
    with World.threads(2) as world:
        world.rank(0).send(np.zeros(3), 1, 0, "three numbers")
        with pytest.raises(RankError, match=r"rank 1: four numbers .* expected 32 bytes, got 24"):
            world.rank(1).recv(np.zeros(4), 0, 0, "four numbers")


def test_what_cannot_be_sent_is_refused() -> None:
    with World.threads(2) as world:
        with pytest.raises(ValueError, match="expected ranks below 2"):
            world.rank(0).send(np.zeros(3), 2, 0, "x")
        with pytest.raises(ValueError, match="contiguous"):
            world.rank(0).recv(np.zeros((3, 2))[:, 0], 1, 0, "x")


def _never(rank: Rank, background: bool) -> None:
    rank.recv(np.empty(3), 0, 0, "what never comes", background=background)


def test_a_rank_that_fails_ends_those_that_wait_for_its_messages() -> None:
    with World.threads(2) as world:
        rank = world.rank(1)
        inbox = Inbox(rank)
        ticket = inbox.post(0, partial(_never, rank), "what never comes", background=True)
        threading.Timer(0.2, world.abort, (0, "it broke")).start()
        with pytest.raises(RankError, match=r"what never comes .* first failure: rank 0: it broke"):
            inbox.wait(0, ticket)
        inbox.close()


def test_time_is_limited_from_when_someone_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPAR_TIMEOUT", "1")
    with World.threads(2) as world:
        rank = world.rank(1)
        inbox = Inbox(rank)
        late = inbox.post(0, partial(_never, rank), "a late message", background=True)
        time.sleep(1.5)
        world.rank(0).send(np.zeros(3), 1, 0, "late")
        inbox.wait(0, late)
        never = inbox.post(0, partial(_never, rank), "a message", background=True)
        with pytest.raises(RankError, match=r"a message: waited 1 s for rank 0 \(ONNXPAR_TIMEOUT"):
            inbox.wait(0, never)
        with pytest.raises(RankError, match="first failure: rank 1: a message: waited 1 s"):
            world.rank(0).all_reduce(np.zeros(1))
        inbox.close()

"""Ranks that fail or disagree: every rank gets an error that names who and where, in seconds."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.errors import LaunchError, RankError
from tests.runtime.collectives.teams import Team, feed, run_text, session

pytestmark = pytest.mark.threads_only
SECONDS = 10
"""Bound on how long a failure may take; it takes milliseconds, but the machine may be busy."""
SEND = "g (float[n] x) => (uint8[1] t) {{ [here] t = onnxpar.Send <{}> (x) }}"


def messages(
    team: Team, texts: list[str], shapes: list[tuple[int, ...]], **more: bool
) -> list[str]:
    """Runs text r on rank r; all must fail in time. Returns their messages."""
    start = time.monotonic()
    kinds = [text.split("[")[0].split("(")[1] for text in texts]
    dtypes = [np.dtype(k.replace("float", "float32") if k == "float" else k) for k in kinds]

    def act(rank: Rank) -> None:
        r = rank.index
        run_text(rank, texts[r], x=np.ones(shapes[r], dtypes[r]))

    _, errors = team.attempt(act, abort=False)
    assert time.monotonic() - start < SECONDS
    assert all(e is not None for e in errors), "a rank did not fail"
    return [str(e) for e in errors]


def node(op: str, dims: str = "n", kind: str = "float", attributes: str = "") -> str:
    """A graph of one named collective."""
    outs = ", ".join(f"o{i}" for i in range(dims.count(",") + 1))
    attributes = attributes and f"<{attributes}>"
    return (
        f"g ({kind}[{dims}] x) => ({kind}[{outs}] y) "
        f"{{ [here] y, t = onnxpar.{op} {attributes} (x) }}"
    )


@pytest.mark.parametrize(
    ("texts", "shapes", "message"),
    [
        ([node("AllReduce"), node("Broadcast", attributes="root=0")], [(3,), (3,)], "Broadcast"),
        ([node("AllReduce"), node("AllReduce")], [(3,), (4,)], r"\[4\]"),
        ([node("AllReduce"), node("AllReduce", "n, m")], [(6,), (2, 3)], r"\[2, 3\]"),
        ([node("AllReduce"), node("AllReduce", kind="int32")], [(3,), (3,)], "int32"),
        (
            [node("AllReduce"), node("AllReduce", attributes='reduction="max"')],
            [(3,), (3,)],
            "reduction=max",
        ),
        (
            [node("AllGather", "n, m", attributes=f"axis={axis}") for axis in (0, 1)],
            [(2, 2), (2, 2)],
            "axis=1",
        ),
        # Two sums of equal size: each rank would get what the other sums up elsewhere.
        ([node("AllReduce"), node("AllReduce").replace("here", "there")], [(3,), (3,)], "'there'"),
    ],
    ids=["op", "size", "shape", "dtype", "reduction", "axis", "node"],
)
def test_ranks_that_disagree(texts: list[str], shapes: list[tuple[int, ...]], message: str) -> None:
    with World.threads(2) as world:
        for text in messages(Team(world), texts, shapes):
            assert re.search(r"rank [01]: \w+ 't?here' on group \[0, 1\] disagrees with rank", text)
            assert re.search(message, text), text


def test_sizes_are_compared_without_debug_as_well() -> None:
    with World.threads(2, debug=False) as world:
        texts = [node("AllReduce")] * 2
        for text in messages(Team(world), texts, [(3,), (4,)]):
            assert "disagrees with rank" in text and "12 bytes" in text and "16 bytes" in text


def test_a_rank_that_raises_wakes_the_others() -> None:
    with World.threads(4) as world:

        def act(rank: Rank) -> None:
            if rank.index == 2:
                time.sleep(0.2)  # the others are waiting by then
                raise ValueError("no more data")
            run_text(rank, node("AllReduce"), x=np.ones(3, np.float32))

        start = time.monotonic()
        _, errors = Team(world).attempt(act)
        assert time.monotonic() - start < SECONDS
        for r in (0, 1, 3):
            assert f"rank {r}: AllReduce 'here' on group [0, 1, 2, 3]" in str(errors[r])
            assert "rank 2" in str(errors[r]) and "no more data" in str(errors[r])


def test_a_world_that_was_aborted_stays_so() -> None:
    with World.threads(2) as world:
        world.abort(1, "first")
        world.abort(0, "second")
        with pytest.raises(RankError, match="rank 1: first"):
            world.rank(0).all_reduce(np.ones(1))


def test_an_abort_wakes_waits_of_background_collectives() -> None:
    text = """g (float[n] x) => (float[n] y) {
        h, t = onnxpar.Start <op="AllReduce"> (x)
        [late] y = onnxpar.Wait <op="AllReduce"> (h, x) }"""
    with World.threads(2) as world:

        def act(rank: Rank) -> None:
            if rank.index == 1:
                time.sleep(0.2)
                raise ValueError("gone")
            run_text(rank, text, x=np.ones(3, np.float32))

        _, errors = Team(world).attempt(act)
        assert "rank 1" in str(errors[0]) and "gone" in str(errors[0])


def test_a_failing_run_waits_for_what_it_has_started() -> None:
    """The other rank still copies from its tensors, whose memory is freed when it has ended."""
    begin = "g (float[n] x, float[3] z) => (float[n] y) {\n"
    start = '[late] h, t = onnxpar.Start <op="AllReduce"> (x)\n'
    bad = "[bad] w, s = onnxpar.ReduceScatter <axis=0> (z, t)\ny = Add (h, w) }"
    wait = '[wait] y, s = onnxpar.Wait <op="AllReduce"> (h, x, t) }'
    ended: dict[int, float] = {}
    x, z = np.ones(1000, np.float32), np.ones(3, np.float32)
    with World.threads(2) as world:

        def act(rank: Rank) -> list[np.ndarray]:
            if rank.index == 1:
                time.sleep(0.3)
                ended[0] = time.monotonic()
                return run_text(rank, begin + start + wait, x=x, z=z)
            try:
                return run_text(rank, begin + start + bad, x=x, z=z)
            finally:
                ended[1] = time.monotonic()

        results, errors = Team(world).attempt(act, abort=False)
        assert "ReduceScatter 'bad'" in str(errors[0]) and "not divisible" in str(errors[0])
        assert errors[1] is None and (results[1][0] == 2).all()
        assert ended[0] < ended[1]


def test_groups_that_wait_for_one_another_are_a_deadlock() -> None:
    texts = [node("AllReduce", attributes=f"group={g}") for g in ([0, 1], [1, 2], [2, 0])]
    with World.threads(3) as world:
        for text in messages(Team(world), texts, [(3,)] * 3):
            assert "deadlock" in text
            for r, group in enumerate(([0, 1], [1, 2], [2, 0])):
                assert f"rank {r}: AllReduce 'here' on group {group}" in text


def test_a_receive_without_a_send_is_a_deadlock() -> None:
    recv = """g (int64[1] s) => (float[n] y) {{
        [here] y, t = onnxpar.Recv <peer={}, dtype=1> (s) }}"""
    with World.threads(2) as world:

        def act(rank: Rank) -> None:
            run_text(rank, recv.format(1 - rank.index), s=np.array([3]))

        _, errors = Team(world).attempt(act, abort=False)
        assert all("deadlock" in str(e) and "Recv 'here'" in str(e) for e in errors)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPAR_TIMEOUT", "0.5")
    came = threading.Event()
    with World.threads(4) as world:

        def act(rank: Rank) -> None:
            if rank.index == 2:
                came.wait(SECONDS)
                return
            try:
                run_text(rank, node("AllReduce"), x=np.ones(3, np.float32))
            finally:
                came.set()

        _, errors = Team(world).attempt(act, abort=False)
        for r in (0, 1, 3):
            assert "on group [0, 1, 2, 3]: waited 1 s for rank 2 (ONNXPAR_TIMEOUT)" in str(
                errors[r]
            )


def test_a_message_of_another_size() -> None:
    send = SEND.format("peer=1")
    recv = "g (int64[1] s) => (float[n] y) { [here] y, t = onnxpar.Recv <peer=0, dtype=1> (s) }"
    with World.threads(2) as world:

        def act(rank: Rank) -> None:
            if rank.index == 0:
                run_text(rank, send, x=np.ones(3, np.float32))
            else:
                run_text(rank, recv, s=np.array([4]))

        _, errors = Team(world).attempt(act, abort=False)
        assert errors[0] is None
        assert "expected 16 bytes, got 12 from rank 0: Send 'here'" in str(errors[1])


def test_waiting_too_long() -> None:
    """A rank that never comes: the others end after ONNXPAR_TIMEOUT seconds."""
    code = """
import numpy as np
from onnxpar_runtime.collectives import World
World.threads(2).rank(0).all_reduce(np.ones(3))
"""
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"ONNXPAR_TIMEOUT": "1"},
    )
    assert result.returncode == 1 and time.monotonic() - start < 30
    assert "rank 0: all_reduce of the program on group [0, 1]: waited 1 s" in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (node("AllReduce", attributes="group=[0, 5]"), "rank 5 is not in a world of 2"),
        (node("AllReduce", attributes="group=[0, 0]"), "rank 0 occurs twice"),
        (node("AllReduce", attributes="group=[1]"), "rank 0 is not in its group"),
        (node("AllReduce", attributes='reduction="mean"'), "reduction is 'mean'"),
        (node("AllGather"), "attribute axis is missing"),
        (node("AllGather", attributes="axis=1"), "axis is 1, expected one of"),
        (node("Broadcast", attributes="root=1, group=[0]"), "root 1 is not in the group"),
        (node("Permute", attributes="pairs=[0, 1, 1, 1]"), "rank 1 receives twice"),
        (node("Permute", attributes="pairs=[0]"), "pairs: expected source, destination"),
        # Numbers that would be 1 in 32 bits.
        (SEND.format(f"peer={2**32 + 1}"), f"peer is {2**32 + 1}, expected another rank"),
        (SEND.format(f"peer=1, tag={2**32 + 1}"), f"tag is {2**32 + 1}, expected 0 to"),
    ],
)
def test_attributes_that_cannot_be(text: str, message: str) -> None:
    with World.threads(2) as world:
        with pytest.raises(Exception, match=re.escape(message)) as caught:
            run_text(world.rank(0), text, x=np.ones(3, np.float32))
        assert text.split("onnxpar.")[1].split(" ")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([2**32, 2**32, 2], "shape [4294967296, 4294967296, 2] has 2^63 elements or more"),
        ([2**61], "shape [2305843009213693952] of float32 has 2^63 bytes or more"),
        ([3, -1], "shape [3, -1] has a negative dim"),
    ],
)
def test_sizes_that_no_memory_has(shape: list[int], message: str) -> None:
    text = "g (int64[n] s) => (float[a] y) { [here] y, t = onnxpar.Recv <peer=1, dtype=1> (s) }"
    with World.threads(2) as world, pytest.raises(Exception, match=re.escape(message)):
        run_text(world.rank(0), text, s=np.array(shape))


def test_a_dim_that_does_not_divide() -> None:
    text = node("ReduceScatter", attributes="axis=0")
    with World.threads(2) as world, pytest.raises(Exception) as caught:
        run_text(world.rank(1), text, x=np.ones(3, np.float32))
    assert "rank 1: ReduceScatter 'here' on group [0, 1]: dim 0" in str(caught.value)
    assert "not divisible" in str(caught.value)


def test_an_element_type_that_cannot_be_sent() -> None:
    text = "g (string[n] x) => (string[n] y) { [here] y, t = onnxpar.AllReduce (x) }"
    with World.threads(1) as world:
        sess = session(world.rank(0), text)
        with pytest.raises(Exception, match=r"rank 0: AllReduce 'here'.*cannot be communicated"):
            sess.run(None, {"x": np.array(["a"])})


def test_a_graph_without_a_rank_is_refused_by_name() -> None:
    from onnxpar_runtime.collectives import custom_op_library

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(custom_op_library()))

    class Bare:
        index = 0

        def register(self, _: object) -> None:
            """The library is registered already, without a rank."""

    with pytest.raises(Exception, match=r"AllReduce 'here': no rank was set when"):
        session(Bare(), node("AllReduce"), options)  # type: ignore[arg-type]


def test_a_session_outlives_its_world() -> None:
    world = World.threads(1)
    sess = session(world.rank(0), node("AllReduce"))
    x = {"x": np.ones(3, np.float32)}
    assert feed(sess, x)[0].tolist() == [1, 1, 1]
    world.close()
    with pytest.raises(Exception, match="rank 0: its world was closed"):
        feed(sess, x)


def test_the_ranks_of_a_world() -> None:
    with World.threads(2) as world:
        assert list(world.local_ranks) == [0, 1]
        with pytest.raises(ValueError, match="rank 2 is not in this process"):
            world.rank(2)
    with pytest.raises(ValueError, match="at least 1 rank"):
        World.threads(0)


def test_a_timeout_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPAR_TIMEOUT", "soon")
    with pytest.raises(LaunchError, match="ONNXPAR_TIMEOUT: expected seconds, got 'soon'"):
        World.threads(1)


def test_a_library_that_was_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from onnxpar_runtime import library

    library._find.cache_clear()
    monkeypatch.setattr(library, "_SUFFIX", ".absent")
    with pytest.raises(LaunchError, match=r"libonnxpar_ops.absent is not in .*pip install"):
        library.custom_op_library()

"""Collectives of tensors on GPUs: the suite of the host's transports, and what is NCCL's own.

There is no GPU: libraries stand in for CUDA and NCCL (`standin/README.md`). Operators are the real
ones, called by onnxruntime's real CUDA provider, and the stand-ins move real data.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.tiers import FULL

SUITE = Path(__file__).parents[1] / "runtime" / "collectives"
MPIRUN = Path(sys.executable).parent / "mpirun"
ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
HEAD = """
import sys
import numpy as np
import onnxruntime
from tests.runtime.collectives.teams import Team, feed, open_devices, run_text, session
from onnxpar_runtime.collectives import World

def world(size):
    return open_devices(World.threads(size))
"""
Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def program(standin_cuda: Mapping[str, str]) -> Program:
    """Returns a function that runs Python with NCCL and CUDA stood in for."""

    def run(
        body: str, more: Mapping[str, str] | None = None, ranks: int = 0
    ) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", HEAD + body]
        if ranks:
            command = [str(MPIRUN), "--oversubscribe", "-n", str(ranks), *command]
        return subprocess.run(
            command,
            env={**standin_cuda, "ONNXPAR_TEST_DEVICE": "nccl", **ALLOWED, **(more or {})},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
        )

    return run


@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["nccl", "staged"])
@pytest.mark.parametrize("ranks", [0, 2], ids=["threads", "processes"])
def test_the_suite(standin_cuda: Mapping[str, str], transport: str, ranks: int) -> None:
    """All of it in the full tier; else the axes, and for NCCL some types, on two ranks.

    NCCL's with threads are in test_delays.py, where time passes.
    """
    if not FULL and (transport == "staged") == bool(ranks):
        pytest.skip("in the full tier")
    arguments = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
    if FULL:
        arguments.append(str(SUITE))
    else:
        some = " or all_reduce and (bfloat16 or int8 or bool)" if transport == "nccl" else ""
        files = [str(SUITE / name) for name in ("test_values.py", "test_buckets.py")]
        arguments += [*files, "-k", f"every_axis or in_pieces{some}"]
    more = {
        "ONNXPAR_TEST_DEVICE": transport,
        "ONNXPAR_TEST_STANDIN": "1",
        "ONNXPAR_TEST_SIZES": "1 2 4" if FULL else "2",
        **ALLOWED,
    }
    command = [sys.executable, *arguments]
    if ranks:
        more["ONNXPAR_TEST_TRANSPORT"] = "mpi"
        command = [str(MPIRUN), "--oversubscribe", "-n", str(ranks), *command]
    done = subprocess.run(
        command, env={**standin_cuda, **more}, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [int(n) for n in re.findall(r"(\d+) passed", done.stdout)]
    assert len(passed) == max(ranks, 1) and min(passed) >= 4, done.stdout


def calls(log: Path) -> dict[str, dict[str, list[str]]]:
    """Returns what was called on every communicator: by its id and rank, the calls in order."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in log.read_text().splitlines():
        word, *fields = line.split("\t")
        if word == "nccl" and fields[1]:
            found[fields[1]][fields[2]].append(f"{fields[0]} {fields[3]} {fields[4]}".strip())
    return found


COMMUNICATORS = """
with world(4) as w:
    def act(rank):
        pair = [0, 1] if rank.index < 2 else [2, 3]
        text = f'''g (float[n] x) => (float[n] a, float[n] b, float[n] c) {{
          h, t0 = onnxpar.Start <op="AllReduce"> (x)
          a, t1 = onnxpar.AllReduce <group={pair}> (x, t0)
          b, t2 = onnxpar.AllReduce (x, t1)
          c = onnxpar.Wait <op="AllReduce"> (h, x) }}'''
        made = session(rank, text)
        for step in range(3):
            x = np.arange(5, dtype=np.float32) + rank.index + step
            a, b, c = feed(made, {"x": x})
            members = [np.arange(5, dtype=np.float32) + r + step for r in range(4)]
            np.testing.assert_array_equal(a, sum(members[r] for r in pair))
            np.testing.assert_array_equal(b, sum(members))
            np.testing.assert_array_equal(c, sum(members))
        assert rank.counters()["AllReduce"].calls == 9
        rank.check_device()
    Team(w).run(act)
"""


def test_communicators(program: Program, tmp_path: Path) -> None:
    """One for each group and lane, made by its members at the first use, and freed at the end."""
    log = tmp_path / "log"
    done = program(COMMUNICATORS, {"STANDIN_LOG": str(log)})
    assert done.returncode == 0, done.stderr
    found = calls(log)
    assert sorted(len(ranks) for ranks in found.values()) == [2, 2, 4, 4]
    wanted = ["CommInitRankConfig 0", *["AllReduce 5 AllReduce 7 0"] * 3, "CommDestroy 0"]
    for ranks in found.values():
        assert all(made == wanted for made in ranks.values()), dict(ranks)


NO_COPIES = """
import os
import onnx
text = '''g (float[4, 6] x) => (float[a, b] y, float[4, 6] z) {
  h, t0 = onnxpar.Start <op="AllReduce"> (x)
  u, t1 = onnxpar.AllGather <axis=1> (x, t0)
  v, t2 = onnxpar.AllToAll <split_axis=1, concat_axis=0> (u, t1)
  w = onnxpar.Barrier (v, x)
  y, t3 = onnxpar.ReduceScatter <axis=0> (w, t2)
  z = onnxpar.Wait <op="AllReduce"> (h, x) }'''
with world(2) as w:
    def act(rank):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = f"{os.environ['FOLDER']}/{rank.index}.onnx"
        made = session(rank, text, options)
        xs = [np.arange(24, dtype=np.float32).reshape(4, 6) * (r + 1) for r in range(2)]
        y, z = feed(made, {"x": xs[rank.index]})
        wide = np.concatenate(xs, axis=1)
        halves = [np.concatenate([np.split(wide, 2, axis=1)[r]] * 2) for r in range(2)]
        np.testing.assert_array_equal(y, np.split(sum(halves), 2)[rank.index])
        np.testing.assert_array_equal(z, xs[0] + xs[1])
    Team(w).run(act)
for r in range(2):
    nodes = onnx.load(f"{os.environ['FOLDER']}/{r}.onnx").graph.node
    ops = [node.op_type for node in nodes]
    assert ops == ["Start", "AllGather", "AllToAll", "Barrier", "ReduceScatter", "Wait"], ops
"""


@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_nothing_is_copied_to_the_host(program: Program, tmp_path: Path, transport: str) -> None:
    """Tokens, too, stay where the tensors are."""
    done = program(NO_COPIES, {"ONNXPAR_TEST_DEVICE": transport, "FOLDER": str(tmp_path)})
    assert done.returncode == 0, done.stderr


MESSAGES = """
with world(2) as w:
    def act(rank):
        peer = 1 - rank.index
        # Both send first, and take what they are sent in another order than it was sent in.
        text = f'''g (float[n] x, int32[m] k, int64[1] n, int64[1] m)
            => (float[a] y, int32[b] l, float[a] z) {{
          t0 = onnxpar.Send <peer={peer}, tag=1> (x)
          t1 = onnxpar.Send <peer={peer}, tag=2> (k, t0)
          t2 = onnxpar.Send <peer={peer}, tag=1> (x, t1)
          l, t3 = onnxpar.Recv <peer={peer}, tag=2, dtype=6> (m, t2)
          y, t4 = onnxpar.Recv <peer={peer}, tag=1, dtype=1> (n, t3)
          z, t5 = onnxpar.Recv <peer={peer}, tag=1, dtype=1> (n, t4) }}'''
        made = session(rank, text)
        for step in range(4):
            x = np.full(70001, rank.index + 10 * step, np.float32)
            k = np.arange(7, dtype=np.int32) + rank.index + step
            sizes = {"n": np.array([70001]), "m": np.array([7])}
            y, l, z = feed(made, {"x": x, "k": k, **sizes})
            np.testing.assert_array_equal(y, np.full(70001, peer + 10 * step, np.float32))
            np.testing.assert_array_equal(z, y)
            np.testing.assert_array_equal(l, np.arange(7) + peer + step)
    Team(w).run(act)
"""


@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_messages_wait_for_nothing_but_their_receiver(program: Program, transport: str) -> None:
    done = program(MESSAGES, {"ONNXPAR_TEST_DEVICE": transport, "ONNXPAR_TIMEOUT": "20"})
    assert done.returncode == 0, done.stderr


def test_a_message_of_another_size(program: Program) -> None:
    body = """
with world(2) as w:
    def act(rank):
        if rank.index == 0:
            run_text(rank, "g (float[n] x) => (uint8[1] t) { t = onnxpar.Send <peer=1> (x) }",
                     x=np.ones(5, np.float32))
        else:
            run_text(rank, "g (int64[1] n) => (float[m] y) "
                     "{ [here] y, t = onnxpar.Recv <peer=0, dtype=1> (n) }", n=np.array([6]))
    Team(w).run(act)
"""
    done = program(body)
    assert done.returncode == 1
    assert "rank 1: Recv 'here' on group [1, 0]" not in done.stderr
    assert "rank 1: Recv 'here' on group [0, 1]: expected 24 bytes, got 20" in done.stderr


EARLY = """
import os
import time
with world(2) as w:
    def act(rank):
        sends = "g (float[n] x) => (uint8[1] t) { t = onnxpar.Send <peer=1> (x) }"
        takes = "g (int64[1] n) => (float[m] y) { y, t = onnxpar.Recv <peer=0, dtype=1> (n) }"
        made = session(rank, takes if rank.index else sends)
        for step in range(2):
            if rank.index == 0:
                feed(made, {"x": np.full(5, step, np.float32)})
                continue
            time.sleep(1)
            with open(os.environ["STANDIN_LOG"]) as log:
                assert sum("Send" in line for line in log) == step
            (y,) = feed(made, {"n": np.array([5])})
            np.testing.assert_array_equal(y, np.full(5, step, np.float32))
        rank.all_reduce(np.zeros(1))
    Team(w).run(act)
"""


@pytest.mark.parametrize(
    "ranks", [0, pytest.param(2, marks=pytest.mark.full)], ids=["threads", "processes"]
)
def test_nothing_waits_on_the_gpu_for_a_receiver(
    program: Program, tmp_path: Path, ranks: int
) -> None:
    """A message of a connected channel is not handed to NCCL before it is asked for."""
    body = EARLY.replace("with world(2)", "with open_devices(World.mpi())") if ranks else EARLY
    done = program(body, {"STANDIN_LOG": str(tmp_path / "log")}, ranks)
    assert done.returncode == 0, done.stderr


UNSENT = """
with world(2) as w:
    def act(rank):
        if rank.index == 0:
            text = "g (float[n] x) => (uint8[1] t) { [there] t = onnxpar.Send <peer=1> (x) }"
            run_text(rank, text, x=np.ones(5, np.float32))
        else:
            text = "g (int64[1] n) => (float[m] y) { y, t = onnxpar.Recv <peer=0, dtype=1> (n) }"
            run_text(rank, text, n=np.array([5]))
        rank.all_reduce(np.zeros(1))
    _, errors = Team(w).attempt(act)
    print(*errors, sep="\\n")
"""


def test_a_message_that_cannot_be_sent(program: Program) -> None:
    """Told at once by the channel's thread: there is no next message, nor a limit of time."""
    done = program(UNSENT, {"STANDIN_NCCL_FAIL": "Send:1", "ONNXPAR_TIMEOUT": "0"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    message = "rank 0: Send 'there' on group [0, 1]: NCCL: system error"
    assert len(lines) == 2 and all(message in line for line in lines), done.stdout


REDUCE = """
import time
TEXT = "g (float[n] x) => (float[n] y) { [here] y, t = onnxpar.AllReduce (x) }"
with world(2) as w:
    def act(rank):
        made = session(rank, TEXT)
        for step in range(3):
            feed(made, {"x": np.ones(3, np.float32)})
            if rank.index == 1 and step == 1:
                time.sleep(LATE)
            rank.check_device()
    _, errors = Team(w).attempt(act)
    print(*errors, sep="\\n")
"""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"STANDIN_NCCL_FAIL": "AllReduce:3"},
            "AllReduce 'here' on group [0, 1]: NCCL: system error (AllReduce was told to fail)",
        ),
        (
            {"STANDIN_NCCL_FAIL": "CommInitRankConfig:2"},
            "making the communicator on group [0, 1]: NCCL: system error",
        ),
        (
            {"STANDIN_NCCL_FAIL": "GetUniqueId:1"},
            "making the communicator on group [0, 1]: NCCL: system error (GetUniqueId",
        ),
    ],
    ids=["a call", "a communicator", "an id"],
)
def test_what_nccl_reports_ends_all_ranks(
    program: Program, more: Mapping[str, str], message: str
) -> None:
    done = program(REDUCE.replace("LATE", "0"), {"ONNXPAR_TIMEOUT": "5", **more})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 2 and "None" not in lines and message in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(
            {"ONNXPAR_TIMEOUT": "1"},
            "rank 0: AllReduce 'here' on group [0, 1]: waited 1 s for the other ranks",
            marks=pytest.mark.full,
        ),
        (
            {"STANDIN_NCCL_ASYNC": "5"},
            "communication on group [0, 1]: NCCL: remote process exited",
        ),
    ],
    ids=["time", "a remote error"],
)
def test_ranks_that_wait_on_the_gpu_are_woken(
    program: Program, tmp_path: Path, more: Mapping[str, str], message: str
) -> None:
    """A call that has been compared before waits in NCCL alone, for a rank that comes too late."""
    log = tmp_path / "log"
    done = program(REDUCE.replace("LATE", "3"), {"STANDIN_LOG": str(log), **more})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 2 and all(message in line for line in lines), done.stdout
    for ranks in calls(log).values():
        assert all(made[-1] == "CommAbort 0" for made in ranks.values()), dict(ranks)


SHUT_DOWN = """
import os
import time
with world(2) as w:
    def act(rank):
        run_text(rank, "g (float[n] x) => (float[n] y) { y, t = onnxpar.AllReduce (x) }",
                 x=np.ones(3, np.float32))
        os.environ["STANDIN_SHUT_DOWN"] = "1"
        time.sleep(2)
        rank.check_device()
    Team(w).run(act)
"""


def test_a_process_that_ends_is_no_failure_of_the_gpu(program: Program) -> None:
    """Whoever ends without closing the world: the driver goes while calls are still looked at."""
    done = program(SHUT_DOWN)
    assert done.returncode == 0, done.stderr


KEPT = """
with world(2) as w:
    def act(rank):
        run_text(rank, "g (float[n] x) => (float[n] y) { y, t = onnxpar.AllReduce (x) }",
                 x=np.ones(3, np.float32))
    Team(w).run(act)
    if ABORTED:
        w.abort(0, "no more")
print("closed")
"""


@pytest.mark.parametrize("aborted", [True, False] if FULL else [True])
def test_communicators_that_graphs_hold_do_not_hold_up_the_end(
    program: Program, tmp_path: Path, aborted: bool
) -> None:
    """NCCL ends none while a captured CUDA graph has calls of it, not even one that is aborted."""
    log = tmp_path / "log"
    more = {"STANDIN_NCCL_KEPT": "1", "STANDIN_LOG": str(log)}
    done = program(KEPT.replace("ABORTED", str(aborted)), more)
    assert done.returncode == 0 and done.stdout == "closed\n", done.stderr
    last = "CommAbort 0" if aborted else "CommDestroy 0"
    assert all(made[-1] == last for ranks in calls(log).values() for made in ranks.values())


def test_processes_end_with_the_message(program: Program) -> None:
    body = """
import time
w = open_devices(World.mpi())
rank = w.rank(w.local_ranks[0])
made = session(rank, "g (float[n] x) => (float[n] y) { [here] y, t = onnxpar.AllReduce (x) }")
feed(made, {"x": np.ones(3, np.float32)})
if rank.index == 1:
    time.sleep(50)
feed(made, {"x": np.ones(3, np.float32)})
"""
    done = program(body, {"ONNXPAR_TIMEOUT": "1"}, ranks=2)
    assert done.returncode != 0
    message = "rank 0: AllReduce 'here' on group [0, 1]: waited 1 s for the other ranks"
    assert f"r0 | {message}" in done.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"STANDIN_NCCL_VERSION": "21903"}, "is NCCL 2.19.3; pip install 'onnxpar[cuda]' brings"),
        ({"STANDIN_DEVICES": "0"}, "device cuda:0: CUDA device 0 does not exist; there are 0"),
    ],
    ids=["version", "device"],
)
def test_what_is_missing_is_said(program: Program, more: Mapping[str, str], message: str) -> None:
    done = program("world(1)", more)
    assert done.returncode == 1
    assert "LaunchError: " in done.stderr and message in done.stderr, done.stderr


def test_streams_have_queues_of_their_own(program: Program) -> None:
    body = "import os; world(1); print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    assert program(body).stdout == "32\n"
    assert program(body, {"CUDA_DEVICE_MAX_CONNECTIONS": "16"}).stdout == "16\n"


def test_a_driver_that_is_missing(program: Program) -> None:
    done = program("world(1)", {"LD_LIBRARY_PATH": "", "ONNXPAR_TEST_DEVICE": "staged"})
    if done.returncode == 0:
        pytest.skip("there is a GPU here")
    assert "LaunchError: device cuda:0: the CUDA driver cannot be" in done.stderr

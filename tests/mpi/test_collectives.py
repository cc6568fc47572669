"""The collectives under mpirun: the suite of the threads transport, and how failures end a job.

They run with the MPI of this environment. `tests/tools/test_wheel.py` runs them with MPICH's wheel.
"""

import re
from pathlib import Path

import pytest

from onnxpar_runtime.launch import find_mpirun, is_open_mpi
from tests.runtime.launching import mpirun
from tests.tiers import FULL

SUITE = Path(__file__).parents[1] / "runtime" / "collectives"
SECONDS = 20
"""The time limit of a failing job, in seconds; most of it is starting Python."""

HEAD = """
import os
import sys
import numpy as np
from tests.runtime.collectives.teams import run_text
from onnxpar_format.place import find_place
from onnxpar_runtime.collectives import World

# MPICH's mpirun passes on what it has read so far, be it half a line.
sys.stdout.reconfigure(line_buffering=True, write_through=False)
world = World.mpi()
rank = world.rank(world.local_ranks[0])
AR = "g (float[n] x) => (float[m] y) { [here] y, t = onnxpar.AllReduce (x) }"
BC = "g (float[n] x) => (float[m] y) { [here] y, t = onnxpar.Broadcast <root=0> (x) }"
x = np.ones(3, np.float32)
def act(f):
    try:
        f()
    except Exception as error:
        world.abort(rank.index, str(error))
"""


def program(body: str) -> list[str]:
    """Python's arguments for a program in which `act` works like the command line."""
    return ["-c", HEAD + body]


# How data travels between ranks on one machine, and between ranks on several machines.
MEMORY = {"ONNXPAR_SHARED_MEMORY": "1"}
MESSAGES = {"ONNXPAR_SHARED_MEMORY": "0"}
full = pytest.mark.full
both_ways = pytest.mark.parametrize(
    "way", [MEMORY, pytest.param(MESSAGES, marks=full)], ids=["memory", "messages"]
)


# As if there were two machines.
NESTED = {"ONNXPAR_SHARED_MEMORY": "1", "ONNXPAR_RANKS_PER_MACHINE": "2"}
# One of them, and all in the full tier. Messages between machines are part of `4-nested`, and
# `test_machines.py` compares their bits with those in shared memory.
WORLDS = [(4, NESTED), (1, MEMORY), (2, MESSAGES), (4, MEMORY), (2, MEMORY), (4, MESSAGES)]
NAMES = ["4-nested", "1", "2-messages", "4-memory", "2-memory", "4-messages"]
COUNT = 6 if FULL else 1


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("ranks", "way"), WORLDS[:COUNT], ids=NAMES[:COUNT])
def test_the_suite_at(ranks: int, way: dict[str, str]) -> None:
    arguments = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", str(SUITE)]
    if not FULL:
        # With all sizes of buckets they take as long as all others together. Ranks in one process
        # have all types.
        arguments += [
            "-k",
            "not (uint or int16 or int32 or int64 or double) and "
            "(not test_the_bits_of_a_call_for_each or in_pieces and not bfloat16)",
        ]
    result = mpirun(ranks, arguments, {"ONNXPAR_TEST_TRANSPORT": "mpi"} | way, 180)
    assert result.code == 0, result.text
    passed = [int(n) for n in re.findall(r"(\d+) passed", result.text)]
    assert len(passed) == ranks and min(passed) == max(passed) > 80, result.text


@pytest.mark.parametrize(
    ("way", "text", "size", "message"),
    [
        (MEMORY, "BC", 3, r"Broadcast float32 \[3\] root=0"),
        (MESSAGES, "AR", 4, r"AllReduce float32 \[4\] reduction=sum"),
        pytest.param(MEMORY, "AR", 4, r"AllReduce float32 \[4\] reduction=sum", marks=full),
        pytest.param(MESSAGES, "BC", 3, r"Broadcast float32 \[3\] root=0", marks=full),
    ],
    ids=["memory, Broadcast", "messages, AllReduce", "memory, AllReduce", "messages, Broadcast"],
)
def test_ranks_that_disagree(way: dict[str, str], text: str, size: int, message: str) -> None:
    body = f"""
if rank.index == 1:
    act(lambda: run_text(rank, {text}, x=np.ones({size}, np.float32)))
else:
    act(lambda: run_text(rank, AR, x=x))
"""
    result = mpirun(2, program(body), way, 60)
    assert result.code != 0 and result.seconds < SECONDS
    line = next(line for line in result.text.splitlines() if line.startswith(("r0 |", "r1 |")))
    assert "'here' on group [0, 1]: disagrees with rank" in line
    assert re.search(message, line), line


LATE = """
for _ in range(1030):
    rank.all_reduce(x)
def disagree(**arguments):
    if rank.index == 1:
        rank.all_reduce(**arguments)
    else:
        rank.all_reduce(x)
"""


OTHERS = ['op="max", array=x', "array=np.ones(3000, np.float32)"]


@pytest.mark.parametrize(
    ("way", "late"),
    [
        (MEMORY, OTHERS[0]),
        (MESSAGES, OTHERS[1]),
        pytest.param(MEMORY, OTHERS[1], marks=full),
        pytest.param(MESSAGES, OTHERS[0], marks=full),
    ],
    ids=["memory, op", "messages, size", "memory, size", "messages, op"],
)
def test_late_calls_are_compared_at_once(late: str, way: dict[str, str]) -> None:
    """Sum against maximum, and another size: every call is compared, on all ranks."""
    body = (
        LATE
        + f"""
try:
    disagree({late})
except Exception as error:
    print("caught", rank.index, error)
print("then", rank.all_reduce(x).tolist())
"""
    )
    result = mpirun(2, program(body), way, 60)
    assert result.code == 0, result.text
    for own, other in ((0, 1), (1, 0)):
        assert re.search(
            rf"caught {own} .*rank {own}: all_reduce of the program on group \[0, 1\]: disagrees "
            rf"with rank {other}: got .*, where rank {other} calls ",
            result.text,
        ), result.text
    # The refused call has no later effect.
    assert result.text.count("then [2.0, 2.0, 2.0]") == 2, result.text


START = """
text = '''g (float[n] x) => (float[n] h) { h, t = onnxpar.Start <op="AllReduce"> (x) }'''
from tests.runtime.collectives.teams import session
big = np.ones(1 << 22, np.float32)
"""


@both_ways
def test_closing_waits_for_what_was_started(way: dict[str, str]) -> None:
    """Rank 1 starts late; both close at once, while the collective still runs."""
    body = (
        START
        + """
import time
s = session(rank, text)
if rank.index == 1:
    time.sleep(1)
s.run(None, {"x": big})
world.close()
print("closed")
"""
    )
    result = mpirun(2, program(body), way, 60)
    assert result.code == 0 and result.text.count("closed") == 2, result.text


def test_closing_does_not_wait_for_ever() -> None:
    """Rank 1 never starts: the watchdog still watches a world that is closing."""
    body = (
        START
        + """
import time
rank.all_reduce(x)
if rank.index == 0:
    s = session(rank, text)
    s.run(None, {"x": big})
    world.close()
    print("closed")
time.sleep(30)
"""
    )
    result = mpirun(2, program(body), {"ONNXPAR_TIMEOUT": "2"}, 60)
    assert result.code != 0 and result.seconds < SECONDS + 2
    assert re.search(r"r0 \| rank 0: .* on group \[0, 1\]: waited 2 s", result.text), result.text
    assert "closed" not in result.text


def test_a_message_survives_the_closing_of_its_sender() -> None:
    body = """
import time
if rank.index == 0:
    text = "g (float[n] x) => (uint8[1] t) { t = onnxpar.Send <peer=1> (x) }"
    run_text(rank, text, x=np.arange(1 << 20, dtype=np.float32))
else:
    time.sleep(1)
    text = "g (int64[1] n) => (float[m] y) { y, t = onnxpar.Recv <peer=0, dtype=1> (n) }"
    y = run_text(rank, text, n=np.array([1 << 20]))[0]
    assert (y == np.arange(1 << 20)).all()
world.close()
print("closed")
"""
    result = mpirun(2, program(body), limit=60)
    assert result.code == 0 and result.text.count("closed") == 2, result.text


def test_a_rank_that_raises_ends_all() -> None:
    body = """
def body():
    if rank.index == 2:
        raise ValueError("no more data")
    run_text(rank, AR, x=x)
act(body)
"""
    result = mpirun(4, program(body), limit=60)
    assert result.code != 0 and result.seconds < SECONDS
    assert "r2 | no more data" in result.text


LATER = ("run_text(rank, AR, x=x)", "AllReduce 'here'")


@pytest.mark.parametrize(
    ("way", "before", "waits", "level"),
    [
        (MEMORY, "pass", "making the communicator", "multiple"),
        # As `test_closing_does_not_wait_for_ever`.
        pytest.param(MEMORY, *LATER, "multiple", marks=full),
        (MESSAGES, *LATER, "serialized"),
        pytest.param(MESSAGES, "pass", "making the communicator", "multiple", marks=full),
        pytest.param(MESSAGES, *LATER, "multiple", marks=full),
        pytest.param(MEMORY, *LATER, "serialized", marks=full),
    ],
    ids=[
        *["memory, first", "memory, later", "messages, one thread"],
        *["messages, first", "messages, later", "memory, one thread"],
    ],
)
def test_waiting_too_long(way: dict[str, str], before: str, waits: str, level: str) -> None:
    """A rank never comes: the watchdog ends the job, and names both ranks and the call.

    Making the communicator is the first thing that needs the other rank. MPI may allow only one
    thread at a time; the watchdog is another.
    """
    body = f"""
import time
{before}
if rank.index == 1:
    time.sleep(60)
act(lambda: run_text(rank, AR, x=x))
"""
    limits = {"ONNXPAR_TIMEOUT": "2", "MPI4PY_RC_THREAD_LEVEL": level}
    result = mpirun(2, program(body), limits | way, 60)
    assert result.code != 0 and result.seconds < SECONDS + 2
    missing = "the other ranks" if before == "pass" else "rank 1"
    message = rf"r0 \| rank 0: {waits} on group \[0, 1\]: waited 2 s for {missing} "
    assert re.search(message, result.text), result.text


def test_messages_go_on_while_a_rank_waits_in_shared_memory() -> None:
    """Rank 0 sends, without waiting, and waits for rank 1, which first receives.

    Copying by one process out of another's memory is turned off, so that a large message needs its
    sender's help until it is through.
    """
    body = """
run_text(rank, AR, x=x)  # makes the group, which takes messages too
if rank.index == 0:
    text = "g (float[n] x) => (uint8[1] t) { t = onnxpar.Send <peer=1> (x) }"
    run_text(rank, text, x=np.arange(1 << 20, dtype=np.float32))
else:
    text = "g (int64[1] n) => (float[m] y) { y, t = onnxpar.Recv <peer=0, dtype=1> (n) }"
    y = run_text(rank, text, n=np.array([1 << 20]))[0]
    assert (y == np.arange(1 << 20)).all()
print("sum", run_text(rank, AR, x=x)[0].tolist())
"""
    plain = {"OMPI_MCA_smsc": "^cma,xpmem,knem", "ONNXPAR_TIMEOUT": "10"}
    result = mpirun(2, program(body), MEMORY | plain, 60)
    assert result.code == 0 and result.text.count("sum [2.0, 2.0, 2.0]") == 2, result.text


def test_ranks_that_cannot_share_memory_send_messages() -> None:
    """One rank refuses shared memory: its groups send messages, and other groups share memory."""
    body = """
from pathlib import Path
def mapped():
    return Path("/proc/self/maps").read_text().count("memfd:onnxpar")
before = mapped()
rank.all_reduce(x, group=[0, 1] if rank.index < 2 else [2, 3])
print("sum", rank.index, rank.all_reduce(np.array(rank.index)))
print("shares" if mapped() > before else "sends", rank.index)
"""
    body = (
        """
if find_place().rank == 3:
    os.environ["ONNXPAR_SHARED_MEMORY"] = "0"
"""
        + body
    )
    result = mpirun(4, program(body), MEMORY, 60)
    assert result.code == 0, result.text
    for r in range(4):
        assert f"sum {r} 6" in result.text
        assert f"{'shares' if r < 2 else 'sends'} {r}" in result.text, result.text


def test_messages_in_shared_memory() -> None:
    """Memory for a peak is given back; ranks that share a processor do not keep it busy.

    If one rank cannot map what the other sends, both send by MPI.
    """
    body = """
import ctypes
import resource
import signal
import time
from pathlib import Path
peer = 1 - rank.index
def shared():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssShmem"))
def swap(count, messages, pause=0):
    x = np.ones(count, np.uint8)
    for number in range(messages):
        if rank.index == 1:
            time.sleep(pause)
            rank.send(x * (number % 250), 0, 1, "x")
    if pause == 0:
        rank.all_reduce(np.ones(1))
    for number in range(messages):
        if rank.index == 0:
            rank.recv(x, 1, 1, "x")
            assert (x == number % 250).all()
assert rank.prompt(peer)
swap(1 << 20, 20)
rank.all_reduce(np.ones(1))
peak = shared()
swap(1 << 10, 800)
rank.all_reduce(np.ones(1))
print("shared", peak, shared())

processors = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(processors)})
world = World.mpi()
os.sched_setaffinity(0, processors)
rank = world.rank(world.local_ranks[0])
swap(1, 1)
begin = time.process_time()
swap(1, 50, 0.0012)
print("busy", round((time.process_time() - begin) * 1000))

# Rank 1 lets no other process without CAP_SYS_PTRACE open its files, and rank 0 does without it.
libc = ctypes.CDLL(None)
if rank.index == 0:
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    sets[0] &= ~(1 << 19)
    assert libc.capset(header, sets) == 0
PR_SET_DUMPABLE = 4
libc.prctl(PR_SET_DUMPABLE, rank.index == 0)
world = World.mpi()
libc.prctl(PR_SET_DUMPABLE, 1)
rank = world.rank(world.local_ranks[0])
swap(1 << 16, 5)
print("prompt", rank.prompt(peer))

# No file may be as large as that for messages; by default, the signal ends the process.
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, limit[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
world = World.mpi()
rank = world.rank(world.local_ranks[0])
swap(1 << 16, 5)
print("prompt", rank.prompt(peer))
"""
    result = mpirun(2, program(body), MEMORY, 60)
    assert result.code == 0, result.text
    # Of 20 MiB in flight at once; MPI has some, too.
    shares = re.findall(r"shared (\d+) (\d+)", result.out)
    assert [(int(a) >= 20, int(b) <= 6) for a, b in shares] == [(True, True)] * 2, result.text
    # Looking for each message for a millisecond, as with a processor of its own, takes 50 ms.
    assert all(int(n) < 30 for n in re.findall(r"busy (\d+)", result.out)), result.text
    assert result.out.count("prompt False") == 4


def test_ranks_that_are_not_members_need_not_come() -> None:
    """Rank 0 alone makes no group; ranks 1 and 2 make theirs without it."""
    body = """
if rank.index != 0:
    print("sum", rank.all_reduce(np.array(rank.index), group=[2, 1]))
"""
    result = mpirun(3, program(body), limit=60)
    assert result.code == 0, result.text
    assert result.text.count("sum 3") == 2


def test_two_worlds_over_different_communicators() -> None:
    """Each half of the job has its own world; these and the world of all ranks are used in turn."""
    body = """
from mpi4py import MPI
half = World.mpi(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, 0))
mine = half.rank(half.local_ranks[0])
for _ in range(20):
    y = run_text(mine, AR, x=np.full(5, rank.index, np.float32))[0]
    z = run_text(rank, AR, x=np.full(5, rank.index, np.float32))[0]
    assert (y == (2 if rank.index % 2 == 0 else 4)).all(), y
    assert (z == 6).all(), z
half.close()
world.close()
print("done")
"""
    result = mpirun(4, program(body), limit=60)
    assert result.code == 0 and result.text.count("done") == 4, result.text


def test_without_threads_a_start_completes_at_once() -> None:
    """MPI at the level SERIALIZED: no second thread may call it, and Start/Wait still work."""
    text = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
"""
    body = """
from mpi4py import MPI
assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
text = '''g (float[n] x) => (float[n] y) {
    h, t = onnxpar.Start <op="AllReduce"> (x)
    y = onnxpar.Wait <op="AllReduce"> (h, x) }'''
print("sum", run_text(rank, text, x=x)[0].tolist())
"""
    arguments = program(body)
    result = mpirun(2, ["-c", text + arguments[1]], limit=60)
    assert result.code == 0 and result.text.count("sum [2.0, 2.0, 2.0]") == 2, result.text


def test_another_mpi_than_that_of_mpi4py() -> None:
    """The errors for an MPI without a library, and for another copy of an MPI with one."""
    body = """
from mpi4py import MPI
from onnxpar_runtime.library import mpi_library
for version in ("MPICH Version:      4.3.0", "Open MPI v4.1.6, package: x"):
    MPI.Get_library_version = lambda: version
    try:
        mpi_library()
    except Exception as error:
        print("refused:", error)
"""
    result = mpirun(1, program(body), limit=60)
    lines = [line for line in result.text.splitlines() if line.startswith("refused:")]
    assert len(lines) == 2, result.text
    if not is_open_mpi(find_mpirun()):
        lines.reverse()
    # A build in the clone has no library for the other MPI, and a wheel has one that does not fit.
    without = r"\w+\.so is not in .*ONNXPAR_MPICXX|the MPI transport cannot be loaded: .*undefined"
    assert re.search(f"refused: ({without})", lines[0]), lines[0]
    assert "mpi4py uses " in lines[0]
    assert re.search(r"two different MPI libraries: mpi4py uses .*4\.\d\.\d, but ", lines[1])
    assert "libmpi.so" in lines[1]


@pytest.mark.parametrize(
    ("given", "used"), [({}, "^ofi"), ({"OMPI_MCA_btl": "self,sm"}, "self,sm")]
)
def test_the_users_choice_of_components_is_kept(given: dict[str, str], used: str) -> None:
    """Of Open MPI's components one is left out, which takes a second to close."""
    result = mpirun(1, program("print('btl', os.environ['OMPI_MCA_btl'])"), given, 60)
    assert result.code == 0 and f"btl {used}\n" in result.text, result.text


def test_an_mpi_that_nobody_initialised() -> None:
    """A second copy of the same MPI looks like this: same version, not initialised."""
    code = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from onnxpar_runtime.library import mpi_library
try:
    mpi_library()
except Exception as error:
    print("refused:", error)
"""
    result = mpirun(1, ["-c", code], limit=60)
    assert "refused: two different MPI libraries" in result.text, result.text

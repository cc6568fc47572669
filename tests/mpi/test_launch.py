"""`onnxpar launch`: ranks that are killed at any moment cost steps, and nothing else."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from onnxpar.cli import main
from onnxpar_format.options import TrainingRun
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.checkpoint.contents import Checkpoint
from onnxpar_runtime.checkpoint.folder import complete_steps, resolve, step_name
from onnxpar_runtime.launch import mpirun_environment
from onnxpar_runtime.training.run import train_with
from tests.cli import linear
from tests.runtime.launching import LIMIT, alive, children, slow_data
from tests.tiers import FULL

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
KILLS = range(20) if FULL else (1,)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextmanager
def launched(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Runs `onnxpar launch`; at the end none of its processes is left."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "onnxpar.cli", "launch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=mpirun_environment(kept),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid] if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def descendants(pid: int) -> list[int]:
    try:
        mine = children(pid)
    except (FileNotFoundError, ProcessLookupError):
        return []
    return mine + [below for child in mine for below in descendants(child)]


def ranks_of(process: "subprocess.Popen[str]", count: int) -> list[int]:
    """The ranks' processes, once all of them exist."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until and process.poll() is None:
        found = [rank for mpirun in children(process.pid) for rank in children(mpirun)]
        if len(found) == count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"there are no {count} ranks: {process.communicate()}")


def ranks_anywhere(process: "subprocess.Popen[str]", count: int) -> list[int]:
    """As `ranks_of`, in the order of their numbers, on any (simulated) machine."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until and process.poll() is None:
        found = {}
        for pid in descendants(process.pid):
            with suppress(OSError):
                settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                mine = [x for x in settings if x.startswith(b"OMPI_COMM_WORLD_RANK=")]
                found.update({int(x.partition(b"=")[2]): pid for x in mine})
        if len(found) == count:
            return [found[rank] for rank in range(count)]
        time.sleep(0.02)
    raise AssertionError(f"there are no {count} ranks: {process.communicate()}")


def losses(log: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path


def training(folder: Path, directory: Path, *more: str) -> list[str]:
    return [
        "train", str(directory), "--data", slow_data(folder), "--lr", "0.05", "--epochs", "3",
        "--seed", "5", "--device", "cpu", "--print-every", "0", *more,
    ]  # fmt: skip


def failing(folder: Path, directory: Path) -> list[str]:
    """A run whose second step fails, in the same way on all ranks."""
    (folder / "bad.py").write_text(
        "import numpy as np\ndef batches():\n    for x in (1, np.nan):\n"
        "        yield {'x': np.full((2, 64), x, np.float32), 'labels': np.ones(2, np.int64)}\n"
    )
    saving = ["--checkpoint", str(folder / "ck"), "--every", "1"]
    return ["train", str(directory), "--data", "bad:batches", "--lr", "1", *saving]


def wait_for(process: "subprocess.Popen[str]", happened: Callable[[], bool]) -> None:
    """Waits until something has happened; the process must not end before."""
    while not happened():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def session_directories(process: "subprocess.Popen[str]") -> list[Path]:
    """The session directories of the mpirun that `launch` has started, in folders of its own."""
    (mpirun,) = children(process.pid)
    return [*Path(tempfile.gettempdir()).glob(f"onnxpar-launch-*/ompi.{mpirun}")]


def finish(process: "subprocess.Popen[str]") -> tuple[str, str]:
    return process.communicate(timeout=LIMIT)


def gone(pids: Sequence[int], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


@pytest.mark.timeout(120 + 60 * len(KILLS))
def test_a_rank_killed_at_any_moment_costs_no_more_than_steps(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses are those of ranks in one process that nobody kills."""
    directory = linear.shard(work, 2, optimizer="adamw")
    arguments = training(work, directory)
    log, folder = work / "log", work / "ck"
    monkeypatch.syspath_prepend(str(work))
    undisturbed = TrainingRun(
        "slow_data:batches", lr=0.05, epochs=3, seed=5, print_every=0, log=log
    )  # fmt: skip
    with TrainerGroup(directory, seed=5) as group:
        group.on_each(lambda member: train_with(member, undisturbed))
    wanted = losses(log)
    assert len(wanted) == 60
    rng = random.Random(SEED)
    saving = ["--checkpoint", str(folder), "--every", "1", "--log", str(log)]
    for number in KILLS:
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)
        what = f"kill {number}, seed {SEED}"
        with launched("-n", "2", "--retries", "1", "--", *arguments, *saving) as process:
            ranks = ranks_of(process, 2)
            while not complete_steps(folder):
                assert process.poll() is None, process.communicate()
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.9))
            # Half of the kills come at any moment, half while a checkpoint is being written.
            while number % 2 and not [*folder.glob(".*.partial")]:
                assert process.poll() is None, what
            assert process.poll() is None, what
            start = time.monotonic()
            os.kill(ranks[rng.randrange(2)], signal.SIGKILL)
            assert gone(ranks), what
            seconds = time.monotonic() - start
            last = Checkpoint.load(resolve(folder))
            for name in last.files:
                last.verify_file(name)
            _, errors = finish(process)
        assert process.returncode == 0, (what, errors)
        assert seconds < 10, what
        assert losses(log) == wanted, what
        found = re.search(r"resuming from \S+step-0*(\d+) on 2 ranks", errors)
        assert found and int(found[1]) >= last.progress.step, (what, errors)
        assert "SIGKILL" in errors


def test_fewer_ranks_go_on(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, fewer, one = (linear.shard(work, devices) for devices in (3, 2, 1))
    arguments = training(work, directory)
    log, folder = work / "log", work / "ck"
    monkeypatch.syspath_prepend(str(work))
    assert main([*training(work, one), "--log", str(log)]) == 0
    wanted = losses(log)
    saving = ["--checkpoint", str(folder), "--every", "5", "--log", str(log)]
    with launched("--fallback", str(fewer), "--", *arguments, *saving) as process:
        ranks = ranks_of(process, 3)
        assert len(session_directories(process)) == 1
        wait_for(process, lambda: bool(complete_steps(folder)))
        os.kill(ranks[2], signal.SIGKILL)
        _, errors = finish(process)
    assert process.returncode == 0, errors
    assert f"on 2 ranks, with {fewer} (restart 1 of 1)" in errors
    # On other numbers of ranks float32 sums have another order: the tolerance of a step.
    assert losses(log) == pytest.approx(wanted, rel=1e-5)
    assert Checkpoint.load(resolve(folder)).devices == 2


AGENT = """#!/bin/bash
# AGENT HOST COMMAND…: like ssh, without this environment, and with another machine's name.
host=$1; shift
exec unshare --uts env -i PATH="$PATH" HOME="$HOME" TMPDIR={temporary} bash -c "hostname $host; $*"
"""


@pytest.fixture
def machines(work: Path) -> list[str]:
    """Options for mpirun to have the first rank here, and the second on what seems another machine.

    That one runs here as well, under another host name: Open MPI starts a daemon there by an agent,
    and all that its rank has of this process is what the daemon was sent.
    """
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("another host name needs the right to make a namespace")
    (work / "far").mkdir()
    agent = work / "agent"
    agent.write_text(AGENT.format(temporary=work / "far"))
    agent.chmod(0o755)
    options = ["--prtemca", "plm_ssh_agent", str(agent), "--host", "far:1,localhost:1"]
    return [f"--mpirun={option}" for option in [*options, "-x", "PYTHONPATH"]]


def test_on_two_machines_what_would_come_again_is_reported(work: Path, machines: list[str]) -> None:
    """Rank 0, which prints for all ranks, is on the other machine."""
    arguments = failing(work, linear.shard(work, 2))
    with launched("--retries", "3", *machines, "--", *arguments) as process:
        _, errors = finish(process)
    assert process.returncode == 1, errors
    assert errors.count("step 2: the loss is nan") == 1 and "resuming" not in errors


@pytest.mark.full
@pytest.mark.parametrize("whom", [0, 1])
def test_on_two_machines_a_rank_dies(work: Path, machines: list[str], whom: int) -> None:
    # Either rank may end first: the one that was killed, or the one that lost its peer.
    resumes_after_killing(lambda ranks: ranks[whom], "a rank failed", work, machines)


def test_on_two_machines_a_daemon_dies(work: Path, machines: list[str]) -> None:
    """Open MPI's mpirun then ends all ranks, and returns 0."""
    message = "ranks 0, 1 did not finish, but mpirun ended with code 0: it lost the machine of "
    message += "rank 0"
    resumes_after_killing(lambda ranks: parent(ranks[0]), message, work, machines)


def resumes_after_killing(
    whom: Callable[[Sequence[int]], int], message: str, work: Path, machines: Sequence[str]
) -> None:
    """Kills a process, chosen by those of the ranks, after the first checkpoint of a training."""
    directory, log, folder = linear.shard(work, 2), work / "log", work / "ck"
    arguments = training(work, directory, "--log", str(log), "--checkpoint", str(folder))
    with launched("--retries", "1", *machines, "--", *arguments, "--every", "1") as process:
        ranks = ranks_anywhere(process, 2)
        wait_for(process, lambda: bool(complete_steps(folder)))
        os.kill(whom(ranks), signal.SIGKILL)
        assert gone(ranks)
        _, errors = finish(process)
    assert process.returncode == 0, errors
    assert message in errors and "resuming from" in errors
    assert len(losses(log)) == 60


def parent(pid: int) -> int:
    """Open MPI's daemon, which started the rank."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


SMALL_DISK = """
mount -t tmpfs -o size={size}k none "$1" || exit 77
"${{@:3}}"
code=$?
cp -a "$1/." "$2"
exit $code
"""


def test_a_disk_that_is_full(work: Path) -> None:
    """All ranks end with the reason; complete checkpoints stay complete."""
    directory, disk, kept = linear.shard(work, 2, optimizer="adamw"), work / "disk", work / "kept"
    disk.mkdir()
    saving = ["--checkpoint", str(disk / "ck"), "--every", "1", "--keep", "100"]
    command = [sys.executable, "-m", "onnxpar.cli", "launch", "--retries", "3", "--"]
    command += training(work, directory, *saving)
    inner = ["bash", "-c", SMALL_DISK.format(size=96), "-", str(disk), str(kept), *command]
    done = subprocess.run(
        ["unshare", "--mount", *inner],
        env=mpirun_environment({k: v for k, v in os.environ.items() if "OMPI_" not in k}),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if "unshare: " in done.stderr or done.returncode == 77:
        pytest.skip("a disk of its own needs the right to mount")
    assert done.returncode == 2, done.stderr
    assert "the disk is full (No space left on device)" in done.stderr
    assert "Traceback" not in done.stderr and "resuming" not in done.stderr
    steps = complete_steps(kept / "ck")
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 1
    for step in steps:
        checkpoint = Checkpoint.load(kept / "ck" / step_name(step))
        for name in checkpoint.files:
            checkpoint.verify_file(name)


@pytest.mark.full
def test_a_rank_that_stalls(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others name it after their time limit, and the training continues."""
    monkeypatch.setenv("ONNXPAR_TIMEOUT", "5")
    directory, folder, log = linear.shard(work, 2), work / "ck", work / "log"
    arguments = training(work, directory, "--checkpoint", str(folder), "--log", str(log))
    with launched("--retries", "1", "--", *arguments, "--every", "1") as process:
        ranks = ranks_anywhere(process, 2)
        wait_for(process, lambda: bool(complete_steps(folder)))
        os.kill(ranks[1], signal.SIGSTOP)
        # The limit, and 8 s in which mpirun ends, or `launch` ends it.
        assert gone(ranks, 5 + 8 + 10)
        _, errors = finish(process)
    assert process.returncode == 0, errors
    assert "waited 5 s for rank 1 (ONNXPAR_TIMEOUT)" in errors and "resuming from" in errors
    assert len(losses(log)) == 60


@pytest.mark.full
@pytest.mark.parametrize("delay", [0.0, 0.8])
def test_a_rank_that_never_starts(
    work: Path, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    """The others cannot know which one is missing before MPI has started; `launch` does."""
    monkeypatch.setenv("ONNXPAR_TIMEOUT", "5")
    directory = linear.shard(work, 2)
    with launched("--", *training(work, directory)) as process:
        ranks = ranks_anywhere(process, 2)
        time.sleep(delay)
        os.kill(ranks[1], signal.SIGSTOP)
        # The limit of a start is 10 s, and there are 8 s in which mpirun ends, or `launch` ends it.
        assert gone(ranks, 10 + 8 + 10)
        _, errors = finish(process)
    assert process.returncode == 1, errors
    (line,) = [text for text in errors.splitlines() if " after " in text and "launch" in text]
    assert line.endswith(("stopped before all had started: rank 1", "not seen to start: rank 1"))


TINY_MEMORY = """
mount -t tmpfs -o size=64k none /dev/shm || exit 77
exec "$@"
"""


@pytest.mark.full
def test_shared_memory_of_64_kib(work: Path) -> None:
    """The losses are those of a run with enough: onnxpar's own memory is not in /dev/shm."""
    directory, found = linear.shard(work, 2), []
    for name, before in (
        ("enough", []),
        ("tiny", ["unshare", "--mount", "bash", "-c", TINY_MEMORY, "-"]),
    ):
        arguments = training(work, directory, "--log", str(work / name), "--steps", "3")
        done = subprocess.run(
            [*before, sys.executable, "-m", "onnxpar.cli", "launch", "--", *arguments],
            env=mpirun_environment({k: v for k, v in os.environ.items() if "OMPI_" not in k}),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if "unshare: " in done.stderr or done.returncode == 77:
            pytest.skip("a /dev/shm of its own needs the right to mount")
        assert done.returncode == 0, done.stderr
        found.append(losses(work / name))
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.full
def test_what_would_come_again_is_not_tried_again(work: Path) -> None:
    arguments = failing(work, linear.shard(work, 2))
    with launched("--retries", "3", "--", *arguments) as p:
        _, errors = finish(p)
    assert p.returncode == 1
    assert errors.count("step 2: the loss is nan") == 1 and "resuming" not in errors
    # The checkpoint that was being written when the run ended has become complete.
    assert complete_steps(work / "ck") == [1]
    with launched("--retries", "3", "--", *arguments, "--nope") as p:
        _, errors = finish(p)
    assert p.returncode == 2
    assert errors.count("no such option") == 1


@pytest.mark.full
def test_retries_are_used_up(work: Path) -> None:
    directory = linear.shard(work, 2)
    (work / "dies.py").write_text("import os\ndef batches():\n    os.kill(os.getpid(), 9)\n")
    arguments = ["train", str(directory), "--data", "dies:batches", "--lr", "1"]
    with launched("--retries", "1", "--", *arguments, "--checkpoint", str(work / "ck")) as process:
        _, errors = finish(process)
    assert process.returncode == 1
    reported = [line for line in errors.splitlines() if line.startswith("onnxpar: launch: ")]
    assert (
        "restarting from the beginning, because no checkpoint is complete, on 2 ranks"
        in reported[1]
    )
    assert len(reported) == 4 and reported[3] == "onnxpar: launch: giving up: no retries are left"


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks(work: Path, number: signal.Signals) -> None:
    directory, folder = linear.shard(work, 2), work / "ck"
    saving = ["--checkpoint", str(folder), "--every", "1"]
    arguments = training(work, directory, *saving)
    with launched("--retries", "3", "--", *arguments) as process:
        ranks = ranks_of(process, 2)
        wait_for(process, lambda: bool(complete_steps(folder)))
        process.send_signal(number)
        _, errors = finish(process)
        assert process.returncode == 128 + number
        assert gone(ranks, 1)
    assert "onnxpar: error: interrupted" in errors and "resuming" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT] if FULL else [signal.SIGTERM])
def test_ranks_with_a_grace_time_write_a_last_checkpoint(
    work: Path, number: signal.Signals
) -> None:
    """In the full tier also: a run that continues from it has the losses of an undisturbed one."""
    directory, folder, log = linear.shard(work, 2), work / "ck", work / "log.jsonl"
    saving = ["--checkpoint", str(folder), "--every", "1000", "--grace", "60"]
    arguments = training(work, directory, *saving, "--log", str(log), "--steps", "60")
    with launched("--retries", "3", "--", *arguments) as process:
        ranks = ranks_of(process, 2)
        wait_for(process, lambda: log.exists() and bool(log.read_text()))
        process.send_signal(number)
        _, errors = finish(process)
        assert process.returncode == 128 + number
        assert gone(ranks, 1)
    done = len(losses(log))
    assert complete_steps(folder) == [done] and 0 < done < 60
    assert f"stopped after step {done}, with a last checkpoint in {folder}" in errors
    assert "resuming" not in errors
    if not FULL:
        return
    with launched("--", *arguments, "--resume", str(folder)) as process:
        finish(process)
        assert process.returncode == 0
    undisturbed = work / "undisturbed.jsonl"
    with launched("--", *training(work, directory, "--log", str(undisturbed))) as process:
        finish(process)
    assert losses(log) == losses(undisturbed)


@pytest.mark.full
def test_a_grace_time_ends(work: Path) -> None:
    """A rank that no longer answers does not keep the others longer than that."""
    directory, folder, log = linear.shard(work, 2), work / "ck", work / "log.jsonl"
    saving = ["--checkpoint", str(folder), "--grace", "1", "--log", str(log)]
    with launched("--", *training(work, directory, *saving)) as process:
        ranks = ranks_anywhere(process, 2)
        wait_for(process, lambda: log.exists() and bool(log.read_text()))
        os.kill(ranks[1], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        _, errors = finish(process)
        assert process.returncode == 128 + signal.SIGTERM
        assert gone(ranks, 1)
    assert "SIGUSR2: the last checkpoint was not complete after --grace 1 s" in errors
    assert not complete_steps(folder)


@pytest.mark.full
@pytest.mark.parametrize("whom", ["mpirun", "supervisor"])
def test_no_rank_is_left_behind(work: Path, whom: str) -> None:
    directory, folder = linear.shard(work, 2), work / "ck"
    arguments = training(work, directory, "--checkpoint", str(folder), "--every", "1")
    with launched("--retries", "1", "--", *arguments) as process:
        ranks = ranks_of(process, 2)
        (mpirun,) = children(process.pid)
        (session,) = session_directories(process)
        wait_for(process, lambda: bool(complete_steps(folder)))
        mapped = Path(f"/proc/{ranks[0]}/maps").read_text().split()
        shared = {Path(name) for name in mapped if "/sm_segment." in name}
        os.kill(mpirun if whom == "mpirun" else process.pid, signal.SIGKILL)
        assert gone(ranks)
        _, errors = finish(process)
    assert process.returncode == (0 if whom == "mpirun" else -signal.SIGKILL), errors
    # Its name has the PID of mpirun: where all have the same parent, it would stop a later one.
    assert whom == "supervisor" or not session.exists()
    # Nobody else removes Open MPI's shared memory when mpirun is killed.
    assert len(shared) == 2 and not [path for path in shared if path.exists()]


SCRIPT = """
import sys
import numpy as np
from onnxpar_runtime import init
rank = init("mpi")
rank.all_reduce(np.ones(2))
if rank.index == 1 and sys.argv[1] == "raise":
    raise ValueError("wrong")
if rank.index == 1 and sys.argv[1] == "exit":
    sys.exit(3)
if sys.argv[1] != "exit":
    rank.all_reduce(np.ones(2))
"""


@pytest.mark.full
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1), ("exit", 1)])
def test_a_script_of_ones_own(work: Path, how: str, code: int) -> None:
    """A rank that raises an exception must not wait for the others to end."""
    (work / "script.py").write_text(SCRIPT)
    with launched("-n", "2", "--", sys.executable, str(work / "script.py"), how) as process:
        _, errors = finish(process)
    assert process.returncode == code, errors
    assert ("r1 | ValueError: wrong" in errors) is (how == "raise"), errors
    assert ("Traceback" in errors) is (how == "raise"), errors
    assert ("a rank failed" in errors) is (how != "end"), errors

"""Mistakes in `onnxpar launch` and in checkpoint options are reported before anything starts."""

from pathlib import Path
from tempfile import gettempdir

import pytest

from onnxpar.cli import main
from onnxpar_runtime import supervisor
from onnxpar_runtime.errors import OnnxparRuntimeError
from onnxpar_runtime.hosts import Hosts
from onnxpar_runtime.supervisor import Job, option, supervise
from tests.cli import linear


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    for devices in (1, 2):
        linear.shard(folder, devices)
    return folder


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    return printed.err


def test_mistakes(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = str(sharded / "ranks2")
    train = ["--", "train", two, "--data", "digits", "--lr", "1"]
    cases = (
        (["--", "verify", two], f"got `-- verify {two}`: verify runs all ranks in one process"),
        (["--", "trian", two], "expected `-- COMMAND DIR …` with a command of run, generate, "),
        (["--", "trian", two], f"got `-- trian {two}`: a program of your own needs -n N"),
        (
            ["-n", "2", "--", "trian", two],
            ": there is no program 'trian' that can be executed",
        ),
        (["-n", "2", "--fallback", two, "--", "true"], "--fallback: expected `-- train DIR …`"),
        (["-n", "2", "--retries", "-1", "--", "true"], "--retries: expected 0 to 1000, got -1"),
        (["-n", "0", "--", "true"], "-n: expected a number >= 1, got 0"),
        (["--", "run"], "got `-- run`"),
        (["--", "run", "nodir"], "launch: nodir does not exist"),
        (["--", "run", "--inputs", "x.npz", two], "expected `-- run DIR …`, got `-- run --inputs`"),
        (["--", "train", str(sharded)], f"got {sharded}, which has no manifest.json"),
        (["--retries", "1", "--", "run", two], "--retries and --fallback: expected `-- train DIR"),
        (["-n", "4", *train], "-n 4: "),
        (["--retries", "1", *train], "expected --checkpoint in the command as well"),
        (["--retries", "-1", *train], "--retries: expected 0 to 1000, got -1"),
        (["--retries", "9" * 9, *train], "--retries: expected 0 to 1000, got 999999999"),
        (
            ["--fallback", str(sharded), *train, "--checkpoint", "c"],
            "expected a directory that `onnxpar shard` wrote",
        ),
    )
    for arguments, message in cases:
        assert message in error_of(capsys, "launch", *arguments), arguments


def test_help_of_the_command_is_printed_once(
    sharded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It starts no ranks, so none is missed."""
    assert main(["launch", "--", "train", str(sharded / "ranks2"), "--help"]) == 0
    printed = capfd.readouterr()
    assert printed.out.count("Usage: ") == 1 and printed.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--every", "5"], "--every: expected --checkpoint FOLDER as well"),
        (["--keep", "5"], "--keep: expected --checkpoint FOLDER as well"),
        (["--checkpoint", "c", "--every", "0"], "--every: expected a number >= 1, got 0"),
        (["--checkpoint", "c", "--keep", "0"], "--keep: expected a number >= 1, got 0"),
        (["--resume", "nowhere"], "nowhere: no such checkpoint or folder"),
    ],
)
def test_options_of_checkpoints(
    sharded: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    run = ["train", str(sharded / "ranks1"), "--data", "digits", "--batch-size", "100", "--lr", "1"]
    assert message in error_of(capsys, *run, *arguments)
    assert not Path("c").exists()


def test_a_folder_that_cannot_be_made(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    run = ["train", str(sharded / "ranks1"), "--data", "digits", "--batch-size", "100", "--lr", "1"]
    where = tmp_path / "file" / "ck"
    assert main([*run, "--checkpoint", str(where), "--print-every", "0"]) == 2
    assert f"{where}: cannot be written: Not a directory" in capsys.readouterr().err


def test_the_last_of_two_options_counts() -> None:
    given = ["train", "d", "--checkpoint", "a", "--lr=1", "--checkpoint=b", "--eval"]
    assert option(given, "--checkpoint") == "b"
    assert option(given, "--lr") == "1"
    assert option(given, "--eval") is None and option(given, "--seed") is None


def test_attempts_go_from_directory_to_directory(
    sharded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two on the first directory, two on the next; from a checkpoint as soon as there is one."""
    ran: list[tuple[int, list[str]]] = []

    def dies(job: Job, ranks: int, arguments: list[str]) -> supervisor._End:
        ran.append((ranks, arguments))
        if len(ran) == 2:
            (tmp_path / "step-00000007").mkdir()
        return supervisor._End(137, None)

    monkeypatch.setattr(supervisor, "_run", dies)
    pauses: list[float] = []
    monkeypatch.setattr(supervisor.time, "sleep", pauses.append)
    first, second = str(sharded / "ranks2"), str(sharded / "ranks1")
    more = ["--lr", "1", "--checkpoint", str(tmp_path)]
    job = Job(["python"], ["train", first, *more], retries=1, fallbacks=[Path(second)])
    assert supervise(job) == 1
    resumed = [*more, "--resume", str(tmp_path)]
    assert ran == [
        (2, ["train", first, *more]),
        (2, ["train", first, *more]),
        (1, ["train", second, *resumed]),
        (1, ["train", second, *resumed]),
    ]
    assert pauses == [1, 2, 4]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("onnxpar: launch: a rank failed, and mpirun ended with SIGKILL")
    assert "from the beginning, because no checkpoint is complete, on 2 ranks" in lines[1]
    assert (
        f"from {tmp_path / 'step-00000007'} on 1 rank, with {second} (restart 2 of 3)" in lines[3]
    )
    assert lines[-1] == "onnxpar: launch: giving up: no retries are left"


def test_a_job_of_another_directory_is_refused(sharded: Path) -> None:
    with pytest.raises(OnnxparRuntimeError, match="leave out -n"):
        supervise(Job(["python"], ["train", str(sharded / "ranks2")], ranks=3))


def test_a_program_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets its arguments as they are, and succeeds if mpirun says so."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        f'#!/bin/sh\necho Open MPI "$@" >> {tmp_path}/calls\n'
        f"[ $(wc -l < {tmp_path}/calls) -lt 4 ] || exit 0\nexit 9\n"
    )
    mpirun.chmod(0o755)
    monkeypatch.setattr(supervisor, "find_mpirun", lambda: str(mpirun))
    monkeypatch.setattr(supervisor, "is_open_mpi", lambda path: False)
    monkeypatch.setattr(supervisor, "crowd_options", lambda path, ranks: [])
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: None)
    arguments = ["sh", "-c", "--help", "--grace", "9"]
    assert supervise(Job(["python"], arguments, ranks=3, retries=1)) == 1
    assert "restarting on 3 ranks, with sh (restart 1 of 1)" in capsys.readouterr().err
    assert supervise(Job(["python"], arguments, ranks=3, retries=1)) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["Open MPI -n 3 sh -c --help --grace 9"] * 4


def test_ranks_that_never_started_are_not_said_to_have_failed(
    sharded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Open MPI || exit 213\n')
    mpirun.chmod(0o755)
    monkeypatch.setattr(supervisor, "find_mpirun", lambda: str(mpirun))
    assert supervise(Job(["python"], ["run", str(sharded / "ranks2")])) == 1
    message = "launch: no rank was seen to start, and mpirun ended with code 213 after"
    assert message in capsys.readouterr().err


def test_machines_whose_ranks_cannot_be_seen_are_refused(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hosts, "see", lambda self, folder: folder.parent != Path(gettempdir()))
    job = Job(["python"], ["run", str(sharded / "ranks2")], options=["--host", "a:2,b"])
    message = "none of the machines a:2, b is this one, and they do not share its folder "
    with pytest.raises(OnnxparRuntimeError, match=message + gettempdir()):
        supervise(job)


@pytest.mark.parametrize(
    ("more", "crowds"), [([], True), (["--host", "a:9,b:9"], False), (["-x", "A"], True)]
)
def test_machines_that_are_named_say_how_many_ranks_they_take(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], crowds: bool
) -> None:
    """Open MPI with --oversubscribe would start all of them on the first machine."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f'#!/bin/sh\necho Open MPI "$@" | tee -a {tmp_path}/calls\n')
    mpirun.chmod(0o755)
    monkeypatch.setattr(supervisor, "find_mpirun", lambda: str(mpirun))
    monkeypatch.setattr("onnxpar_runtime.launch.cores", lambda: 1)
    assert supervise(Job(["python"], ["run", str(sharded / "ranks2")], options=more)) == 1
    (call,) = (c for c in (tmp_path / "calls").read_text().splitlines() if "--version" not in c)
    assert call.startswith("Open MPI --oversubscribe") is crowds and call.count("ranks2") == 1

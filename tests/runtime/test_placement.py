"""How an mpirun is told on which machine each rank runs."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from onnxpar_runtime.placement import placed

OPEN, MPICH = ["--host", "a:2,b:2", "-x", "A"], ["-hosts", "a:2,b:2"]
# Most is sent between ranks r and r + 2.
MANIFEST = Mock(
    axes=(("tp", 2), ("dp", 2)), stage_devices=4, devices=4,
    report={"collectives": [
        {"groups": [[0, 2], [1, 3]], "bytes": 3 << 20}, {"groups": [[0, 1], [2, 3]], "bytes": 1024},
    ]},
)  # fmt: skip


def mpirun(folder: Path, version: str, usage: str = "") -> str:
    """Writes an mpirun that only says what it is."""
    path = folder / "mpirun"
    path.write_text(f'#!/bin/sh\ncase $1 in --help) echo "{usage}" ;; *) echo {version} ;; esac\n')
    path.chmod(0o755)
    return str(path)


def test_open_mpi(tmp_path: Path) -> None:
    program, file = mpirun(tmp_path, "Open MPI"), tmp_path / "ranks"
    options, notice = placed(program, OPEN, MANIFEST, tmp_path)
    assert options == ["-x", "A", "--hostfile", str(file), "--map-by", "seq"]
    assert file.read_text() == "a\nb\na\nb\n"
    assert notice == (
        "the mesh axes are laid onto machines in the order dp=2,tp=2: of the 3 MiB that a rank "
        "sends in collectives, 1 KiB leave its machine, and with consecutive ranks 3 MiB would "
        "(--keep-placement)"
    )


def test_mpich(tmp_path: Path) -> None:
    program = mpirun(tmp_path, "HYDRA", "-rankmap {rank map}")
    assert placed(program, MPICH, MANIFEST, tmp_path)[0] == [*MPICH, "-rankmap", "0,1,0,1"]


def test_an_mpich_that_cannot_place_ranks(tmp_path: Path) -> None:
    assert placed(mpirun(tmp_path, "HYDRA"), MPICH, MANIFEST, tmp_path) == (MPICH, "")


@pytest.mark.parametrize(
    "options",
    [[], ["--host", "a:4,b:4", "--rank-by", "node"], [*OPEN, "-N", "2"], ["--host", "a:2"],
     ["--host", "a:4"], [*OPEN, "--map-by=slot"], ["--host", "a:1,b:2"]],
)  # fmt: skip
def test_the_given_placement_stays(tmp_path: Path, options: list[str]) -> None:
    program = mpirun(tmp_path, "Open MPI")
    assert placed(program, options, MANIFEST, tmp_path) == (options, "")
    assert not (tmp_path / "ranks").exists()

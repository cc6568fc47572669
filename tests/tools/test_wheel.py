"""The wheel that needs no compiler: two ranks run in fresh environments, with both MPIs.

ONNXPAR_WHEEL names a wheel that `tools/wheel` has built; without it, one is built, which takes
minutes. Packages come from an index, so this needs a network.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import release, try_wheel

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(sys.platform != "linux", reason="makes wheels for Linux"),
    pytest.mark.xdist_group("wheel"),
]
# The versions of onnxruntime at both ends of the range in pyproject.toml.
OLDEST, NEWEST = "1.30.0", "1.32.0"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("ONNXPAR_WHEEL"):
        return Path(given)
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([ROOT / "tools" / "wheel", "-o", folder], check=True)
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (built,) = folder.glob("*.whl")
    assert "-py3-none-manylinux" in built.name and "_2_28_" in built.name
    return built


def python(version: str) -> str:
    """A Python of this version; skips the test if there is none."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    found = str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")
    if found is None:
        pytest.skip(f"no Python {version}")
    return found


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_two_ranks_in_a_fresh_environment(
    wheel: Path, version: str, mpi: str, tmp_path: Path
) -> None:
    try_wheel.try_one(wheel, python(version), mpi, None, tmp_path)


def test_two_ranks_with_the_mpi_of_this_machine(wheel: Path, tmp_path: Path) -> None:
    """Such as Debian's Open MPI 4.1, by the same commands as with a wheel of MPI."""
    if shutil.which("mpirun", path=os.defpath) is None:
        pytest.skip(f"no mpirun in {os.defpath} (Debian: apt-get install openmpi-bin)")
    try_wheel.try_one(wheel, python("3.11"), try_wheel.SYSTEM, None, tmp_path)


def test_the_sbom_names_the_cpp_library_inside(wheel: Path) -> None:
    assert "libc++" in {part["name"] for part in release.sbom(wheel)["components"]}


def test_the_collectives_with_mpich(wheel: Path, tmp_path: Path) -> None:
    """The tests of the quick tier, and the end of a job by MPI_Abort."""
    env = try_wheel.Environment(tmp_path, python("3.11"))
    asked = f"onnxpar[cpu,mpich] @ {wheel.resolve().as_uri()}"
    tools = ("pytest>=8,<9.2", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "scikit-learn>=1.5")
    env.run("python", "-m", "pip", "install", "--quiet", asked, *tools)
    # Not the clone itself: its packages would hide those of the wheel.
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    abort = "tests/mpi/test_run.py::test_an_exception_of_one_rank_ends_all"
    env.run("python", "-m", "pytest", "-q", "tests/mpi/test_collectives.py", abort)


@pytest.mark.parametrize("onnxruntime", [OLDEST, NEWEST])
def test_both_ends_of_the_range_of_onnxruntime(
    wheel: Path, onnxruntime: str, tmp_path: Path
) -> None:
    try_wheel.try_one(wheel, python("3.11"), "openmpi", onnxruntime, tmp_path)

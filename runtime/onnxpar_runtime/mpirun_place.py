"""Which rank of how many a process is, as mpirun tells it before MPI starts."""

import os
from collections.abc import Mapping

# Open MPI's mpirun, and the process managers of MPICH's family.
_RANK_VARIABLES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def mpirun_place(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Returns `(rank, size)` from mpirun's environment variables; None outside mpirun."""
    environ = os.environ if environ is None else environ
    for rank, size in _RANK_VARIABLES:
        if rank in environ and size in environ:
            return int(environ[rank]), int(environ[size])
    return None

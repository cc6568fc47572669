"""How a process learns its rank, and how all ranks end when one cannot go on.

If a rank raised an error or called `sys.exit`, the others and mpirun would wait for it. So the
outermost call of a rank's program is `guarded`. It prints an error that all ranks agreed on once,
and all ranks end in order. It prints an error of one rank with the rank's number, and ends all
ranks by MPI_Abort. In a program that calls only `init`, an exception that nothing catches does so.
"""

import atexit
import functools
import logging
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import which
from types import TracebackType

from onnxpar_format.place import find_place
from onnxpar_format.texts import message_text
from onnxpar_runtime.agree import together
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.cores import cores
from onnxpar_runtime.devices import check_wanted, gather
from onnxpar_runtime.errors import LaunchError, OnnxparRuntimeError, RankError
from onnxpar_runtime.installed import INSTALL_MPI, check_one_mpi
from onnxpar_runtime.logs import PACKAGE
from onnxpar_runtime.marks import SUPERVISED, mark_finished, mark_segments, mark_started

log = logging.getLogger(f"{PACKAGE}.launch")
TRANSPORTS = ("auto", "mpi", "nccl", "threads")
_INTERRUPTED = 130
_OWN = re.compile(r"^(?:\x00|-{70,})*((?:r\d+ \||onnxpar: ).*?)(?:-{70,})?$", re.MULTILINE)
SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"
"""Open MPI's variable for the folder in which an mpirun makes its session directory."""
_BATCH = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
"""Variables of a job in which mpirun asks a batch system for its machines."""
AGREED = 64
"""Is added to the exit code if all ranks of a supervisor agreed on an error.

Such an error would come again after a restart. Exit code 1 alone may also come from a rank that
failed by itself. Exit codes reach the supervisor from ranks on any machine.
"""


def init(transport: str = "auto", device: str = "auto") -> Rank:
    """Returns this process's rank, placed on a device. Every rank must call it.

    Args:
        transport: `mpi`; `nccl`, which sends tensors from GPU to GPU, and all else as `mpi`;
            `threads`, a world of this one rank; or `auto`, which is `threads` outside mpirun,
            `nccl` if each rank has a GPU and NCCL can be loaded, and otherwise `mpi`.
        device: `cpu`; `cuda`, a GPU for each rank of a machine, shared if there are fewer GPUs;
            `cuda:NUMBER`, this GPU; or `auto`, which is `cuda` if all ranks can use it, and
            otherwise `cpu`. Sessions and trainers of the rank compute there.

    From then on, an exception that this process does not catch ends all ranks, after its traceback;
    `guarded` says more about errors.

    Raises:
        LaunchError: The transport or the device is unknown or cannot be used; says what is missing.
    """
    check_wanted(device)
    if transport not in TRANSPORTS:
        raise LaunchError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    place = find_place()
    alone = transport == "threads" or (transport == "auto" and place is None)
    # Before MPI starts, because a rank may wait there for another one until its time limit ends it.
    number = 0 if alone or place is None else place.rank
    mark_started(number)
    world = World.threads(1) if alone else World.mpi()
    mark_segments(number)
    rank = world.rank(world.local_ranks[0])
    if not alone:
        _end_all_at_errors(rank)
    placement = gather(rank, device, transport)
    together(rank, lambda: rank.place(placement))
    return rank


def _end_all_at_errors(rank: Rank) -> None:
    """Lets an exception that nothing catches end all ranks, unless all ranks raise it."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        if not (isinstance(error, OnnxparRuntimeError) and error.agreed):
            code = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
            rank.world.abort(rank.index, message_text(f"{kind.__name__}: {error}"), code)

    sys.excepthook = hook
    atexit.register(_mark_end, rank.index)


def _mark_end(rank: int) -> None:
    """Marks at the end of a program that it finished, if no exception ended it."""
    if not hasattr(sys, "last_value"):
        mark_finished(rank)


def find_mpirun() -> str:
    """Returns the path of mpirun: next to this Python, or else on the PATH.

    Raises:
        LaunchError: There is none, or two wheels of MPI are installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    found = str(beside) if beside.exists() else which("mpirun")
    if found is None:
        raise LaunchError(
            f"mpirun was found neither next to this Python nor on the PATH: {INSTALL_MPI}"
        )
    check_one_mpi()
    # Where /bin is a link to /usr/bin, Open MPI 4 refuses /bin/mpirun: its prefix would be empty.
    return str(Path(found).parent.resolve() / "mpirun")


def crowd_options(mpirun: str, ranks: int) -> list[str]:
    """Returns the options with which an mpirun starts more ranks than this machine has cores.

    MPICH's mpirun needs none. Open MPI counts cores, not their hardware threads. Within a job of a
    batch system, the job says how many may start.
    """
    crowded = ranks > cores() and not any(name in os.environ for name in _BATCH)
    return ["--oversubscribe"] if crowded and is_open_mpi(mpirun) else []


@functools.cache
def is_open_mpi(mpirun: str) -> bool:
    """Whether an mpirun is that of Open MPI; MPICH's has other options."""
    try:
        done = subprocess.run(
            [mpirun, "--version"], env=mpirun_environment(), capture_output=True, check=False
        )
    except OSError as error:
        raise LaunchError(f"{mpirun} cannot be started: {error.strerror}") from None
    return b"Open MPI" in done.stdout


def mpirun_environment(
    environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> dict[str, str]:
    """Returns the environment for mpirun; for root, with the permission that Open MPI asks for.

    Args:
        environ: The environment to start from; by default that of this process.
        folder: Where Open MPI's mpirun makes its session directory, unless `environ` says it. By
            default this is `ompi.PID` in the folder for temporary files. A killed mpirun leaves it
            there, and then a later mpirun that gets the same PID cannot start: "The PMIx server's
            listener thread failed to start".
    """
    result = dict(os.environ if environ is None else environ)
    if folder is not None:
        result.setdefault(SESSIONS, str(folder))
    if os.geteuid() == 0:
        result.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        result.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    return result


def own_messages(errors: str) -> list[str]:
    """Returns the lines of mpirun's stderr that are onnxpar's: `r<rank> | …` and `onnxpar: …`.

    mpirun's own reports may be on the same lines: a line of dashes after a message, or a zero byte
    at the end of a report before it.
    """
    return _OWN.findall(errors)


def guarded(rank: Rank, action: Callable[[], int]) -> int:
    """Returns the exit code of `action`, which is all that this rank runs.

    Rank 0 prints an error that all ranks agreed on, and all ranks return its exit code (plus
    `AGREED` under a supervisor). Any other error, and a call of `sys.exit`, ends all ranks:
    `r3 | message` on stderr, then MPI_Abort. Tracebacks of internal errors go to the rank's log
    only.

    Raises:
        SystemExit: The only rank calls `sys.exit`.
    """
    atexit.unregister(_mark_end)
    try:
        code = action()
        mark_finished(rank.index)
        return code
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
        rank.world.abort(rank.index, message_text(message), code)
    else:
        report(message)
    return code


def report(message: str) -> None:
    """Writes one error message for people to stderr."""
    sys.stderr.write(f"onnxpar: error: {message_text(message)}\n")
    sys.stderr.flush()

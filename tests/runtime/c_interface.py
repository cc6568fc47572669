"""The C interface for other languages (`capi/onnxpar.h`), called by ctypes."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES, onnx_code
from onnxpar_runtime.launch import find_mpirun, mpirun_environment
from onnxpar_runtime.library import custom_op_library

Array = NDArray[Any]
_BY_CODE = {element.code: element.dtype for element in DTYPES.values()}


class Tensor(ctypes.Structure):
    """`onnxpar_tensor`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int),
        ("dims", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
    )

    def array(self) -> Array:
        """Its elements, as an array over its memory."""
        shape = self.shape[: self.dims]
        memory = (ctypes.c_byte * self.bytes).from_address(self.data or 0)
        return np.frombuffer(memory, _BY_CODE[self.type]).reshape(shape)


class CError(Exception):
    """What `onnxpar_error` says."""


class Host:
    """One rank of a directory, as a host without Python's runtime has it.

    Attributes:
        addresses: Where the last inputs are, by name.
    """

    def __init__(self, directory: Path, rank: int, world: ctypes.c_void_p | None = None) -> None:
        self._library = ctypes.CDLL(str(custom_op_library()))
        self._library.onnxpar_error.restype = ctypes.c_char_p
        for name in ("open", "new_run", "graph"):
            self._function(name).restype = ctypes.c_void_p
        self._world = world
        self._runs: dict[str, ctypes.c_void_p] = {}
        self.addresses: dict[str, int | None] = {}
        self._directory = self._made("open", str(directory).encode(), rank)

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"onnxpar_{name}")

    def _fail(self) -> CError:
        return CError(self._library.onnxpar_error().decode())

    def _made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        found = self._function(name)(*arguments)
        if not found:
            raise self._fail()
        return ctypes.c_void_p(found)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._function(name)(*arguments) != 0:
            raise self._fail()

    def prepared(
        self,
        feeds: Mapping[str, Array],
        numbers: Mapping[str, float] | None = None,
        program: str = "model",
    ) -> dict[str, Array]:
        """What a program's session takes for whole inputs, by name.

        The same run is used each time, so that numbers stay.
        """
        if program not in self._runs:
            self._runs[program] = self._made("new_run", self._directory, program.encode())
        run = self._runs[program]
        for name, value in (numbers or {}).items():
            self._call("set", run, name.encode(), ctypes.c_double(value))
        for name, array in feeds.items():
            shape = (ctypes.c_int64 * array.ndim)(*array.shape)
            data = array.ctypes.data_as(ctypes.c_void_p)
            self._call(
                "give", run, name.encode(), onnx_code(array.dtype), shape, array.ndim, data,
                ctypes.c_size_t(array.nbytes),
            )  # fmt: skip
        self._call("prepare", run, self._world)
        count: Callable[..., int] = self._function("feeds")
        found = {}
        for index in range(count(run)):
            tensor = Tensor()
            self._call("feed", run, index, ctypes.byref(tensor))
            name = (tensor.name or b"").decode()
            found[name] = tensor.array().copy()
            self.addresses[name] = tensor.data
        return found

    def close(self) -> None:
        for run in self._runs.values():
            self._function("free_run")(run)
        self._function("free_directory")(self._directory)


def under_mpi(
    ranks: int, command: list[str], **environment: str
) -> "subprocess.CompletedProcess[str]":
    """What a command that is not Python gives under mpirun."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
    return subprocess.run(
        [find_mpirun(), "--oversubscribe", "-n", str(ranks), *command],
        env={**mpirun_environment(kept), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )

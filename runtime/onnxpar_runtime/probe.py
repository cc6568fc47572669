"""Finds out what a machine has for CUDA: `python -m onnxpar_runtime.probe`.

It writes one JSON object in each line, as soon as it is known, because a broken library may end the
process. `onnxpar_runtime.devices.Facts` describes the fields; `doing` is the next action.
"""

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime

from onnxpar_runtime.devices import CUDA, DRIVER, EXTRA, built_for, no_driver
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.installed import ONNXRUNTIMES, installed
from onnxpar_runtime.library import nccl_library

_NAME_BYTES = 256
# The libraries that libonnxruntime_providers_cuda.so is linked with, and those it opens on demand.
_LINKED = ("libcudart.so.{cuda}", "libcublasLt.so.{cuda}", "libcublas.so.{cuda}", "libcurand.so.10")
_OPENED = ("libcudnn.so.9", "libcufft.so.{fft}", "libnvrtc.so.{cuda}")
_UNFOUND = re.compile(r"(lib[\w.+-]+\.so[.\d]*): cannot open shared object file")
# The part of onnxruntime's message with CUDA's error, after the position in its own source.
_FAILURE = re.compile(r"(?P<said>\b[A-Z]+ failure -?\d+: [^;]*?) ;.* expr=(?P<call>.*?);")
_MESSAGE = 500  # characters
_MODEL = """<ir_version: 10, opset_import: ["": 21]>
    g (float[2, 2] a) => (float[2, 2] b) { c = MatMul(a, a)  b = Add(c, a) }"""


def probe(tell: Callable[[dict[str, Any]], None]) -> None:
    """Reports what it finds; tries a session only if no library that it needs is missing."""
    names = onnxruntime.get_available_providers()
    needs = built_for()
    provider = CUDA in names
    tell({"packages": installed(ONNXRUNTIMES), "provider": provider, "needs": needs})
    tell({"doing": "loading the driver"})
    gpus = _tell_driver(tell)
    if not provider:
        return
    tell({"doing": "loading CUDA's libraries"})
    # It prints what it cannot find, which is reported by name below.
    onnxruntime.preload_dlls()
    cuda = needs[0] if needs else 13
    linked, opened = (
        [name.format(cuda=cuda, fft=cuda - 1) for name in names] for names in (_LINKED, _OPENED)
    )
    missing = [name for name in linked if not _loads(name)]
    absent = [name for name in opened if not _loads(name)]
    tell({"missing": missing, "absent": absent, "doing": "loading NCCL"})
    tell(_nccl())
    errors = []
    for gpu in range(0 if missing else gpus):
        tell({"doing": f"running a session on GPU {gpu}"})
        errors.append(_session_error(gpu))
    tell({"session_errors": errors, "doing": ""})


def _tell_driver(tell: Callable[[dict[str, Any]], None]) -> int:
    """Reports the driver and its GPUs; returns the number of GPUs."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        tell({"driver_error": no_driver(error)})
        return 0
    tell({"doing": "starting the driver"})
    status = driver.cuInit(0)
    no_device = 100  # CUDA_ERROR_NO_DEVICE
    if status not in (0, no_device):
        tell({"driver_error": f"the NVIDIA driver does not start: cuInit returns {status}"})
        return 0
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    gpus = []
    for number in range(0 if status else _count(driver)):
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
        driver.cuDeviceGet(ctypes.byref(handle), number)
        driver.cuDeviceGetName(name, _NAME_BYTES, handle)
        gpus.append(name.value.decode(errors="replace"))
    major, minor = divmod(version.value, 1000)
    tell({"driver": [major, minor // 10], "gpus": gpus})
    return len(gpus)


def _count(driver: ctypes.CDLL) -> int:
    count = ctypes.c_int()
    return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _nccl() -> dict[str, Any]:
    try:
        return {"nccl": nccl_library()[1]}
    except LaunchError as error:
        return {"nccl_error": str(error)}


def _session_error(gpu: int) -> str:
    """Returns why a session cannot run on a GPU; empty if it can.

    If the provider cannot be made, onnxruntime writes the reason to stderr and uses the CPU.
    """
    model = onnx.parser.parse_model(_MODEL)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    written = _Stderr()
    try:
        with written:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(),
                options,
                providers=[(CUDA, {"device_id": str(gpu)})],
            )
        if CUDA not in session.get_providers():
            return written.reason() or "onnxruntime cannot create its CUDA provider"
        session.disable_fallback()
        session.run(None, {"a": np.ones((2, 2), np.float32)})
    except Exception as error:
        # onnxruntime has no common base class for what it raises.
        return cause(str(error))
    return ""


def cause(text: str) -> str:
    """Returns the useful part of onnxruntime's message in one line: CUDA's error, or the end."""
    line = " ".join(text.split())
    failure = _FAILURE.search(line)
    return f"{failure['said']}: {failure['call']}" if failure else line[-_MESSAGE:]


class _Stderr:
    """Captures what is written to the process's stderr in a `with` statement, also by libraries."""

    def __enter__(self) -> None:
        sys.stderr.flush()
        self._kept = os.dup(2)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        os.dup2(writer, 2)
        os.close(writer)
        self._reader = reader

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)
        with os.fdopen(self._reader, "rb") as reader:
            self._text = reader.read().decode(errors="replace")
        with suppress(OSError):
            os.write(2, self._text.encode())

    def reason(self) -> str:
        """The line that names an error, shortened."""
        match = _UNFOUND.search(self._text)
        if match is not None:
            return f"{match[1]} cannot be loaded: {EXTRA}"
        lines = [line for line in self._text.splitlines() if "rror" in line or "FAIL" in line]
        return cause(lines[0]) if lines else ""


def main() -> None:
    """Writes the lines to stdout, and redirects all other output on stdout to stderr."""
    own = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(own, "w", encoding="utf-8") as out:

        def tell(found: dict[str, Any]) -> None:
            out.write(json.dumps(found) + "\n")
            out.flush()

        probe(tell)


if __name__ == "__main__":
    main()

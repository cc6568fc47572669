"""The streams of one rank's GPU, and copies to and from it, with CUDA's runtime API.

A rank enqueues all of its work on one stream, in order, and the process does not wait for it; call
`Queue.synchronize` before reading on the host. That stream is of the default kind, so that it is
ordered with onnxruntime's copies on CUDA's legacy stream.

Batches are copied on another stream, from pinned memory, while the GPU computes (`Queue.stage`).
The names are those of the CUDA Runtime API, version 13.
"""

import ctypes
import functools
import io
import logging
import threading
import weakref
from collections import deque
from contextlib import redirect_stdout
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import _pybind_state

from onnxpar_runtime.devices import EXTRA, built_for
from onnxpar_runtime.errors import LaunchError, OnnxparRuntimeError

Array = NDArray[Any]
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_NO_TIMING = 2  # cudaEventDisableTiming
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind
_OWN_CAPTURES = 1  # cudaStreamCaptureModeThreadLocal
_GRAIN = 256  # bytes; slots are made in powers of two of it
_ERRORS = 3  # onnxruntime's severity, which leaves out warnings
_LOADING = threading.Lock()
log = logging.getLogger(__name__)


class CudaError(OnnxparRuntimeError):
    """A call of CUDA's runtime failed."""


@functools.cache
def _library() -> ctypes.CDLL:
    name = f"libcudart.so.{(built_for() or (13,))[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise LaunchError(f"device cuda: {name} cannot be loaded ({error}): {EXTRA}") from None
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _call(where: str, name: str, *arguments: Any) -> None:
    library = _library()
    status = getattr(library, name)(*arguments)
    if status != 0:
        text = library.cudaGetErrorString(status).decode(errors="replace")
        raise CudaError(f"{where}: {name}: {text} ({status})")


def copy_in(address: int, array: Array) -> None:
    """Copies a C-contiguous array to a GPU's address; it may be changed once this returns.

    Raises:
        CudaError: It failed.
    """
    _copy_now(address, array.ctypes.data, array.nbytes, _HOST_TO_DEVICE)


def copy_out(address: int, array: Array) -> None:
    """Copies memory at a GPU's address to a C-contiguous array.

    Raises:
        CudaError: It failed, or earlier work on the GPU did.
    """
    _copy_now(array.ctypes.data, address, array.nbytes, _DEVICE_TO_HOST)


def copy_lines(
    index: int,
    target: int,
    target_pitch: int,
    source: int,
    source_pitch: int,
    width: int,
    lines: int,
) -> None:
    """Enqueues a copy of lines of memory within a GPU, on the stream that is ordered with others.

    Args:
        index: Number of the GPU.
        target: The address of the first line that is written.
        target_pitch: The bytes from one line to the next there.
        source: The address of the first line that is read.
        source_pitch: As `target_pitch`.
        width: The bytes of a line that are copied.
        lines: The number of lines.

    Raises:
        CudaError: It failed.
    """
    to = ctypes.c_void_p(target), ctypes.c_size_t(target_pitch)
    origin = ctypes.c_void_p(source), ctypes.c_size_t(source_pitch)
    sizes = ctypes.c_size_t(width), ctypes.c_size_t(lines)
    where = f"GPU {index}"
    _call(where, "cudaSetDevice", ctypes.c_int(index))
    kind = ctypes.c_int(_DEVICE_TO_DEVICE)
    _call(where, "cudaMemcpy2DAsync", *to, *origin, *sizes, kind, ctypes.c_void_p(None))


def _copy_now(target: int, source: int, size: int, kind: int) -> None:
    places = ctypes.c_void_p(target), ctypes.c_void_p(source)
    _call("CUDA", "cudaMemcpy", *places, ctypes.c_size_t(size), ctypes.c_int(kind))


class CudaRuntime:
    """Calls functions of CUDA's runtime on one GPU.

    Args:
        index: Number of the GPU.

    Raises:
        LaunchError: The library cannot be loaded.
    """

    def __init__(self, index: int) -> None:
        """Loads the library."""
        self._index = index
        self._known = threading.local()
        _library()

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function, after making the rank's GPU that of the calling thread.

        Raises:
            CudaError: It returned an error.
        """
        # Each thread has its own current GPU, and another thread stages batches.
        where = f"GPU {self._index}"
        _call(where, "cudaSetDevice", ctypes.c_int(self._index))
        if not getattr(self._known, "thread", False):
            # Otherwise calls in other threads would break a capture by onnxruntime.
            _call(
                where,
                "cudaThreadExchangeStreamCaptureMode",
                ctypes.byref(ctypes.c_int(_OWN_CAPTURES)),
            )
            self._known.thread = True
        _call(where, name, *arguments)

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Returns what a function writes to its first argument: a stream, an event, memory."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made

    def copy(
        self,
        target: ctypes.c_void_p,
        source: ctypes.c_void_p,
        size: int,
        kind: int,
        stream: ctypes.c_void_p,
    ) -> None:
        """Enqueues a copy of `size` bytes."""
        arguments = ctypes.c_size_t(size), ctypes.c_int(kind), stream
        self.call("cudaMemcpyAsync", target, source, *arguments)


@dataclass(frozen=True)
class _Slot:
    """Pinned memory, and memory on the GPU of the same size.

    Attributes:
        size: Bytes.
        host: The pinned memory.
        device: The memory on the GPU.
        arrived: The event after the last copy from host to GPU.
        taken: The event after the last use of the memory on the GPU.
    """

    size: int
    host: ctypes.c_void_p
    device: ctypes.c_void_p
    arrived: ctypes.c_void_p
    taken: ctypes.c_void_p


class Staged:
    """An array that is being copied to the GPU, or has been. Made by `Queue.stage`.

    Its memory is used again after the last reference to this object is gone.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        nbytes: Its size.
    """

    def __init__(self, queue: "Queue", slot: _Slot, array: Array) -> None:
        """Use `Queue.stage`."""
        self.shape: tuple[int, ...] = array.shape
        self.dtype = array.dtype
        self.nbytes = int(array.nbytes)
        self._queue, self._slot = queue, slot

    def put(self, target: int) -> None:
        """Enqueues a copy to the GPU's address `target`, before work that is enqueued later."""
        queue, slot = self._queue, self._slot
        call = queue.runtime.call
        call("cudaStreamWaitEvent", queue.stream, slot.arrived, ctypes.c_uint(0))
        queue.runtime.copy(
            ctypes.c_void_p(target), slot.device, self.nbytes, _DEVICE_TO_DEVICE, queue.stream
        )
        call("cudaEventRecord", slot.taken, queue.stream)

    def __del__(self) -> None:
        """Gives the memory back."""
        # Garbage may be collected in any thread, even while the queue holds its lock. So no lock is
        # taken here, and CUDA is not called.
        self._queue.returned.append(self._slot)


def _preload() -> None:
    """Loads CUDA's libraries from NVIDIA's wheels, or from the system."""
    printed = io.StringIO()
    # onnxruntime prints libraries that it does not find; they are logged instead.
    with _LOADING, redirect_stdout(printed):
        onnxruntime.preload_dlls()
    # onnxruntime would warn for every session on CUDA that the provider is not a plug-in.
    onnxruntime.set_default_logger_severity(_ERRORS)
    # For values that are made outside of sessions, such as states: the arena grows by the size that
    # is asked for; doubling could hold twice as much.
    _pybind_state.set_arena_extend_strategy(_pybind_state.ArenaExtendStrategy.kSameAsRequested)
    if printed.getvalue():
        log.info("%s", printed.getvalue().strip())


class Queue:
    """The streams of one rank on its GPU.

    Args:
        index: Number of the GPU.

    Attributes:
        index: The GPU's number.
        runtime: CUDA's runtime.
        stream: The stream of all computations.
        returned: Slots that `Staged` has given back, to be used again.

    Raises:
        LaunchError: CUDA's runtime cannot be loaded.
        CudaError: It failed.
    """

    def __init__(self, index: int) -> None:
        """Makes the streams."""
        _preload()
        self.index = index
        self.runtime = CudaRuntime(index)
        self.stream = self.runtime.handle("cudaStreamCreateWithFlags", ctypes.c_uint(0))
        flags = ctypes.c_uint(_NON_BLOCKING)
        self._inward = self.runtime.handle("cudaStreamCreateWithFlags", flags)
        self._outward = self.runtime.handle("cudaStreamCreateWithFlags", flags)
        self._computed = self._event()
        self._read = self._event()
        self._lock = threading.Lock()
        self._free: dict[int, list[_Slot]] = {}
        self.returned: deque[_Slot] = deque()
        self._slots: list[_Slot] = []
        self._beside: list[ctypes.c_void_p] = []
        self._open = True

    def _event(self) -> ctypes.c_void_p:
        return self.runtime.handle("cudaEventCreateWithFlags", ctypes.c_uint(_NO_TIMING))

    def synchronize(self) -> None:
        """Waits until all enqueued work is done.

        Raises:
            CudaError: Some of it failed.
        """
        self.runtime.call("cudaStreamSynchronize", self.stream)

    # -- other streams -----------------------------------------------------------------------------

    def beside(self) -> ctypes.c_void_p:
        """Returns a new stream, for one thread at a time; it is freed with the queue."""
        stream = self.runtime.handle("cudaStreamCreateWithFlags", ctypes.c_uint(_NON_BLOCKING))
        with self._lock:
            self._beside.append(stream)
        return stream

    def mark(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        """Returns an event after all work that is on a stream now, for one `hold`."""
        event = self._event()
        self.runtime.call("cudaEventRecord", event, stream)
        return event

    def hold(self, stream: ctypes.c_void_p, event: ctypes.c_void_p) -> None:
        """Lets later work on a stream wait for an event, which is freed."""
        self.runtime.call("cudaStreamWaitEvent", stream, event, ctypes.c_uint(0))
        self.runtime.call("cudaEventDestroy", event)

    # -- to the GPU --------------------------------------------------------------------------------

    def stage(self, array: Array) -> Staged:
        """Begins to copy an array to the GPU, while the GPU computes. Any thread may call it.

        Args:
            array: C-contiguous; it may be changed once this returns.

        Raises:
            CudaError: There is no memory, or a call failed.
        """
        slot = self._slot(array.nbytes)
        call = self.runtime.call
        # The last array in this slot has left the pinned memory, and the GPU has used its copy.
        call("cudaEventSynchronize", slot.arrived)
        call("cudaStreamWaitEvent", self._inward, slot.taken, ctypes.c_uint(0))
        ctypes.memmove(slot.host, array.ctypes.data, array.nbytes)
        self.runtime.copy(slot.device, slot.host, array.nbytes, _HOST_TO_DEVICE, self._inward)
        call("cudaEventRecord", slot.arrived, self._inward)
        return Staged(self, slot, array)

    def _slot(self, size: int) -> _Slot:
        rounded = _GRAIN
        while rounded < size:
            rounded *= 2
        with self._lock:
            while self.returned:
                slot = self.returned.popleft()
                self._free.setdefault(slot.size, []).append(slot)
            if free := self._free.get(rounded):
                return free.pop()
        count = ctypes.c_size_t(rounded)
        slot = _Slot(
            size=rounded,
            host=self.runtime.handle("cudaMallocHost", count),
            device=self.runtime.handle("cudaMalloc", count),
            arrived=self._event(),
            taken=self._event(),
        )
        with self._lock:
            self._slots.append(slot)
        return slot

    # -- from the GPU ------------------------------------------------------------------------------

    def read(self, source: int, into: Array) -> None:
        """Begins to copy memory to the host, after earlier and beside later computations.

        `before_writing` keeps later work from overwriting it; `finish_reading` waits for the copy.

        Args:
            source: The GPU's address.
            into: C-contiguous memory, preferably pinned (`pinned`).
        """
        call = self.runtime.call
        call("cudaEventRecord", self._computed, self.stream)
        call("cudaStreamWaitEvent", self._outward, self._computed, ctypes.c_uint(0))
        target = ctypes.c_void_p(into.ctypes.data)
        address = ctypes.c_void_p(source)
        self.runtime.copy(target, address, into.nbytes, _DEVICE_TO_HOST, self._outward)
        call("cudaEventRecord", self._read, self._outward)

    def before_writing(self) -> None:
        """Lets later work wait, on the GPU, until all copies of `read` are complete."""
        self.runtime.call("cudaStreamWaitEvent", self.stream, self._read, ctypes.c_uint(0))

    def finish_reading(self) -> None:
        """Waits until all copies of `read` are complete. Any thread may call it.

        Raises:
            CudaError: A copy failed.
        """
        self.runtime.call("cudaStreamSynchronize", self._outward)

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns pinned host memory, which is freed with the array."""
        size = prod(shape) * dtype.itemsize
        if not size:
            return np.empty(shape, dtype)
        memory = self.runtime.handle("cudaMallocHost", ctypes.c_size_t(size))
        raw = (ctypes.c_char * size).from_address(memory.value or 0)
        weakref.finalize(raw, self.runtime.call, "cudaFreeHost", memory).atexit = False
        array: Array = np.frombuffer(memoryview(raw).cast("B"), np.uint8)
        return array.view(dtype).reshape(shape)

    def close(self) -> None:
        """Waits for all work, and frees streams and memory."""
        if not self._open:
            return
        self._open = False
        for stream in (self.stream, self._inward, self._outward, *self._beside):
            self.runtime.call("cudaStreamSynchronize", stream)
            self.runtime.call("cudaStreamDestroy", stream)
        for slot in self._slots:
            self.runtime.call("cudaFreeHost", slot.host)
            self.runtime.call("cudaFree", slot.device)
            for event in (slot.arrived, slot.taken):
                self.runtime.call("cudaEventDestroy", event)
        for event in (self._computed, self._read):
            self.runtime.call("cudaEventDestroy", event)

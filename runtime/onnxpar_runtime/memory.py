"""Measures the bytes that a rank's sessions hold on the CPU, and their peak.

A measured session takes its memory from a counting allocator instead of onnxruntime's arena. The
allocator gets every block from the system and frees it at once, so it knows the live bytes. An
arena only knows its blocks, which are larger than their contents and grow by doubling. Allocating
from the system at every run takes time, so sessions are measured only on request.

Weights that are not states are mapped from their files. onnxruntime's kernels may replace some by
packed copies. A measured session does not pack, and weights are counted once, by the manifest.
"""

import ctypes
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from onnxpar_format.dtypes import DTYPES
from onnxpar_format.manifest import FROM_FILES
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.library import last_error, load_library
from onnxpar_runtime.manifest import Manifest

_INSTALLING = threading.Lock()


class LiveBytes:
    """The bytes that sessions hold: weights, values between nodes, outputs, working memory.

    The operators of the domain `onnxpar` must have been registered (`Rank.register`) before.
    Memory of collectives in the background counts from `Rank.count_background` on. Buffers of the
    transports are not counted.

    Attributes:
        handle: The allocator.

    Raises:
        LaunchError: The allocator cannot be made.
    """

    def __init__(self) -> None:
        """Makes an allocator, which is never freed, because sessions may outlive this object."""
        self._library = load_library()
        self.handle = ctypes.c_void_p(self._library.onnxpar_live_bytes())
        if not self.handle:
            raise self._failure()

    @contextmanager
    def counted(self, options: Any) -> Iterator[None]:
        """Counts the sessions that this thread makes in the block with these options.

        Args:
            options: The `onnxruntime.SessionOptions`, which are changed.

        Raises:
            LaunchError: Another allocator has been registered with onnxruntime.
        """
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry("session.disable_prepacking", "1")
        # An allocator is registered for the whole process.
        with _INSTALLING:
            self._check(self._library.onnxpar_live_bytes_install(self.handle))
            try:
                yield
            finally:
                self._check(self._library.onnxpar_live_bytes_uninstall(self.handle))

    @property
    def live(self) -> int:
        """Bytes that are held now."""
        return self._read()[0]

    @property
    def peak(self) -> int:
        """The most bytes that were held since the last `reset`."""
        return self._read()[1]

    def reset(self) -> None:
        """Begins a new peak, at what is held now."""
        self._library.onnxpar_live_bytes_reset(self.handle)

    def _read(self) -> tuple[int, int]:
        live, peak = ctypes.c_int64(), ctypes.c_int64()
        self._library.onnxpar_live_bytes_read(self.handle, ctypes.byref(live), ctypes.byref(peak))
        return live.value, peak.value

    def _check(self, status: int) -> None:
        if status != 0:
            raise self._failure()

    def _failure(self) -> LaunchError:
        return LaunchError(f"memory cannot be measured: {last_error(self._library)}")


def weight_bytes(manifest: Manifest, rank: int) -> int:
    """Returns the bytes of a rank's weights that are not states; sessions map them from files."""
    states = manifest.training.states.values() if manifest.training is not None else ()
    trained = {s.parameter for s in states if s.kind in FROM_FILES}
    return sum(
        prod(shard.local_shape) * DTYPES[parameter.dtype].dtype.itemsize
        for name, parameter in manifest.parameters.items()
        if name not in trained
        for shard in parameter.shards
        if rank in shard.ranks
    )


def peak_bytes(memory: LiveBytes | None, bound: int, *, reset: bool) -> int:
    """Returns the peak bytes of a rank: of its sessions, and of constant size outside of them.

    Args:
        memory: The bytes that the sessions hold; None if they are not measured.
        bound: Bytes of weights, states and inputs.
        reset: Begin a new peak.

    Raises:
        LaunchError: The sessions are not measured.
    """
    if memory is None:
        raise LaunchError(
            "memory is not measured: expected measured=True when the session was opened"
        )
    peak = memory.peak + bound
    if reset:
        memory.reset()
    return peak


def peak_resident() -> int:
    """Returns the largest number of bytes of host memory that this process has used at a time."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In KiB, but on macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024

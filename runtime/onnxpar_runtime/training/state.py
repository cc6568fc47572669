"""States: tensors that stay on a rank's device between runs and are updated in place.

Parameters and running statistics begin as the shards of the weight files, gradients and moments as
zeros. A state gets its memory when it is first needed, and keeps it, because the sessions' bindings
point to it.

Collectives in the background may still work in this memory when a program has returned. So whatever
reads or writes states here waits for them first (`Rank.settle`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding, coordinates
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.manifest import FROM_FILES, StateEntry
from onnxpar_runtime.cuda import copy_in
from onnxpar_runtime.devices import Device
from onnxpar_runtime.errors import DirectoryError, InputError
from onnxpar_runtime.loader import Loader
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.tensor_file import forget_pages, read_tensors
from onnxpar_runtime.tensors import to_host, to_ort

Array = NDArray[Any]
PAGE_BYTES = 4096


class States:
    """The states of one rank.

    Args:
        manifest: The manifest of a directory for training.
        loader: Has the rank and the device.

    Raises:
        DirectoryError: The directory is not for training.
    """

    def __init__(self, manifest: Manifest, loader: Loader) -> None:
        """Allocates nothing yet."""
        self._manifest = manifest
        self._loader = loader
        self._rank = loader.rank.index
        self._settle = loader.rank.settle
        self._stage = manifest.stage_of(self._rank)
        self._states: Mapping[str, StateEntry] = manifest.trained().states
        self._files: dict[str, Mapping[str, Array]] = {}
        self._values: dict[str, Any] = {}
        self._host: dict[str, Array] = {}  # the memory of `_values`, on the CPU

    def __getitem__(self, name: str) -> StateEntry:
        """Returns the manifest's entry of a state; raises InputError if there is none."""
        if name not in self._states:
            raise InputError(f"no state {name!r}; the directory has {sorted(self._states)}")
        return self._states[name]

    def of_kind(self, kind: str) -> dict[str, str]:
        """Returns the names of the states of a kind that the rank holds, by parameter."""
        return {s.parameter: n for n, s in self._states.items() if s.kind == kind and self.holds(n)}

    def holds(self, name: str) -> bool:
        """Whether the rank's stage holds a state; raises InputError if there is no such state."""
        return self._stage in self[name].stages

    def sharding(self, name: str) -> SizedSharding:
        """Returns how a state is sharded."""
        return self[name].sharding(self._manifest.atoms)

    def value(self, name: str) -> Any:
        """Returns the OrtValue of a state, always the same object.

        Raises:
            InputError: The rank's stage does not hold it.
            DirectoryError: The weight file of a parameter cannot be read, or has another type or
                shape.
        """
        if name not in self._values:
            state = self[name]
            if not self.holds(name):
                raise InputError(
                    f"state {name!r} is held by the stages {list(state.stages)}, but rank "
                    f"{self._rank} is in stage {self._stage}"
                )
            dtype, shape = DTYPES[state.dtype], self.sharding(name).local_shape
            initial = self._initial(state, shape)
            if self._loader.device is Device.CPU:
                memory = aligned_zeros(shape, dtype.dtype)
                self._host[name] = memory
                self._values[name] = to_ort(memory)
            else:
                self._values[name] = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                    shape, dtype.code, self._loader.device.value, self._loader.index
                )
            self._write(name, initial)
            forget_pages(initial)
        return self._values[name]

    @property
    def bytes(self) -> int:
        """Bytes of the states that have memory."""
        return sum(int(value.tensor_size_in_bytes()) for value in self._values.values())

    def get(self, name: str) -> Array:
        """Returns a copy of this rank's shard of a state, padding included."""
        value = self.value(name)
        self._settle()
        if name in self._host:
            return self._host[name].copy()
        self._loader.synchronize()
        return to_host(value)

    def memory(self, name: str) -> Array:
        """Returns host memory for this rank's shard of a state, to which a GPU copies fast."""
        dtype, shape = DTYPES[self[name].dtype].dtype, self.sharding(name).local_shape
        queue = self._loader.queue
        return np.empty(shape, dtype) if queue is None else queue.pinned(shape, dtype)

    def copy_to(self, name: str, into: Array) -> None:
        """Copies this rank's shard of a state to an array of the state's type and local shape.

        A copy from a GPU is complete only after `finish_copies`. Programs may run meanwhile: the
        GPU does not overwrite a state of a checkpoint before the copy has left it.
        """
        value, queue = self.value(name), self._loader.queue
        self._settle()
        if queue is None:
            np.copyto(into, self._host[name])
        else:
            queue.read(value.data_ptr(), into)

    def finish_copies(self) -> None:
        """Waits until all copies of `copy_to` are complete. Any thread may call it.

        Raises:
            CudaError: The GPU failed.
        """
        if self._loader.queue is not None:
            self._loader.queue.finish_reading()

    def set(self, name: str, part: Array) -> None:
        """Overwrites this rank's shard of a state, with an array of the same type and shape."""
        self.value(name)
        self._settle()
        self._write(name, part)

    def clear(self, name: str) -> None:
        """Sets this rank's shard of a state to zero."""
        self.set(name, np.zeros((), DTYPES[self[name].dtype].dtype))

    def reset(self) -> None:
        """Sets every state to its initial value."""
        self._settle()
        for name in self._values:
            state = self[name]
            initial = self._initial(state, self.sharding(name).local_shape)
            self._write(name, initial)
            forget_pages(initial)

    def close(self) -> None:
        """Frees the states."""
        self._values.clear()
        self._host.clear()

    def _write(self, name: str, part: Array) -> None:
        if name in self._host:
            self._host[name][...] = part
        else:
            # The copy is not on the rank's streams.
            self._loader.synchronize()
            self.finish_copies()
            shard = np.broadcast_to(part, self.sharding(name).local_shape)
            copy_in(self._values[name].data_ptr(), np.asarray(shard, order="C"))

    def _initial(self, state: StateEntry, shape: tuple[int, ...]) -> Array:
        """Returns the initial value of a state: its shard, or zeros that take no memory."""
        if state.kind in FROM_FILES:
            return self._weights(state, shape)
        return np.broadcast_to(np.zeros((), DTYPES[state.dtype].dtype), shape)

    def _weights(self, state: StateEntry, shape: tuple[int, ...]) -> Array:
        """Returns this rank's shard of a parameter from its file."""
        name = state.parameter
        shards = self._manifest.parameters[name].shards
        file = next((s.file for s in shards if self._rank in s.ranks), None)
        where = f"{self._manifest.directory}: parameter {name!r}"
        if file is None:
            raise DirectoryError(f"{where}: the shard of rank {self._rank} was not written")
        if file not in self._files:
            try:
                self._files[file] = read_tensors(self._manifest.directory / file)
            except InputError as error:
                raise DirectoryError(str(error)) from None
        array = self._files[file].get(name)
        wanted = DTYPES[state.dtype].dtype
        if array is None or array.shape != shape or array.dtype != wanted:
            got = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise DirectoryError(f"{where}: expected {wanted} {shape} in {file}, got {got}")
        return array

    def partial_group(self, name: str) -> tuple[int, ...]:
        """Returns the ranks whose partial values of a state are added up, including this one."""
        manifest, state = self._manifest, self[name]
        mine = coordinates(self._rank, manifest.atoms)
        fixed = [a for a in range(len(manifest.atoms)) if a not in state.partial]
        stages = state.stages if state.partial_stages else (self._stage,)
        return tuple(
            other
            for other in range(manifest.devices)
            if manifest.stage_of(other) in stages
            and all(coordinates(other, manifest.atoms)[a] == mine[a] for a in fixed)
        )


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns zeros whose memory begins at a page, for fast vector kernels."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    room = np.zeros(size + PAGE_BYTES, np.uint8)
    start = -room.ctypes.data % PAGE_BYTES
    return room[start : start + size].view(dtype).reshape(shape)

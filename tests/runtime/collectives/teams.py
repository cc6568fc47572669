"""Runs one function on every rank of this process, whatever the transport.

Under mpirun (ONNXPAR_TEST_TRANSPORT=mpi) this process is one rank and the suite runs at that size;
otherwise all ranks are threads. With ONNXPAR_TEST_DEVICE (nccl or staged) sessions are on the CUDA
provider, and tensors of collectives on GPUs: one, or as many as STANDIN_DEVICES says. A test is
written once: it says what each rank does and expects.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx.parser
import onnxruntime
from numpy.typing import NDArray

from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.tensors import to_host, to_ort
from onnxpar_runtime.wanted_operators import want_operators

T = TypeVar("T")
Array = NDArray[Any]
UNDER_MPI = os.environ.get("ONNXPAR_TEST_TRANSPORT") == "mpi"
ON_DEVICE = os.environ.get("ONNXPAR_TEST_DEVICE", "")
DEVICES = int(os.environ.get("STANDIN_DEVICES", "1")) or 1
PROVIDER = "CUDAExecutionProvider" if ON_DEVICE else "CPUExecutionProvider"
HEADER = '<ir_version: 10, opset_import: ["": 21, "onnxpar": 1]>\n'
LIMIT_S = 60
"""Seconds after which ranks that do not end make the test fail."""


@dataclass(frozen=True)
class Team:
    """A world, and how to run something on its local ranks."""

    world: World

    @property
    def size(self) -> int:
        """Number of ranks, of all processes."""
        return self.world.size

    def run(self, action: Callable[[Rank], T]) -> list[T]:
        """Returns what `action` returns on each local rank; raises the first rank's error."""
        results, errors = self.attempt(action)
        for error in errors:
            if error is not None:
                raise error
        return [results[r] for r in self.world.local_ranks]

    def attempt(
        self, action: Callable[[Rank], T], abort: bool = True
    ) -> tuple[dict[int, T], list[BaseException | None]]:
        """Returns results by local rank, and the error of each local rank or None."""
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def guarded(r: int) -> None:
            try:
                results[r] = action(self.world.rank(r))
            except BaseException as error:
                errors[r] = error
                if abort:
                    self.world.abort(r, repr(error))

        if UNDER_MPI:
            guarded(self.world.local_ranks[0])
        else:
            threads = [
                threading.Thread(target=guarded, args=(r,), daemon=True)
                for r in self.world.local_ranks
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT_S)
            assert not any(t.is_alive() for t in threads), "a rank hangs"
        return results, [errors.get(r) for r in self.world.local_ranks]


def open_devices(world: World) -> World:
    """Gives every rank of this process a GPU, if the suite runs on GPUs."""
    if ON_DEVICE:
        for r in world.local_ranks:
            world.rank(r).open_device(r % DEVICES, ON_DEVICE)
    return world


def session(
    rank: Rank, text: str, options: onnxruntime.SessionOptions | None = None
) -> onnxruntime.InferenceSession:
    """Returns a session of the ONNX text (without its header) that acts as `rank`."""
    model = onnx.parser.parse_model(HEADER + text)
    options = options or onnxruntime.SessionOptions()
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    want_operators(options, model)
    rank.register(options)
    settings = {"device_id": str(rank.index % DEVICES)} if ON_DEVICE else {}
    made = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=[(PROVIDER, settings)]
    )
    assert made.get_providers()[0] == PROVIDER
    return made


def feed(sess: onnxruntime.InferenceSession, inputs: Mapping[str, Array]) -> list[Array]:
    """Returns the outputs for the inputs; any dtype, bfloat16 included."""
    binding = sess.io_binding()
    # A binding does not keep the memory of an array alive before onnxruntime 1.30.
    values = {name: to_ort(np.array(array, order="C")) for name, array in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in sess.get_outputs():
        binding.bind_output(output.name)
    sess.run_with_iobinding(binding)
    return [to_host(value) for value in binding.get_outputs()]


def zeros(size: int) -> onnxruntime.OrtValue:
    """Float32 zeros in memory that several sessions can have as a state."""
    place = ("cuda", 0) if ON_DEVICE else ("cpu", 0)
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(size, np.float32), *place)


def run_in_place(
    sess: onnxruntime.InferenceSession,
    operands: Mapping[str, onnxruntime.OrtValue],
    results: Mapping[str, onnxruntime.OrtValue] | None = None,
    **system: Array,
) -> list[Array]:
    """Runs a session on memory that stays in one place.

    Args:
        sess: The session.
        operands: Its inputs.
        results: The memory of its outputs; by default it allocates them.
        system: Further inputs.

    Returns:
        The outputs that it allocated.
    """
    binding = sess.io_binding()
    for name, value in operands.items():
        binding.bind_ortvalue_input(name, value)
    for name, array in system.items():
        binding.bind_cpu_input(name, array)
    for name, value in (results or {}).items():
        binding.bind_ortvalue_output(name, value)
    for output in sess.get_outputs() if results is None else ():
        binding.bind_output(output.name)
    sess.run_with_iobinding(binding)
    return [to_host(value) for value in binding.get_outputs()] if results is None else []


def run_text(rank: Rank, text: str, **inputs: Array) -> list[Array]:
    """Returns the outputs of the ONNX text on one rank."""
    return feed(session(rank, text), inputs)


def groups_of(size: int) -> list[list[list[int]]]:
    """Partitions of the ranks into equal groups, some in an order that is not ascending."""
    everyone = list(range(size))
    found = [[[r] for r in everyone], [everyone]]
    if size >= 2:
        found.append([everyone[::-1]])
    if size == 4:
        found += [[[0, 1], [2, 3]], [[2, 0], [1, 3]]]
    return found


def group_of(groups: Sequence[Sequence[int]], rank: Rank) -> list[int]:
    """The group that the rank is in."""
    return next(list(group) for group in groups if rank.index in group)


def same_everywhere(rank: Rank, data: bytes) -> bool:
    """Whether all ranks have the same bytes; every rank must call it, with as many."""
    mine = np.frombuffer(data, np.uint8)
    most, least = (rank.all_reduce(mine, op=op) for op in ("max", "min"))
    return np.array_equal(most, least)

"""Makes onnxruntime's sessions of a rank's graphs, all on one device."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from numpy.typing import NDArray

from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.cuda import CudaError, Queue
from onnxpar_runtime.devices import CUDA, NCCL, Device, placed
from onnxpar_runtime.errors import DirectoryError, LaunchError, RankError, first_line
from onnxpar_runtime.exposed_graph import read_graph
from onnxpar_runtime.memory import LiveBytes
from onnxpar_runtime.nonfinite import Watch
from onnxpar_runtime.options import (
    CPU,
    cuda_options,
    register_libraries,
    session_options,
    threads_per_rank,
)
from onnxpar_runtime.tracing import operators
from onnxpar_runtime.wanted_operators import want_operators

Array = NDArray[Any]
_GRAPHS = "cuda.enable_cuda_graph"
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
# Bytes. To read a larger graph takes as long as to register operators that it does not need.
_SMALL = 1 << 18
_INITIALIZERS = "session.use_device_allocator_for_initializers"
# The CPU kernel of Gemm is slow with a transposed first operand, so graphs have copies of these.
_DISABLED, _SLOWER_ON_CPUS = "optimization.disable_specified_optimizers", "GemmTransposeFusion"
# If set, onnxruntime takes one block for all values of a run, from the second run on. Its arena
# keeps those of the first run, too, so training needs twice the memory for activations.
_PATTERN = "enable_mem_pattern"
# Part of onnxruntime's message for a graph with nodes on the host.
_NO_CAPTURE = "cannot use the graph capture feature"


class Loader:
    """Makes onnxruntime's sessions of one rank, all on one device.

    Args:
        rank: The rank.
        device: `auto` (the rank's device if it is decided, else CUDA if it can be used), `cpu`,
            `cuda` or `cuda:NUMBER`.
        ort_options: Options of onnxruntime, see `onnxpar_runtime.options.session_options`.
        custom_ops: Further custom-op libraries that the model needs.
        measured: Whether to count the bytes that the sessions hold, on the CPU.
        debug_nan: Whether to watch.
        dialect: The runtime whose collectives the graphs have; None for onnxpar's.
        trains: Whether the programs train a model.

    Attributes:
        rank: The rank.
        watch: Looks for values that are not finite; None unless `debug_nan`.
        memory: Counts the bytes that the sessions hold; None unless `measured`, and before the
            first session.
        kept: Copies of the outputs of all runs by name, without states, if they are to be kept.
        device: The kind of device.
        index: Number of the device.
        queue: The streams of the GPU; None on the CPU.
        graphs: Whether runs are captured as CUDA graphs and replayed, if they can be.

    Raises:
        LaunchError: The device cannot be used.
        CudaError: It failed.
    """

    def __init__(
        self,
        rank: Rank,
        device: str,
        ort_options: Mapping[str, str] | None,
        custom_ops: Sequence[str | Path],
        measured: bool = False,
        debug_nan: bool = False,
        dialect: str | None = None,
        trains: bool = False,
    ) -> None:
        """Chooses the device."""
        self.rank, self.watch = rank, Watch() if debug_nan else None
        self.memory: LiveBytes | None = None
        self.kept: dict[str, Array] | None = None
        self._measured = measured
        placement = placed(rank, device)
        if placement is not rank.placement and placement.device is Device.CUDA:
            rank.place(placement)
        self.device, self.index = placement.device, placement.index
        if measured and self.device is not Device.CPU:
            raise LaunchError(f"memory can only be measured on the CPU, got {self.device.value}")
        self._pairs = dict(ort_options or {})
        self._custom_ops, self._dialect, self._trains = tuple(custom_ops), dialect, trains
        self.queue = Queue(self.index) if self.device is Device.CUDA else None
        self.graphs = self.queue is not None and self._pairs.get(_GRAPHS, "0") in ("1", "true")
        if self.graphs and rank.world.size > 1 and placement.transport != NCCL:
            raise LaunchError(
                f"{_GRAPHS}: a captured step cannot copy tensors through the host; expected "
                "--transport nccl"
            )

    def load(
        self, path: Path, graphs: bool, model: onnx.ModelProto | None = None
    ) -> tuple[Any, bool]:
        """Returns a session of a rank's graph, and whether its runs can be captured.

        Args:
            path: The file of the graph.
            graphs: Whether to try to capture runs. Graphs with nodes on the host cannot be
                captured; only onnxruntime knows which nodes these are.
            model: The model to load instead of that in the file.

        Raises:
            DirectoryError: onnxruntime refuses the graph.
            LaunchError: The device, an option or a custom-op library cannot be used.
        """
        world = self.rank.world
        threads = threads_per_rank(world.size, len(world.local_ranks))
        options = session_options(self._pairs, threads)
        if model is not None or (path.is_file() and path.stat().st_size <= _SMALL):
            want_operators(options, model or read_graph(path))
        self.rank.register(options, self._dialect)
        register_libraries(options, self._custom_ops)
        wanted: list[Any] = [CPU]
        if self.queue is not None:
            # Weights are allocated outside the arena, which would never give their memory back.
            options.add_session_config_entry(_INITIALIZERS, "1")
            stream = self.queue.stream.value or 0
            pairs = {k: v for k, v in self._pairs.items() if graphs or k != _GRAPHS}
            wanted.insert(0, cuda_options(self.index, stream, pairs))
        else:
            if _DISABLED not in self._pairs:
                options.add_session_config_entry(_DISABLED, _SLOWER_ON_CPUS)
            if self._trains and _PATTERN not in self._pairs:
                options.enable_mem_pattern = False
        timeline = self.rank.timeline
        if timeline.profiles is not None:
            operators.enable(options, timeline.profiles)
        if self._measured and self.memory is None:
            self.memory = LiveBytes()
            self.rank.count_background(self.memory.handle)
        graph = str(path) if model is None else model.SerializeToString()
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent))
        counted = nullcontext() if self.memory is None else self.memory.counted(options)
        try:
            with counted:
                session = onnxruntime.InferenceSession(graph, options, providers=wanted)
        except LaunchError:
            raise
        except Exception as error:
            # onnxruntime has no common base class for what it raises.
            if graphs and _NO_CAPTURE in str(error):
                return self.load(path, False, model)
            raise DirectoryError(
                f"{path}: onnxruntime cannot load it: {first_line(error)}"
            ) from None
        if self.queue is not None:
            if CUDA not in session.get_providers():
                raise LaunchError(
                    f"device cuda:{self.index}: onnxruntime could not create its CUDA provider; "
                    "a cuda.* option may be invalid (see onnxruntime's message on stderr)"
                )
            session.disable_fallback()
        if timeline.profiles is not None:
            timeline.profiled.append((path.name, session))
        return session, graphs

    def run_options(self, graph: int | None) -> Any:
        """Returns the options of a run; on a GPU it does not wait for the work that it enqueues.

        None on the CPU: onnxruntime looks for a graph's number in options, and takes 50 µs to find
        that there is none.

        Args:
            graph: Number under which the run is captured as a CUDA graph, or None for no capture.
        """
        if self.queue is None:
            return None
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        # A session that captures would capture every run without a number.
        options.add_run_config_entry("gpu_graph_id", "-1" if graph is None else str(graph))
        return options

    def synchronize(self) -> None:
        """Waits until the device has done all enqueued work; call it before reading results.

        Raises:
            RankError: Some of the work failed.
        """
        if self.queue is not None:
            try:
                self.queue.synchronize()
            except CudaError as error:
                raise RankError(self.rank.index, str(error)) from error
            # After an abort, the enqueued work ends too, but with undefined results.
            self.rank.check_device(self.queue.stream)

    def close(self) -> None:
        """Frees the device. No session may run."""
        if self.queue is not None:
            self.queue.close()

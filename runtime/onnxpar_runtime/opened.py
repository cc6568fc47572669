"""What one rank has open of a directory: the base of sessions, generators and trainers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from numpy.typing import NDArray

from onnxpar_format.texts import ranks_in_words
from onnxpar_runtime.closing import Closing
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.devices import Device
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.loader import Loader
from onnxpar_runtime.manifest import Manifest

Array = NDArray[Any]


class Opening(TypedDict, total=False):
    """How a directory is opened, as keyword arguments.

    Attributes:
        rank: The rank, of a world with as many ranks as the directory has devices. Without one, the
            directory must be for one device.
        device: `auto` (the device that `init` chose, else CUDA if it can be used), `cpu`, `cuda` or
            `cuda:NUMBER`.
        ort_options: Options of onnxruntime, see `onnxpar_runtime.options.session_options`.
        custom_ops: Further custom-op libraries that the model needs.
        manifest: The manifest, if it has already been read.
        debug_nan: Whether to raise NotFiniteError, on all ranks, when a result is NaN or infinite,
            with the node, the rank and the element where this begins. It exposes all values, which
            takes much memory and time.
    """

    rank: Rank | None
    device: str
    ort_options: Mapping[str, str] | None
    custom_ops: Sequence[str | Path]
    manifest: Manifest | None
    debug_nan: bool


class Opened(Closing):
    """A directory that one rank has opened.

    Args:
        directory: The directory.
        measured: Whether to count the bytes that the rank holds; on the CPU only, and runs take
            longer.
        opening: How to open it, see `Opening`.

    Attributes:
        manifest: The manifest.
        rank: The rank.

    Raises:
        DirectoryError: The directory is incomplete.
        LaunchError: The world does not have as many ranks as the directory has devices, or the
            device cannot be used.
    """

    def __init__(
        self,
        directory: str | Path,
        measured: bool,
        *,
        rank: Rank | None = None,
        device: str = "auto",
        ort_options: Mapping[str, str] | None = None,
        custom_ops: Sequence[str | Path] = (),
        manifest: Manifest | None = None,
        debug_nan: bool = False,
    ) -> None:
        """Reads the manifest and chooses rank and device; subclasses load graphs."""
        self.manifest = manifest or Manifest.load(directory)
        size = 1 if rank is None else rank.world.size
        if size != self.manifest.devices:
            raise LaunchError(wrong_size(self.manifest, size))
        self.manifest.check_weights(0 if rank is None else rank.index)
        self._own_world: World | None = None
        if rank is None:
            self._own_world = World.threads(1)
            rank = self._own_world.rank(0)
        self.rank: Rank = rank
        self._loader = Loader(
            self.rank,
            device,
            ort_options,
            custom_ops,
            measured,
            debug_nan,
            dialect=self.manifest.dialect,
            trains=self.manifest.training is not None,
        )

    @property
    def device(self) -> Device:
        """The kind of the rank's device."""
        return self._loader.device

    def keep_outputs(self) -> dict[str, Array]:
        """Returns a dict to which every later run adds copies of all outputs of its graphs.

        They are local arrays by name, without states, and with outputs that are not in the
        manifest.
        """
        self._loader.kept = {}
        return self._loader.kept

    def _check_values(self) -> None:
        """Raises NotFiniteError, on all ranks, if `debug_nan` has found something."""
        if self._loader.watch is not None:
            self._loader.watch.settle(self.rank)

    def close(self) -> None:
        """Frees what it holds, and the world of one rank if it made one."""
        self._loader.close()
        if self._own_world is not None:
            self._own_world.close()


def wrong_size(manifest: Manifest, size: int) -> str:
    """Returns the message for a world whose size is not the directory's device count."""
    return (
        f"{manifest.directory} was made for {ranks_in_words(manifest.devices)}, got {size}: start "
        f"it with `mpirun -n {manifest.devices} …`"
    )

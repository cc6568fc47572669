"""A checkpoint: the contents of its manifest, and its files."""

from dataclasses import dataclass, field
from pathlib import Path

from onnxpar_format.checkpoint import CheckpointContents, read_checkpoint
from onnxpar_runtime.checkpoint.folder import resolve
from onnxpar_runtime.errors import CheckpointError
from onnxpar_runtime.files import check_sum, read_whole


@dataclass(frozen=True)
class Checkpoint(CheckpointContents):
    """A checkpoint, read from its manifest.

    Attributes:
        directory: Where it is.
    """

    directory: Path = field(kw_only=True)

    @staticmethod
    def load(directory: str | Path) -> "Checkpoint":
        """Reads and validates a checkpoint's manifest, and the sizes of its files.

        Raises:
            CheckpointError: The directory or a file is missing or truncated, or the manifest has
                been changed, is malformed, or is of another schema.
        """
        contents = read_whole(read_checkpoint, Path(directory), "checkpoint", CheckpointError)
        return Checkpoint(**vars(contents), directory=Path(directory))

    @staticmethod
    def last(path: str | Path) -> "Checkpoint":
        """Reads the checkpoint that a path means: itself, or the last complete one in the folder.

        Raises:
            CheckpointError: There is none; or as `load`.
        """
        return Checkpoint.load(resolve(path))

    def verify_file(self, name: str) -> None:
        """Raises CheckpointError unless a file has its SHA-256; reads every byte."""
        check_sum(self.directory / name, self.files[name], CheckpointError)

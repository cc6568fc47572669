"""Converts checkpoints: for another mesh, or to unsharded tensors."""

from pathlib import Path

from onnxpar_runtime.checkpoint import reshard
from onnxpar_runtime.checkpoint.reshard import Made


def reshard_checkpoint(source: Path, target: Path, to: Path, *, verify: bool) -> str:
    """Writes a checkpoint as the ranks of a directory hold it; returns a summary.

    Args:
        source: The checkpoint, or a folder of them.
        target: The checkpoint to write.
        to: The directory.
        verify: Whether to compare SHA-256 of the source's files.

    Raises:
        OnnxparRuntimeError: As `onnxpar_runtime.checkpoint.reshard.reshard`.
    """
    return summary(reshard.reshard(source, target, to, verify=verify))


def merge_checkpoint(source: Path, target: Path, *, verify: bool) -> str:
    """Writes a checkpoint with every tensor unsharded; returns a summary.

    Args:
        source: The checkpoint, or a folder of them.
        target: The checkpoint to write.
        verify: Whether to compare SHA-256 of the source's files.

    Raises:
        OnnxparRuntimeError: As `onnxpar_runtime.checkpoint.reshard.merge`.
    """
    return summary(reshard.merge(source, target, verify=verify))


def summary(made: Made) -> str:
    """Describes the files that were written, in one line."""
    files = "1 file" if made.files == 1 else f"{made.files} files"
    return (
        f"{made.path}: {made.tensors} tensors in {files}, {made.bytes:,} bytes; after step "
        f"{made.step}"
    )

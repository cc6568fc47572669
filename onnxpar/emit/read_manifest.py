"""Reads the manifest of a directory, for commands that show it."""

from pathlib import Path
from typing import Any

from onnxpar.core.errors import DirectoryError
from onnxpar_format.manifest import manifest_json
from onnxpar_format.records import FormatError


def read_manifest(directory: Path) -> Any:
    """Returns the content of a directory's manifest without validating it.

    Raises:
        DirectoryError: There is no such directory, it has no manifest, or that is not JSON.
    """
    try:
        return manifest_json(directory)
    except FormatError as error:
        raise DirectoryError(str(error)) from None

"""Reads the manifest of a directory, for commands that show it."""

from pathlib import Path
from typing import Any

from onnxpar.core.errors import DirectoryError
from onnxpar_format.manifest import validated_manifest
from onnxpar_format.records import FormatError


def read_manifest(directory: Path) -> Any:
    """Returns the JSON of a directory's manifest, validated as for a run, except the report.

    Raises:
        DirectoryError: There is no such directory, or its manifest is missing or malformed.
    """
    try:
        return validated_manifest(directory)[0]
    except FormatError as error:
        raise DirectoryError(str(error)) from None

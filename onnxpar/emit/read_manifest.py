"""Reads the manifest of an artifact directory, for the commands that show one."""

import json
from pathlib import Path
from typing import Any

from onnxpar.core.errors import ArtifactError
from onnxpar.emit.atomic_directory import MANIFEST


def read_manifest(directory: Path) -> Any:
    """Returns the content of a directory's manifest, which need not be valid.

    Raises:
        ArtifactError: There is no such directory, it has no manifest, or one that is no JSON.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            f"{directory}: not an artifact directory, it has no {MANIFEST} (is it the output of "
            "`onnxpar shard`?)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not readable: {error}") from None

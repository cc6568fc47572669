"""Reads `manifest.json` (schema 1) of an artifact directory into frozen data, and validates it.

The manifest is the only thing that the runtime knows of the transformer's decisions: mesh, symbols,
programs with their inputs and outputs, parameters as explicit boxes of indices, files with
checksums.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from onnxpar_runtime.errors import ArtifactError
from onnxpar_runtime.manifest_entries import (
    COUNTERS,
    Collective,
    Contents,
    EqualSizes,
    FileEntry,
    Handed,
    HandedIn,
    IndexRange,
    Loss,
    Parameter,
    Pipeline,
    ProgramEntry,
    ShardFile,
    State,
    StateOutput,
    SymbolEntry,
    SystemInput,
    TensorSpec,
    Training,
    TrainingTensor,
    VirtualStage,
)
from onnxpar_runtime.manifest_parser import SCHEMA, read_contents

__all__ = [
    "COUNTERS",
    "FILE_NAME",
    "SCHEMA",
    "Collective",
    "Contents",
    "EqualSizes",
    "FileEntry",
    "Handed",
    "HandedIn",
    "IndexRange",
    "Loss",
    "Manifest",
    "Parameter",
    "Pipeline",
    "ProgramEntry",
    "ShardFile",
    "State",
    "StateOutput",
    "SymbolEntry",
    "SystemInput",
    "TensorSpec",
    "Training",
    "TrainingTensor",
    "VirtualStage",
]

FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest(Contents):
    """An artifact directory's contents, read from its manifest."""

    @staticmethod
    def load(directory: str | Path) -> "Manifest":
        """Reads and validates a directory's manifest, and the sizes of its files.

        Raises:
            ArtifactError: The directory or a file is missing, truncated, or the manifest is
                malformed or of another schema.
        """
        root = Path(directory)
        path = root / FILE_NAME
        if not root.is_dir():
            raise ArtifactError(f"{root}: no such directory")
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ArtifactError(
                f"{root}: not an artifact directory, it has no {FILE_NAME} (is it the output of "
                "`onnxpar shard`?)"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{path}: cannot be read: {error}") from None
        try:
            raw = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ArtifactError(f"{path}: not valid JSON: {error}") from None
        manifest = Manifest(**vars(read_contents(path, root, raw)))
        manifest.check_files()
        return manifest

    def program(self, name: str) -> ProgramEntry:
        """Returns a program by name.

        Raises:
            ArtifactError: There is none; the message names those there are.
        """
        if name not in self.programs:
            raise ArtifactError(
                f"{self.directory}: no program {name!r}, it has {sorted(self.programs)}"
            )
        return self.programs[name]

    def parts(self, name: str) -> tuple[str, ...]:
        """Returns the programs that a program consists of: itself, or those of its stages.

        Raises:
            ArtifactError: There is no such program.
        """
        pipeline = self.pipeline
        if pipeline is not None and name in pipeline.programs:
            return tuple(part for stage in pipeline.programs[name] for part in stage.programs)
        if pipeline is not None and name in pipeline.updates:
            return pipeline.updates[name]
        return (self.program(name).name,)

    def trained(self) -> Training:
        """Returns what the artifact says about training.

        Raises:
            ArtifactError: It says nothing: it was cut for inference.
        """
        if self.training is None:
            raise ArtifactError(
                f"{self.directory}: not made for training, it has the programs "
                f"{sorted(self.programs)} (cut it with `onnxpar shard --train`)"
            )
        return self.training

    def graph_path(self, program: str, rank: int) -> Path:
        """Returns the path of a rank's graph.

        Raises:
            ArtifactError: The rank is not one of the mesh, or its graph was not written.
        """
        files = self.program(program).files
        if not 0 <= rank < self.devices:
            raise ArtifactError(
                f"{self.directory}: expected a rank from 0 to {self.devices - 1}, got {rank}"
            )
        name = files[rank]
        if name is None:
            have = [r for r, f in enumerate(files) if f is not None]
            raise ArtifactError(
                f"{self.directory}: the graph of rank {rank} was not written, only those of {have}"
            )
        return self.directory / name

    def check_files(self) -> None:
        """Raises ArtifactError unless every file is there with the size that the manifest says."""
        for name, entry in self.files.items():
            entry.check_size(self.directory / name, "manifest", ArtifactError)

    def verify_files(self) -> None:
        """Raises ArtifactError unless every file's SHA-256 is the manifest's; reads every byte."""
        for name, entry in self.files.items():
            with (self.directory / name).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != entry.sha256:
                raise ArtifactError(
                    f"{self.directory / name}: changed, expected SHA-256 {entry.sha256}, "
                    f"got {digest}"
                )

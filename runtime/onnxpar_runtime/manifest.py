"""A directory: the contents of its manifest, and its files."""

import hashlib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxpar_format.entries import ProgramEntry
from onnxpar_format.manifest import FILE_NAME, ManifestContents, Training, read_manifest
from onnxpar_format.regular_file import read_regular
from onnxpar_runtime.errors import DirectoryError, InputError
from onnxpar_runtime.files import check_sum, read_whole
from onnxpar_runtime.tensor_file import Entry, read_header, stored_as


@dataclass(frozen=True)
class Manifest(ManifestContents):
    """The contents of a directory, read from its manifest.

    Attributes:
        directory: The directory.
    """

    directory: Path = field(kw_only=True)

    @staticmethod
    def load(directory: str | Path) -> "Manifest":
        """Reads and validates a directory's manifest, and the sizes of its files.

        Raises:
            DirectoryError: The directory or a file is missing, truncated, or the manifest is
                malformed or of another schema.
        """
        contents = read_whole(read_manifest, Path(directory), "manifest", DirectoryError)
        return Manifest(**vars(contents), directory=Path(directory))

    def program(self, name: str) -> ProgramEntry:
        """Returns a program by name.

        Raises:
            DirectoryError: There is none; the message names those there are.
        """
        if name not in self.programs:
            raise DirectoryError(
                f"{self.directory}: no program {name!r}; it has {', '.join(sorted(self.programs))}"
            )
        return self.programs[name]

    def parts(self, name: str) -> tuple[str, ...]:
        """Returns the programs that a program consists of: itself, or its parts on the stages.

        Raises:
            DirectoryError: There is no such program.
        """
        pipeline = self.pipeline
        if pipeline is not None and name in pipeline.programs:
            return tuple(part for stage in pipeline.programs[name] for part in stage.programs)
        if pipeline is not None and name in pipeline.updates:
            return pipeline.updates[name]
        return (self.program(name).name,)

    def trained(self) -> Training:
        """Returns the training of the directory.

        Raises:
            DirectoryError: The directory was made for inference.
        """
        if self.training is None:
            raise DirectoryError(
                f"{self.directory}: not made for training; it has the programs "
                f"{sorted(self.programs)} (use `onnxpar shard --train`)"
            )
        return self.training

    def graph_path(self, program: str, rank: int) -> Path:
        """Returns the path of a rank's graph.

        Raises:
            DirectoryError: The rank is not one of the mesh, or its graph was not written.
        """
        files = self.program(program).files
        if not 0 <= rank < self.devices:
            raise DirectoryError(
                f"{self.directory}: expected a rank from 0 to {self.devices - 1}, got {rank}"
            )
        name = files[rank]
        if name is None:
            have = [r for r, f in enumerate(files) if f is not None]
            raise DirectoryError(
                f"{self.directory}: the graph of rank {rank} was not written, only those of {have}"
            )
        return self.directory / name

    def files_of(self, rank: int) -> set[str]:
        """Returns the names of the files that a rank reads: its graphs and its weights."""
        graphs = {program.files[rank] for program in self.programs.values()}
        shards = (shard for entry in self.parameters.values() for shard in entry.shards)
        return {name for name in graphs if name is not None} | {
            shard.file for shard in shards if rank in shard.ranks
        }

    def verify_files(self, names: Iterable[str] | None = None) -> None:
        """Reads every byte of these files, or of all files, and compares the sums.

        Raises:
            DirectoryError: The SHA-256 of a file is not the manifest's.
        """
        for name in sorted(self.files if names is None else names):
            check_sum(self.directory / name, self.files[name], DirectoryError)

    def check_weights(self, rank: int) -> None:
        """Compares types and local shapes of a rank's parameters with its files of weights.

        Raises:
            DirectoryError: They differ, or a file cannot be read.
        """
        read: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            for shard in parameter.shards:
                if rank not in shard.ranks:
                    continue
                path = self.directory / shard.file
                if shard.file not in read:
                    try:
                        read[shard.file] = read_header(path)[0]
                    except InputError as error:
                        raise DirectoryError(str(error)) from None
                expected = stored_as(Entry(name, parameter.dtype, shard.local_shape))
                entry = read[shard.file].get(name)
                got = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else None
                if got is None or (expected is not None and got != expected):
                    shown = "no tensor of this name" if got is None else f"{got[0]} {got[1]}"
                    raise DirectoryError(
                        f"{path}: parameter {name!r}: expected {parameter.dtype} "
                        f"{list(shard.local_shape)}, as {FILE_NAME} says, got {shown:.200}"
                    )

    def files_to_verify(self, rank: int, beside: Sequence[int]) -> set[str]:
        """Returns the files that a rank checks, if each file is checked by one of its readers.

        Args:
            rank: The rank.
            beside: The ranks that read the same copies of the files, with `rank` itself.
        """
        readers: dict[str, list[int]] = {}
        for reader in sorted(beside):
            for name in self.files_of(reader):
                readers.setdefault(name, []).append(reader)
        work, found = dict.fromkeys(beside, 0), set()
        # The largest first, each to the reader that has the least to do.
        for name in sorted(readers, key=lambda name: (-self.files[name].bytes, name)):
            least = min(readers[name], key=lambda reader: work[reader])
            work[least] += self.files[name].bytes
            if least == rank:
                found.add(name)
        return found

    @property
    def copy_number(self) -> int:
        """A number that ranks have in common only if they read the same copy of the directory.

        It is made of what identifies this boot of the machine, and the manifest on its disks.
        """
        status = (self.directory / FILE_NAME).stat()
        boot = Path("/proc/sys/kernel/random/boot_id")
        machine = boot.read_text() if boot.exists() else str(uuid.getnode())
        text = f"{machine} {status.st_dev} {status.st_ino}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    @property
    def digest(self) -> int:
        """A number from the SHA-256 of the manifest's text, which has the sums of all files."""
        text = read_regular(self.directory / FILE_NAME)
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")

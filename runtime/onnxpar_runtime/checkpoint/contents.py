"""What a checkpoint says of itself: `checkpoint.json`, schema 2, as frozen data and back.

The file holds the contents and the SHA-256 of their text, so that any change to it is found; the
contents have the SHA-256 of every other file. Schema 1, which is read too, is the same but for the
sum of each tensor, which may be missing.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from onnxpar_format.boxes import ShardBox
from onnxpar_format.dtypes import DTYPES
from onnxpar_runtime.errors import CheckpointError
from onnxpar_runtime.json_reader import JsonReader
from onnxpar_runtime.manifest_entries import FileEntry

FILE_NAME = "checkpoint.json"
SCHEMA = 2
_READ = (1, 2)
GENERATOR = "onnxpar_runtime"


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: Optimizer steps that are done, of all epochs.
        epoch: Epoch of the last of them, from 1; 0 before the first.
        epoch_step: Its number in the epoch, from 1: the position in the data.
        seed: Seed of the order of samples and of the model's random numbers.
        loss: Its loss; None before the first.
        lr: Its learning rate; None before the first.
        skipped: How many of the steps changed nothing, since gradients of 16 bits overflowed.
        loss_scale: What the next step multiplies its loss by.
        good: Steps with finite gradients since that changed.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    seed: int = 0
    loss: float | None = None
    lr: float | None = None
    skipped: int = 0
    loss_scale: float = 1.0
    good: int = 0


@dataclass(frozen=True)
class StoredShard:
    """A part of a tensor in a file, without padding, under the tensor's name.

    Attributes:
        file: Name of the file.
        shape: Shape of the part.
        boxes: Boxes of the global tensor, and where they lie in the part.
    """

    file: str
    shape: tuple[int, ...]
    boxes: tuple[ShardBox, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        name: Name of the state.
        kind: Kind of the state (`onnxpar_runtime.manifest_entries.STATE_KINDS`).
        parameter: The parameter that it is, or belongs to.
        dtype: Name of its element type.
        shape: Global shape.
        shards: Its parts: every element is in one of them.
        sum: Sum of its elements, see `onnxpar_runtime.checkpoint.sums`; None where it was written
            without.
    """

    name: str
    kind: str
    parameter: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]
    sum: int | None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint.

    Attributes:
        directory: Where it lies.
        model: Name of the model.
        optimizer: Kind of the optimizer.
        devices: Number of ranks that it was written for.
        progress: How far the run had come.
        run: What the run was to do: data, batch size, learning rate, …
        tensors: By name.
        files: Checksums by file name.
    """

    directory: Path
    model: str
    optimizer: str
    devices: int
    progress: Progress
    run: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, FileEntry]

    @staticmethod
    def load(directory: str | Path) -> "Checkpoint":
        """Reads and validates a checkpoint's manifest, and the sizes of its files.

        Raises:
            CheckpointError: The directory or a file is missing or truncated, or the manifest has
                been changed, is malformed, or is of another schema.
        """
        root = Path(directory)
        path = root / FILE_NAME
        if not root.is_dir():
            raise CheckpointError(f"{root}: no such checkpoint")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{root}: not a checkpoint, it has no {FILE_NAME}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path}: not valid JSON: {error}") from None
        checkpoint = _Reader(path).checkpoint(root, raw)
        checkpoint.check_files()
        return checkpoint

    def check_files(self) -> None:
        """Raises CheckpointError unless every file is there with the size that is said."""
        for name, entry in self.files.items():
            entry.check_size(self.directory / name, "checkpoint", CheckpointError)

    def verify_file(self, name: str) -> None:
        """Raises CheckpointError unless a file's SHA-256 is as said; reads every byte."""
        path = self.directory / name
        try:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        if digest != self.files[name].sha256:
            raise CheckpointError(
                f"{path}: changed, expected SHA-256 {self.files[name].sha256}, got {digest}"
            )

    def text(self) -> str:
        """Returns the text of `checkpoint.json`."""
        contents = {
            "schema": SCHEMA,
            "generator": GENERATOR,
            "model": self.model,
            "optimizer": self.optimizer,
            "devices": self.devices,
            "progress": dict(vars(self.progress)),
            "run": dict(self.run),
            "tensors": {name: _tensor(tensor) for name, tensor in self.tensors.items()},
            "files": {n: dict(vars(entry)) for n, entry in sorted(self.files.items())},
        }
        inner = _canonical(contents)
        return f'{{"sha256": "{_digest(inner)}",\n"contents": {inner}}}\n'


def _tensor(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "kind": tensor.kind,
        "parameter": tensor.parameter,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "sum": tensor.sum,
        "shards": [
            {
                "file": shard.file,
                "shape": list(shard.shape),
                "boxes": [
                    {"global": [list(i) for i in box.source], "local": [list(i) for i in box.local]}
                    for box in shard.boxes
                ],
            }
            for shard in tensor.shards
        ],
    }


def _canonical(contents: Any) -> str:
    # A loss that is not finite is NaN to Python's reader and writer alike.
    return json.dumps(contents, ensure_ascii=False, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Reader(JsonReader):
    error = CheckpointError

    def checkpoint(self, root: Path, raw: Any) -> Checkpoint:
        contents = self.get(raw, "contents", dict, "checkpoint")
        expected = self.digest(raw, "sha256", "checkpoint")
        got = _digest(_canonical(contents))
        schema = self.get(contents, "schema", int, "contents")
        if schema not in _READ:
            raise self.error(
                f"{self.path}: expected schema {' or '.join(map(str, _READ))}, got {schema}: it "
                "was written by another version of onnxpar"
            )
        if got != expected:
            raise self.error(f"{self.path}: changed, expected SHA-256 {expected}, got {got}")
        files = {}
        for name, entry in self.get(contents, "files", dict, "contents").items():
            where = f"files.{self.file_name(name, 'files')}"
            size = self.get(entry, "bytes", int, where)
            files[name] = FileEntry(self.digest(entry, "sha256", where), size)
        return Checkpoint(
            directory=root,
            model=self.get(contents, "model", str, "contents"),
            optimizer=self.get(contents, "optimizer", str, "contents"),
            devices=self.get(contents, "devices", int, "contents"),
            progress=self.progress(self.get(contents, "progress", dict, "contents")),
            run=self.get(contents, "run", dict, "contents"),
            tensors={
                name: self.tensor(name, entry, files, schema)
                for name, entry in self.get(contents, "tensors", dict, "contents").items()
            },
            files=files,
        )

    def progress(self, raw: Any) -> Progress:
        numbers = {k: self.get(raw, k, int, "progress") for k in
                   ("step", "epoch", "epoch_step", "seed", "skipped", "good")}  # fmt: skip
        if any(n < 0 for n in numbers.values()):
            raise self.fail("progress", "numbers >= 0", raw)
        scale = self.number(raw, "loss_scale")
        if scale is None or scale <= 0:
            raise self.fail("progress.loss_scale", "a number > 0", scale)
        return Progress(
            **numbers, loss=self.number(raw, "loss"), lr=self.number(raw, "lr"), loss_scale=scale
        )

    def number(self, raw: Any, key: str) -> float | None:
        if raw.get(key) is None:
            return None
        return float(self.get(raw, key, (int, float), "progress"))

    def tensor(
        self, name: str, raw: Any, files: Mapping[str, FileEntry], schema: int
    ) -> StoredTensor:
        where = f"tensors.{name}"
        dtype = self.get(raw, "dtype", str, where)
        if dtype not in DTYPES:
            raise self.fail(f"{where}.dtype", f"one of {sorted(DTYPES)}", dtype)
        shape = self.integers(self.get(raw, "shape", list, where), f"{where}.shape")
        if any(n < 0 for n in shape):
            raise self.fail(f"{where}.shape", "sizes >= 0", list(shape))
        shards = tuple(
            self.shard(entry, shape, files, where) for entry in self.get(raw, "shards", list, where)
        )
        covered = sum(_volume(box.source) for shard in shards for box in shard.boxes)
        if covered != prod(shape):
            raise self.fail(f"{where}.shards", f"boxes of {prod(shape)} elements together", covered)
        return StoredTensor(
            name,
            self.get(raw, "kind", str, where),
            self.get(raw, "parameter", str, where),
            dtype,
            shape,
            shards,
            None if schema == 1 and "sum" not in raw else self.get(raw, "sum", int, where),
        )

    def shard(
        self, raw: Any, whole: tuple[int, ...], files: Mapping[str, FileEntry], where: str
    ) -> StoredShard:
        file = self.file_name(self.get(raw, "file", str, where), f"{where}.file")
        if file not in files:
            raise self.error(f"{self.path}: {where}: {file!r} is used but is not under 'files'")
        shape = self.integers(self.get(raw, "shape", list, where), f"{where}.shards")
        boxes = tuple(
            ShardBox(self.box(box, "global", where), self.box(box, "local", where))
            for box in self.get(raw, "boxes", list, where)
        )
        for box in boxes:
            inside = all(
                len(b) == len(sizes)
                and all(stop <= n for (_, stop), n in zip(b, sizes, strict=True))
                for b, sizes in ((box.source, whole), (box.local, shape))
            )
            if not inside or [b - a for a, b in box.source] != [b - a for a, b in box.local]:
                raise self.fail(
                    f"{where}.boxes", f"equal boxes inside {whole} and {shape}", vars(box)
                )
        return StoredShard(file, shape, boxes)


def _volume(box: tuple[tuple[int, int], ...]) -> int:
    return prod(stop - start for start, stop in box)

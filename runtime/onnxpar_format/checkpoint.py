"""`checkpoint.json` (schema 2): its records, and the checks between them.

The file holds the contents and the SHA-256 of their text, so that any change to it is found; the
contents have the SHA-256 of every other file. Schema 1 can be read too; there the sum of a tensor
may be missing. The fields have the order of the file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Annotated, Any

from onnxpar_format.boxes import ShardBox
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import Digest, ElementName, FileEntry, FileName
from onnxpar_format.records import (
    KEYED,
    OPTIONAL,
    Check,
    FormatError,
    Problem,
    from_json,
    load_json,
    to_json,
)

FILE_NAME = "checkpoint.json"
SCHEMA = 2
GENERATOR = "onnxpar_runtime"
_READ = (1, 2)

Count = Annotated[int, Check("a number >= 0", lambda number: number >= 0)]


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: Number of optimizer steps that are done, over all epochs.
        epoch: Epoch of the last step, from 1; 0 before the first step.
        epoch_step: Number of the last step in its epoch, from 1: the position in the data.
        seed: Seed of the order of samples and of the model's random numbers.
        loss: Loss of the last step; None before the first step.
        lr: Learning rate of the last step; None before the first step.
        skipped: Number of steps that changed nothing, because 16-bit gradients overflowed.
        loss_scale: The loss scale of the next step.
        good: Steps with finite gradients since the loss scale changed.
        earlier: Number of steps that the optimizer had done before the run, in another program.
        best_loss: The smallest loss of an evaluation; None before the first one.
        best_step: The step after which it was found.
        worse: Number of evaluations since then.
    """

    step: Count = 0
    epoch: Count = 0
    epoch_step: Count = 0
    seed: Count = 0
    loss: float | None = None
    lr: float | None = None
    skipped: Count = 0
    loss_scale: Annotated[float, Check("a number > 0", lambda scale: scale > 0)] = 1.0
    good: Count = 0
    earlier: Annotated[Count, OPTIONAL] = 0
    best_loss: Annotated[float | None, OPTIONAL] = None
    best_step: Annotated[Count, OPTIONAL] = 0
    worse: Annotated[Count, OPTIONAL] = 0

    @property
    def updates(self) -> int:
        """How often the optimizer has changed the parameters."""
        return self.earlier + self.step - self.skipped

    def evaluated(self, loss: float) -> "Progress":
        """Returns the progress after an evaluation with this loss."""
        if loss < (inf if self.best_loss is None else self.best_loss):
            return replace(self, best_loss=loss, best_step=self.step, worse=0)
        return replace(self, worse=self.worse + 1)


@dataclass(frozen=True)
class StoredShard:
    """A shard of a tensor in a file, without padding.

    Attributes:
        file: Name of the file.
        shape: Shape of the shard.
        boxes: Boxes of the global tensor, and their places in the shard.
        name: Its name in the file; None if that is the tensor's.
    """

    file: FileName
    shape: tuple[int, ...]
    boxes: tuple[ShardBox, ...]
    name: Annotated[str | None, OPTIONAL] = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        name: Name of the state.
        kind: Kind of the state (`onnxpar_format.manifest.StateKind`).
        parameter: The parameter that it is, or belongs to.
        dtype: Name of its element type.
        shape: Global shape.
        sum: Sum of its elements, see `onnxpar_runtime.checkpoint.sums`; None in schema 1.
        shards: Its shards; every element is in one of them.
    """

    name: Annotated[str, KEYED]
    kind: str
    parameter: str
    dtype: ElementName
    shape: tuple[Count, ...]
    sum: int | None
    shards: tuple[StoredShard, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the global tensor."""
        return prod(self.shape) * self.itemsize

    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong between fields."""
        covered = 0
        for shard in self.shards:
            for box in shard.boxes:
                sizes = [stop - start for start, stop in box.source]
                inside = all(
                    len(intervals) == len(shape)
                    and all(stop <= n for (_, stop), n in zip(intervals, shape, strict=True))
                    for intervals, shape in ((box.source, self.shape), (box.local, shard.shape))
                )
                if not inside or sizes != [stop - start for start, stop in box.local]:
                    expected = f"equal boxes inside {self.shape} and {shard.shape}"
                    yield ".boxes", expected, vars(box)
                covered += prod(sizes)
        if covered != prod(self.shape):
            yield ".shards", f"boxes of {prod(self.shape)} elements together", covered


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a checkpoint's manifest.

    Attributes:
        schema: Version of the format.
        generator: Name of the program that wrote it.
        model: Name of the model.
        optimizer: Kind of the optimizer.
        devices: Number of ranks that it was written for.
        progress: How far the run had come.
        run: Options of the run: data, batch size, learning rate, …
        tensors: By name.
        files: Checksums by file name.
    """

    schema: int
    generator: str
    model: str
    optimizer: str
    devices: int
    progress: Progress
    run: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[FileName, FileEntry]

    def problems(self) -> Iterator[Problem]:
        """Yields what is wrong between the parts."""
        for name, tensor in self.tensors.items():
            if tensor.sum is None and self.schema > 1:
                yield f".tensors.{name}.sum", "int", None
            for shard in tensor.shards:
                if shard.file not in self.files:
                    yield f".tensors.{name}.shards", f"one of {sorted(self.files)}", shard.file

    def text(self) -> str:
        """Returns the text of `checkpoint.json`, files by name."""
        inner = _canonical(to_json(replace(self, files=dict(sorted(self.files.items())))))
        return f'{{"sha256": "{_digest(inner)}",\n"contents": {inner}}}\n'


@dataclass(frozen=True)
class _Signed:
    """The file: the contents, and the SHA-256 of their text."""

    sha256: Digest
    contents: Mapping[str, Any]


def _canonical(contents: Any) -> str:
    # Python writes and reads a loss that is not a number as NaN.
    return json.dumps(contents, ensure_ascii=False, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_checkpoint(directory: Path) -> CheckpointContents:
    """Reads and validates a checkpoint's manifest.

    Raises:
        FormatError: It is missing, has been changed, is malformed, or of another schema.
    """
    if not directory.is_dir():
        raise FormatError(f"{directory}: no such checkpoint")
    path = directory / FILE_NAME
    raw = load_json(path, f"not a checkpoint: it has no {FILE_NAME}")
    signed = from_json(_Signed, raw, f"{path}: checkpoint")
    schema = signed.contents.get("schema")
    if schema not in _READ:
        raise FormatError(
            f"{path}: expected schema {' or '.join(map(str, _READ))}, got {schema!r}: it was "
            "written by another version of onnxpar"
        )
    got = _digest(_canonical(signed.contents))
    if got != signed.sha256:
        raise FormatError(
            f"{path}: its content has changed: expected SHA-256 {signed.sha256}, got {got}"
        )
    return from_json(CheckpointContents, signed.contents, f"{path}: contents")

"""Folders of `torch.distributed.checkpoint` (FSDP, DTensor): read in one process, without ranks.

A folder has a description of all tensors, `.metadata`, and files with their shards. The description
is a pickle; only the classes that PyTorch writes are loaded from it. Of the rest only tensors are
read, without running code, and each must be complete: PyTorch leaves what no chunk has as it is.
"""

import io
import os
import pickle
import sys
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem  # noqa: F401  # its classes are looked up
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from onnxpar.api.pytorch.optimizer_state import MOMENTS, parameters_of
from onnxpar.api.pytorch.state_file import read_saved
from onnxpar.core.errors import DirectoryError, ModelError
from onnxpar.core.name_patterns import nearest
from onnxpar_format.regular_file import open_regular

_METADATA = ".metadata"
_CLASSES = {
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


def weights_in(folder: Path, module: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of a module from a folder, for its `load_state_dict`.

    Names in the folder may have a prefix, such as `model.`.

    Raises:
        DirectoryError: The folder cannot be read.
        ModelError: It lacks a tensor of the module, or has it in another shape.
    """
    own, read = module.state_dict(), _Folder(folder)
    prefix = _prefix(own, read.sizes)
    found = read.tensors({f"{prefix}{name}": tuple(t.shape) for name, t in own.items()})
    return {name: found[f"{prefix}{name}"] for name in own}


def optimizer_in(
    folder: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Returns the state dict of Adam or AdamW from a folder, for its `load_state_dict`.

    States are found by the names of parameters (`get_optimizer_state_dict` of PyTorch), or by their
    numbers (`state_dict` of the optimizer). Settings are those of `optimizer`.

    Raises:
        DirectoryError: The folder cannot be read.
        ModelError: It has no state of the optimizer, or one of another shape.
    """
    read = _Folder(folder)
    parameters = list(parameters_of(module, optimizer))
    of_name = {number: f"state.{name}" for number, (name, _) in enumerate(parameters)}
    of_number = {number: f"state.{number}" for number in of_name}
    wanted: dict[str, tuple[int, ...]] = {}
    held: dict[int, str] = {}
    for keys in (of_name, of_number):
        prefix = _prefix([f"{key}.exp_avg" for key in keys.values()], read.sizes)
        held = {n: f"{prefix}{k}" for n, k in keys.items() if f"{prefix}{k}.exp_avg" in read.sizes}
        if held:
            break
    if not held:
        raise ModelError(
            f"{folder}: expected states of {type(optimizer).__name__}, such as "
            f"'optim.{of_name[0]}.exp_avg', got none"
        )
    for number, key in held.items():
        shape = tuple(parameters[number][1].shape)
        wanted |= {f"{key}.step": (), **{f"{key}.{part}": shape for part in MOMENTS.values()}}
    found = read.tensors(wanted)
    state = {
        number: {part: found[f"{key}.{part}"] for part in ("step", *MOMENTS.values())}
        for number, key in held.items()
    }
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _prefix(names: Iterable[str], keys: Mapping[str, Any]) -> str:
    """Returns what stands before the names in a folder; the shortest that fits most of them."""
    wanted = set(names)
    found: dict[str, int] = {}
    for key in keys:
        for at in (0, *(place + 1 for place, letter in enumerate(key) if letter == ".")):
            if key[at:] in wanted:
                found[key[:at]] = found.get(key[:at], 0) + 1
    return min(found, key=lambda before: (-found[before], len(before)), default="")


class _Folder:
    """A folder whose description has been read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            with open_regular(folder / _METADATA) as stream:
                self._metadata = _Unpickler(io.BytesIO(stream.read())).load()
            entries = self._metadata.state_dict_metadata.items()
            self.sizes = {
                name: (tuple(entry.size), entry.properties.dtype)
                for name, entry in entries
                if isinstance(entry, TensorStorageMetadata)
            }
            files = {info.relative_path for info in self._metadata.storage_data.values()}
            for name in files:
                if Path(name).name != name or not (folder / name).is_file():
                    raise ValueError(f"no file {name!r}")
                if (folder / name).resolve().parent != folder.resolve():
                    raise ValueError(f"expected files in the folder, got {name!r}, a link")
        except Exception as error:  # a damaged pickle raises anything
            raise _unreadable(folder, error) from None

    def tensors(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Returns the complete tensors with these names, which must have these shapes."""
        for name, shape in wanted.items():
            if name not in self.sizes:
                raise ModelError(
                    f"{self._folder}: expected a tensor {name!r}, got none"
                    f"{nearest(name, list(self.sizes))}"
                )
            if self.sizes[name][0] != shape:
                raise ModelError(
                    f"{self._folder}, tensor {name!r}: expected the shape {shape}, got "
                    f"{self.sizes[name][0]}"
                )
        return {name: self._tensor(name) for name in wanted}

    def _tensor(self, name: str) -> Tensor:
        """Returns a tensor, joined from its chunks."""
        shape, dtype = self.sizes[name]
        try:
            chunks = self._chunks(name)
            found = torch.empty(shape, dtype=dtype)
            filled = torch.zeros(shape, dtype=torch.bool)
            for chunk, info in chunks:
                part = self._read(info)
                expected = (tuple(chunk.sizes), dtype)
                if not isinstance(part, Tensor) or (tuple(part.shape), part.dtype) != expected:
                    got = f"{type(part).__name__} {tuple(getattr(part, 'shape', ()))}"
                    raise ValueError(f"expected a chunk {expected}, got a {got}")
                box = tuple(slice(at, at + n) for at, n in zip(*_box(chunk), strict=True))
                found[box], filled[box] = part, True
            if not bool(filled.all()):
                raise ValueError("its chunks overlap, and some elements are in none")
        except Exception as error:  # a damaged file raises anything
            raise _unreadable(f"{self._folder}, tensor {name!r}", error) from None
        return found

    def _chunks(self, name: str) -> list[tuple[Any, Any]]:
        """Returns the chunks of a tensor and where they are; they have as many elements as it."""
        shape = self.sizes[name][0]
        found, places = [], set()
        for chunk in self._metadata.state_dict_metadata[name].chunks:
            offsets, sizes = _box(chunk)
            inside = len(offsets) == len(sizes) == len(shape) and all(
                0 <= at <= at + n <= end for at, n, end in zip(offsets, sizes, shape, strict=True)
            )
            if not inside:
                raise ValueError(
                    f"expected chunks within its shape {shape}, got one of {sizes} at {offsets}"
                )
            if not prod(sizes):
                continue
            info = self._metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if info is None:
                raise ValueError(f"got no data for its chunk at {offsets}")
            found.append((chunk, info))
            places.add((info.relative_path, info.offset))
        elements = sum(prod(chunk.sizes) for chunk, _ in found)
        if elements != prod(shape) or len(places) != len(found):
            raise ValueError(
                f"expected chunks that make up its {prod(shape):,} elements, got {len(places):,} "
                f"with {elements:,} elements"
            )
        return found

    def _read(self, info: Any) -> Any:
        """Returns what is in a part of a data file."""
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{info.relative_path}: its data are compressed, which is not read")
        path = self._folder / info.relative_path
        with open_regular(path) as stream:
            size = stream.seek(0, os.SEEK_END)
            if not 0 <= info.offset < info.offset + info.length <= size:
                raise ValueError(
                    f"{info.relative_path}: expected {info.length} bytes at {info.offset}, got a "
                    f"file of {size}"
                )
            stream.seek(info.offset)
            return read_saved(io.BytesIO(stream.read(info.length)))


def _box(chunk: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(chunk.offsets), tuple(chunk.sizes)


class _Unpickler(pickle.Unpickler):
    """Loads the classes of a description, and no others: a pickle can name any function."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # of Python 3.13
            module = "pathlib"
        if name in _CLASSES.get(module, ()):
            return getattr(sys.modules[module], name)  # they are loaded
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"got {module}.{name}, which is no part of a description")


def _unreadable(where: Path | str, error: Exception) -> DirectoryError:
    return DirectoryError(
        f"{where}: expected a folder of torch.distributed.checkpoint: {error!s:.500}"
    )

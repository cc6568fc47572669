"""The entry of one tensor in a strategy: reads and checks it without a model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnxpar.core.errors import short
from onnxpar.core.layout import REPLICATED, TensorLayout


@dataclass(frozen=True)
class DimPart:
    """A part of a dim that was merged from several: its size, and the axes that shard it."""

    size: str
    axes: tuple[str, ...] = ()


DimEntry = int | tuple[str, ...] | tuple[DimPart, ...]
"""A number of shards; the mesh axes that shard a dim (outermost first; none if it is replicated);
or, for a dim that was merged from others or is split later, its parts, major first."""

TensorEntry = tuple[DimEntry | None, ...] | TensorLayout
"""One entry per dim, None for a replicated dim; or a layout with its own device matrix."""

_RUN = re.compile(r"([2-9]|[1-9]\d{1,4})@([1-9]\d{0,4})")


def expected(wanted: str, got: object) -> ValueError:
    """Returns the error for an entry that is something else than what is wanted."""
    return ValueError(f"expected {wanted}, got {short(got)}")


def _dim(entry: object) -> DimEntry | None:
    if entry is None or entry == REPLICATED:
        return None
    if isinstance(entry, bool):
        raise expected("a number of shards, a mesh axis or ~ (quote a name such as on)", entry)
    if isinstance(entry, int):
        if entry < 1:
            raise expected("a number of shards >= 1", entry)
        return entry
    if isinstance(entry, str):
        return _parts(entry) if entry.startswith("(") else (entry,)
    if isinstance(entry, list | tuple) and entry and all(isinstance(name, str) for name in entry):
        return tuple(entry)
    raise expected("a number of shards, a mesh axis, a list of mesh axes or ~", entry)


def _parts(text: str) -> tuple[DimPart, ...]:
    """Reads the parts of a dim as `onnxpar inspect` shows them, such as `(3 16:tp 64)`."""
    found = [item.partition(":") for item in text.removeprefix("(").removesuffix(")").split()]
    parts = tuple(DimPart(size, tuple(axes.split(".")) if axes else ()) for size, _, axes in found)
    if not text.endswith(")") or not parts or any(c and not axes for _, c, axes in found):
        raise expected("the components of a dim, such as '(3 16:tp 64)'", text)
    return parts


def read_tensor(entry: object) -> TensorEntry:
    """Returns the entry of one tensor.

    Raises:
        ValueError: It is malformed.
    """
    if isinstance(entry, TensorLayout):
        return entry
    if not isinstance(entry, list | tuple):
        raise expected("a list with one entry for each dim of the tensor", entry)
    dims = tuple(_dim(item) for item in entry)
    if any(isinstance(d, int) for d in dims) and any(isinstance(d, tuple) for d in dims):
        raise expected("numbers of shards or mesh axes, not both", entry)
    names = names_in(dims)
    for name in names:
        if names.count(name) > 1:
            raise expected(f"mesh axis {name!r} at most once in a tensor", entry)
    return dims


def read_tensors(entry: object) -> tuple[TensorEntry | None, ...]:
    """Returns the entries of several tensors, or None for one without entry; as `read_tensor`."""
    if not isinstance(entry, list | tuple) or not all(
        isinstance(item, list | tuple | TensorLayout | None) for item in entry
    ):
        raise expected("a list with one list for each operand, as in [[2, 4], [4, 1]]", entry)
    return tuple(None if item is None else read_tensor(item) for item in entry)


def read_split(entry: object) -> dict[str, DimEntry]:
    """Returns the entry of each factor, by name; as `read_tensor`."""
    if not isinstance(entry, Mapping):
        raise expected("mesh axes for each factor, as in {V: tp}", entry)
    found: dict[str, DimEntry] = {}
    for name, item in entry.items():
        dim = _dim(item)
        if not isinstance(dim, tuple):
            raise expected(f"mesh axes for the factor {name!r}", item)
        found[str(name)] = dim
    return found


def run_of(name: str) -> tuple[int, int] | None:
    """Returns (4, 2) for `4@2`: 4 shards on devices that are 2 apart; None for any other name."""
    found = _RUN.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def names_in(entry: TensorEntry) -> list[str]:
    """Returns the mesh axes that an entry names, in order."""
    if isinstance(entry, TensorLayout):
        return []
    return [
        name
        for dim in entry
        if isinstance(dim, tuple)
        for item in dim
        for name in (item.axes if isinstance(item, DimPart) else (item,))
    ]

"""Machine files; `load_machine` reads the value of `--machine NAME|FILE`."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from onnxpar.core.errors import MachineError
from onnxpar.core.machine import NETWORKED, PRESETS, Link, Machine
from onnxpar.core.name_patterns import nearest
from onnxpar.strategy.schema import TargetEntry
from onnxpar.strategy.validation_errors import in_words, problem
from onnxpar.strategy.yaml_document import parse_document, read_text
from onnxpar_format.options import parse_bytes


class _LinkFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    devices: Annotated[int, Field(ge=1)] | None = None
    bandwidth: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    latency: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    wait: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    overlaps: bool = False


class _MachineFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    flops: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    bandwidth: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
    overhead: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    links: Annotated[list[_LinkFile], Field(min_length=1)]


def load_machine(text: str) -> Machine:
    """Reads a machine file, or returns a preset; if both exist, the file wins.

    Raises:
        MachineError: There is neither a file nor a preset, or the file is malformed.
    """
    path = Path(text)
    if not path.is_file():
        if text in PRESETS:
            return PRESETS[text]
        raise MachineError(
            f"machine {text!r}: expected a file or a known machine{nearest(text, PRESETS)}"
        )
    document = parse_document(read_text(path), str(path))
    try:
        found = _MachineFile.model_validate(document.data)
    except ValidationError as error:
        first = error.errors()[0]
        where = document.where(first["loc"])
        raise MachineError(f"{where}: {in_words(first['loc'])}{problem(first)}") from None
    if "float32" not in found.flops:
        raise MachineError(f"{document.where(('flops',))}: expected an entry float32")
    if found.memory > 1 << 62:
        raise MachineError(f"{document.where(('memory',))}: expected at most 2**62 bytes of memory")
    sizes = [link.devices for link in found.links]
    blocks = sizes[:-1]
    if None in blocks or any(a is None or (b is not None and a >= b) for a, b in pairwise(sizes)):
        raise MachineError(
            f"{document.where(('links',))}: expected increasing numbers of devices, and none "
            f"for the last entry, got {sizes}"
        )
    return Machine(
        found.name,
        MappingProxyType(dict(found.flops)),
        found.bandwidth,
        found.memory,
        found.overhead,
        tuple(
            Link(k.devices or 0, k.bandwidth, k.latency, k.wait, k.overlaps) for k in found.links
        ),
    )


def target_machine(entry: TargetEntry) -> Machine:
    """Returns the machine of a strategy, with the memory that a device may hold.

    Args:
        entry: What the strategy is for.

    Raises:
        MachineError: As `load_machine`.
    """
    machine = load_machine(entry.machine)
    return machine if entry.memory is None else replace(machine, memory=entry.memory)


def background_machine(entry: TargetEntry) -> Machine:
    """Returns the machine for which it is decided what runs in the background.

    If the strategy names no machine, the program may run on any. Then it is made for a network,
    where a wrong decision costs most: in shared memory, the runtime communicates at once.

    Args:
        entry: What the strategy is for.

    Raises:
        MachineError: As `load_machine`.
    """
    return load_machine(entry.machine) if _stated(entry) else NETWORKED


def memory_limit(entry: TargetEntry) -> int | None:
    """Returns the bytes that a device may hold; None if the strategy does not say so.

    Args:
        entry: What the strategy is for.

    Raises:
        MachineError: As `load_machine`.
    """
    return target_machine(entry).memory if _stated(entry) else entry.memory


def _stated(entry: TargetEntry) -> bool:
    return "machine" in entry.model_fields_set

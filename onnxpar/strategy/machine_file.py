"""Machine files; `load_machine` reads the value of `--machine NAME|FILE`."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from onnxpar.core.errors import MachineError, OnnxparError, short
from onnxpar.core.machine import NETWORKED, PRESETS, Link, Machine
from onnxpar.core.name_patterns import nearest
from onnxpar.strategy.schema import Strategy
from onnxpar.strategy.validation_errors import in_words, problem
from onnxpar.strategy.yaml_document import parse_document, read_text
from onnxpar_format.option import parse_bytes

_Rate = Annotated[float, Field(ge=1, le=1e24)]
"""Operations or bytes per second: no quotient of sizes by it is too large for a float."""
_Seconds = Annotated[float, Field(ge=0, le=1e6)]


class _LinkFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    devices: Annotated[int, Field(ge=1)] | None = None
    bandwidth: _Rate
    latency: _Seconds
    wait: _Seconds = 0.0
    overlaps: bool = False


class _MachineFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    flops: dict[str, _Rate]
    bandwidth: _Rate
    memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
    overhead: _Seconds
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
    if not isinstance(document.data, dict):
        # The content stays out of the message: the file is another's if a strategy names it.
        raise MachineError(
            f"{path}: expected the keys of a machine file, such as flops and links, got "
            f"{'a list' if isinstance(document.data, list) else 'a scalar'}"
        )
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
            f"for the last entry, got {short(sizes)}"
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


def machine_of(strategy: Strategy) -> Machine:
    """Returns the machine of a strategy.

    Args:
        strategy: The strategy.

    Raises:
        MachineError: As `load_machine`; names the strategy's file, if it names the machine.
    """
    text, data = strategy.search.machine, strategy.document.data
    try:
        return load_machine(text)
    except OnnxparError as error:
        for key in ("search", "target"):
            if strategy.document.lines and (data.get(key) or {}).get("machine") == text:
                where = strategy.where(key, "machine")
                raise MachineError(f"{where}: {key!r}: 'machine': {error}") from None
        raise


def target_machine(strategy: Strategy) -> Machine:
    """Returns the machine of a strategy, with the memory that a device may hold.

    Args:
        strategy: The strategy.

    Raises:
        MachineError: As `machine_of`.
    """
    machine, memory = machine_of(strategy), strategy.search.memory
    return machine if memory is None else replace(machine, memory=memory)


def background_machine(strategy: Strategy) -> Machine:
    """Returns the machine for which it is decided what runs in the background.

    If the strategy names no machine, the program may run on any. Then it is made for a network,
    where a wrong decision costs most: in shared memory, the runtime communicates at once.

    Args:
        strategy: The strategy.

    Raises:
        MachineError: As `machine_of`.
    """
    return machine_of(strategy) if _stated(strategy) else NETWORKED


def memory_limit(strategy: Strategy) -> int | None:
    """Returns the bytes that a device may hold; None if the strategy does not say so.

    Args:
        strategy: The strategy.

    Raises:
        MachineError: As `machine_of`.
    """
    return target_machine(strategy).memory if _stated(strategy) else strategy.search.memory


def _stated(strategy: Strategy) -> bool:
    return "machine" in strategy.search.model_fields_set

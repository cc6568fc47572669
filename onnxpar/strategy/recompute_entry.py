"""The entry `recompute` of a strategy file, and the same on the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import PydanticCustomError

from onnxpar.core.errors import StrategyError
from onnxpar.core.machine import parse_bytes
from onnxpar.core.name_patterns import nearest

KEEP, AGAIN = "keep", "recompute"
COMMUNICATION = (KEEP, AGAIN)
LAYERS, AUTO = "layers", "auto"
_KEYS = ("nodes", "layers", "memory", "sizes", "communication")


@dataclass(frozen=True)
class RecomputeOptions:
    """What the user asks to recompute.

    Attributes:
        nodes: Names of nodes, and patterns of them (`fnmatch`).
        layers: Every so many-th layer of those that repeat; 0 none.
        communication: Whether what collectives inside brought is kept, or communicated again.
        memory: Bytes that a device may hold in training; as little is recomputed as that needs.
        sizes: Sizes of symbols to hold that for; a typical size of those not named.
        where: Where the user said so, for messages.
    """

    nodes: tuple[str, ...] = ()
    layers: int = 0
    communication: str = AGAIN
    memory: int | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    where: str = field(default="recompute", compare=False)

    @property
    def entry(self) -> dict[str, Any]:
        """What a strategy file says of it."""
        said: dict[str, Any] = {"nodes": list(self.nodes)} if self.nodes else {}
        said |= {"layers": self.layers} if self.layers else {}
        said |= {"memory": self.memory} if self.memory is not None else {}
        said |= {"sizes": dict(self.sizes)} if self.sizes else {}
        return {**said, "communication": self.communication}

    def __bool__(self) -> bool:
        """Whether anything is to be recomputed."""
        return bool(self.nodes or self.layers or self.memory is not None)


NOTHING = RecomputeOptions()


def read_recompute(entry: object) -> RecomputeOptions:
    """Returns what an entry says: patterns of nodes, or a mapping.

    Keys are `nodes`, a list of names and patterns; `layers`, every so many-th of the layers that
    repeat; `memory`, bytes that a device may hold, for which as little as possible is recomputed;
    `sizes`, of symbols, for which it may; `communication`, "keep" or "recompute", for results of
    collectives inside.

    Raises:
        PydanticCustomError: It is malformed.
    """
    if isinstance(entry, list | tuple):
        entry = {"nodes": entry}
    if not isinstance(entry, Mapping):
        raise _error("a list of nodes or a mapping with 'nodes', 'layers' or 'memory'", entry)
    for key in entry:
        if key not in _KEYS:
            text = f"unknown key {key!r}{nearest(str(key), _KEYS)}"
            raise PydanticCustomError("entry", "{text}", {"text": text})
    given: dict[str, Any] = dict(entry)
    nodes = given.get("nodes", ())
    if not isinstance(nodes, list | tuple) or not all(isinstance(n, str) for n in nodes):
        raise _error("a list of names and patterns of nodes under 'nodes'", nodes)
    layers = given.get("layers", 0)
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < ("layers" in given):
        raise _error("a number of at least 1 under 'layers'", layers)
    communication = given.get("communication", NOTHING.communication)
    if communication not in COMMUNICATION:
        raise _error(f"one of {list(COMMUNICATION)} under 'communication'", communication)
    memory = None
    if "memory" in given:
        try:
            memory = parse_bytes(given["memory"])
        except ValueError as error:
            raise PydanticCustomError("entry", "{text}", {"text": str(error)}) from None
    sizes = given.get("sizes", {})
    if not isinstance(sizes, Mapping) or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes.values()
    ):
        raise _error("sizes of symbols such as {batch: 32} under 'sizes'", sizes)
    pairs = tuple((str(name), size) for name, size in sizes.items())
    found = RecomputeOptions(tuple(nodes), layers, communication, memory, pairs)
    if not found:
        raise _error("'nodes', 'layers' or 'memory'", dict(entry))
    return found


def _error(expected: str, got: object) -> PydanticCustomError:
    text = f"expected {expected}, got {got!r}"
    return PydanticCustomError("entry", "{text}", {"text": text[:200]})


def parse_recompute(texts: Sequence[str], communication: str) -> RecomputeOptions:
    """Returns what `--recompute` says: patterns of nodes, `layers`, `layers=K` or `auto=BYTES`.

    Raises:
        StrategyError: A number that is none.
    """
    if communication not in COMMUNICATION:
        raise StrategyError(
            f"--recompute-communication: expected one of {', '.join(COMMUNICATION)}, got "
            f"{communication!r}"
        )
    found = replace(NOTHING, communication=communication)
    for text in texts:
        word, given, number = text.partition("=")
        if word == LAYERS and (not given or (number.isdecimal() and int(number))):
            found = replace(found, layers=int(number or 1))
        elif word == AUTO and given:
            try:
                found = replace(found, memory=parse_bytes(number))
            except ValueError as error:
                raise StrategyError(f"--recompute {text}: {error}") from None
        elif word in (LAYERS, AUTO):
            raise StrategyError(
                f"--recompute: expected layers, layers=K with a number K of at least 1, "
                f"auto=BYTES such as auto=8GiB, or a pattern of nodes, got {text!r}"
            )
        else:
            found = replace(found, nodes=(*found.nodes, text))
    return replace(found, where="--recompute")

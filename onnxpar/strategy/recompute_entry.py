"""The entry `recompute` of a strategy file, and its options on the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnxpar.core.errors import StrategyError
from onnxpar.core.name_patterns import nearest
from onnxpar.strategy.tensor_entry import expected
from onnxpar_format.option import parse_bytes
from onnxpar_format.texts import whole

KEEP, AGAIN = "keep", "recompute"
COMMUNICATION = (KEEP, AGAIN)
LAYERS, AUTO = "layers", "auto"
_KEYS = ("nodes", "layers", "memory", "sizes", "communication")


@dataclass(frozen=True)
class RecomputeOptions:
    """What the user asks to recompute.

    Attributes:
        nodes: Names or patterns (`fnmatch`) of nodes.
        layers: k for every k-th of the repeated layers; 0 for none.
        communication: "keep" to keep the results of collectives, "recompute" to communicate again.
        memory: Bytes that a device may hold in training; as little as possible is recomputed.
        sizes: Sizes of symbols to which the limit applies; the others have their typical size.
        where: The file and line, or the option, for messages.
    """

    nodes: tuple[str, ...] = ()
    layers: int = 0
    communication: str = AGAIN
    memory: int | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    where: str = field(default="recompute", compare=False)

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of a strategy file."""
        entry: dict[str, Any] = {"nodes": list(self.nodes)} if self.nodes else {}
        entry |= {"layers": self.layers} if self.layers else {}
        entry |= {"memory": self.memory} if self.memory is not None else {}
        entry |= {"sizes": dict(self.sizes)} if self.sizes else {}
        return {**entry, "communication": self.communication}

    def __bool__(self) -> bool:
        """Whether anything is to be recomputed."""
        return bool(self.nodes or self.layers or self.memory is not None)


NOTHING = RecomputeOptions()


def read_recompute(entry: object) -> RecomputeOptions:
    """Returns the options of an entry: a list of node patterns, or a mapping.

    The keys of the mapping are the first five attributes of `RecomputeOptions`.

    Raises:
        ValueError: It is malformed.
    """
    if isinstance(entry, list | tuple):
        entry = {"nodes": entry}
    if not isinstance(entry, Mapping):
        raise expected("a list of nodes or a mapping with 'nodes', 'layers' or 'memory'", entry)
    for key in entry:
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}{nearest(str(key), _KEYS)}")
    given: dict[str, Any] = dict(entry)
    nodes = given.get("nodes", ())
    if not isinstance(nodes, list | tuple) or not all(isinstance(n, str) for n in nodes):
        raise expected("a list of names and patterns of nodes under 'nodes'", nodes)
    layers = given.get("layers", 0)
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < ("layers" in given):
        raise expected("a number of at least 1 under 'layers'", layers)
    communication = given.get("communication", NOTHING.communication)
    if communication not in COMMUNICATION:
        raise expected(f"one of {list(COMMUNICATION)} under 'communication'", communication)
    memory = parse_bytes(given["memory"]) if "memory" in given else None
    if memory is not None and memory < 1:
        raise expected("at least 1 byte under 'memory'", given["memory"])
    sizes = given.get("sizes", {})
    if not isinstance(sizes, Mapping) or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes.values()
    ):
        raise expected("sizes of symbols such as {batch: 32} under 'sizes'", sizes)
    pairs = tuple((str(name), size) for name, size in sizes.items())
    found = RecomputeOptions(tuple(nodes), layers, communication, memory, pairs)
    if not found:
        raise expected("'nodes', 'layers' or 'memory'", dict(entry))
    return found


def parse_recompute(texts: Sequence[str], communication: str) -> RecomputeOptions:
    """Returns the options for `--recompute`: node patterns, `layers`, `layers=K` or `auto=BYTES`.

    Raises:
        StrategyError: A number or `communication` is malformed.
    """
    if communication not in COMMUNICATION:
        raise StrategyError(
            f"--recompute-communication: expected one of {', '.join(COMMUNICATION)}, got "
            f"{communication!r}"
        )
    found = replace(NOTHING, communication=communication)
    for text in texts:
        word, given, number = text.partition("=")
        if word == LAYERS and (not given or whole(number)):
            found = replace(found, layers=int(number or 1))
        elif word == AUTO and given:
            try:
                found = replace(found, memory=parse_bytes(number))
            except ValueError as error:
                raise StrategyError(f"--recompute {text}: {error}") from None
            if not found.memory or found.memory < 1:
                raise StrategyError(f"--recompute {text}: expected at least 1 byte")
        elif word in (LAYERS, AUTO):
            raise StrategyError(
                f"--recompute: expected layers, layers=K with a number K of at least 1, "
                f"auto=BYTES such as auto=8GiB, or a pattern of nodes, got {text!r}"
            )
        else:
            found = replace(found, nodes=(*found.nodes, text))
    return replace(found, where="--recompute")

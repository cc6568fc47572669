"""The values that the programs of a pipeline hand to one another, by the manifest.

Values from one virtual stage to another are sent from rank to rank, those of one pair in one
message: as activations if a forward made them, as cotangents if a backward did. Values between
programs of one virtual stage, or of two on one rank, stay on the rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from onnxpar_format.entries import HandedEntry, HandedInEntry
from onnxpar_format.manifest import VirtualStage
from onnxpar_runtime.errors import DirectoryError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.pipeline.schedule import Edge, Kind, Payload

Ends = tuple[Payload, int, int]
"""The payload, the virtual stage that makes it, and the one that reads it."""
_VALUES = ("values",)


@dataclass(frozen=True)
class Values:
    """The values that the programs of the virtual stages hand to one another.

    Attributes:
        stages: The virtual stages.
        messages: The values that each virtual stage sends to another one.
        kept: The values that each virtual stage's programs keep for its later programs.
        readers: For each virtual stage, the number of its programs that read a value, by its name.
    """

    stages: tuple[VirtualStage, ...]
    messages: Mapping[Ends, tuple[HandedEntry, ...]]
    kept: tuple[frozenset[str], ...]
    readers: tuple[Mapping[str, int], ...]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges between the virtual stages, for schedules."""
        forward = {(s, t) for what, s, t in self.messages if what is Payload.ACTIVATION}
        back = {(t, s) for what, s, t in self.messages if what is Payload.COTANGENT}
        return tuple(
            Edge(*ends, _VALUES if ends in forward else (), _VALUES if ends in back else ())
            for ends in sorted(forward | back)
        )


def read_values(manifest: Manifest, program: str) -> Values:
    """Returns the values that the parts of a program hand to one another.

    Args:
        manifest: The manifest of a pipeline.
        program: Name of a program that runs through its stages.

    Raises:
        DirectoryError: The manifest has no such program, or a value goes to an earlier part of the
            computation, which no schedule allows.
    """
    pipeline = manifest.pipeline
    if pipeline is None or program not in pipeline.programs:
        raise DirectoryError(f"{manifest.directory}: no program {program!r} that runs in stages")
    stages = pipeline.programs[program]
    made = {
        name: (index, kind)
        for index, stage in enumerate(stages)
        for kind, name in _kinds(stage).items()
    }
    messages: dict[Ends, dict[str, HandedEntry]] = {}
    kept: list[set[str]] = [set() for _ in stages]
    readers: list[dict[str, int]] = [{} for _ in stages]
    for target, stage in enumerate(stages):
        for kind, name in _kinds(stage).items():
            for value in manifest.program(name).handed_in:
                if value.source not in made:
                    raise _wrong_way(manifest, name, value)
                source, maker = made[value.source]
                if not _allowed(source, maker, target, kind):
                    raise _wrong_way(manifest, name, value)
                readers[target][value.name] = readers[target].get(value.name, 0) + 1
                if source == target:
                    kept[target].add(value.name)
                    continue
                payload = Payload.ACTIVATION if maker is Kind.FORWARD else Payload.COTANGENT
                messages.setdefault((payload, source, target), {})[value.name] = value
    return Values(
        stages,
        {ends: tuple(values.values()) for ends, values in sorted(messages.items(), key=_order)},
        tuple(frozenset(names) for names in kept),
        tuple(readers),
    )


def _kinds(stage: VirtualStage) -> dict[Kind, str]:
    """Returns the programs of a virtual stage by kind, in their order."""
    names = {
        Kind.FORWARD: stage.forward,
        Kind.BACKWARD_INPUT if stage.weight else Kind.BACKWARD: stage.backward,
        Kind.BACKWARD_WEIGHT: stage.weight,
    }
    return {kind: name for kind, name in names.items() if name is not None}


def _allowed(source: int, maker: Kind, target: int, reader: Kind) -> bool:
    """Whether every schedule reads such a value after making it."""
    if source == target:
        order = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return order.index(maker) < order.index(reader)
    if maker is Kind.FORWARD:
        return source < target
    return maker is not Kind.BACKWARD_WEIGHT and reader is not Kind.FORWARD and source > target


def _wrong_way(manifest: Manifest, name: str, value: HandedInEntry) -> DirectoryError:
    return DirectoryError(
        f"{manifest.directory}: programs.{name}: takes {value.name!r} from {value.source!r}, "
        "expected a program that runs earlier in every schedule"
    )


def _order(item: tuple[Ends, dict[str, HandedEntry]]) -> tuple[str, int, int]:
    (payload, source, target), _ = item
    return payload.value, source, target

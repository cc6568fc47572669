"""Which boxes of every state the ranks of an artifact directory hold, and who writes which.

A state that several ranks hold is written by one of them; which one goes round from state to state,
so that replicas share the work. All ranks work this out alike from the manifest alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from onnxpar_format.boxes import SizedSharding, coordinates
from onnxpar_format.checkpoint import StoredShard, StoredTensor
from onnxpar_format.manifest import TRANSIENT, StateEntry
from onnxpar_runtime.manifest import Manifest


def kept_states(manifest: Manifest) -> list[StateEntry]:
    """Returns the states that a checkpoint has, by name."""
    states = manifest.trained().states
    return [states[name] for name in sorted(states) if states[name].kind not in TRANSIENT]


def cut_of(manifest: Manifest, state: StateEntry) -> SizedSharding:
    """Returns how a state is cut over the ranks."""
    return state.cut(manifest.atoms, {})


def held_states(manifest: Manifest, rank: int) -> list[StateEntry]:
    """Returns the states that a checkpoint has and a rank holds a part of, by name."""
    stage = manifest.stage_of(rank)
    return [state for state in kept_states(manifest) if stage in state.stages]


def rank_file(rank: int) -> str:
    """Returns the name of the file with what a rank wrote."""
    return f"rank{rank:04d}.safetensors"


@dataclass(frozen=True)
class Written:
    """A part of a state that is written once.

    Attributes:
        state: The state.
        cut: How it is cut.
        place: The place on its stage's mesh of who writes it.
        rank: Who writes it.
    """

    state: StateEntry
    cut: SizedSharding
    place: int
    rank: int


def written(manifest: Manifest) -> Iterator[Written]:
    """Returns every part of every kept state that is not empty, with the rank that writes it."""
    for number, state in enumerate(kept_states(manifest)):
        cut = cut_of(manifest, state)
        free = [a for a in range(len(cut.atoms)) if a not in state.split_atoms]
        sizes = [len(state.stages), *(cut.atoms[a] for a in free)]
        copy, *digits = coordinates(number % prod(sizes), sizes)
        fixed = dict(zip(free, digits, strict=True))
        for coords in product(
            *([fixed[a]] if a in fixed else range(size) for a, size in enumerate(cut.atoms))
        ):
            place = 0
            for digit, size in zip(coords, cut.atoms, strict=True):
                place = place * size + digit
            if all(b.valid for b in cut.blocks(place)):
                rank = state.stages[copy] * manifest.stage_devices + place
                yield Written(state, cut, place, rank)


def stored_tensors(manifest: Manifest) -> dict[str, StoredTensor]:
    """Returns what a checkpoint of the ranks of an artifact directory holds, by name.

    Sums are zero: what is in the tensors is unknown here.
    """
    shards: dict[str, list[StoredShard]] = {s.name: [] for s in kept_states(manifest)}
    for part in written(manifest):
        shards[part.state.name].append(
            StoredShard(
                rank_file(part.rank),
                part.cut.unpadded_shape(part.place),
                part.cut.boxes(part.place, padded=False),
            )
        )
    return {
        state.name: StoredTensor(
            state.name,
            state.kind,
            state.parameter,
            state.dtype,
            cut_of(manifest, state).shape,
            0,
            tuple(shards[state.name]),
        )
        for state in kept_states(manifest)
    }

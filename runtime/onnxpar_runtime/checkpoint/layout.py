"""Which boxes of every state the ranks of a directory hold, and who writes which.

If several ranks hold a state, one of them writes it. Replicas take turns from state to state, so
that they share the work. All ranks compute the same from the manifest alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from onnxpar_format.boxes import SizedSharding, coordinates
from onnxpar_format.checkpoint import StoredShard, StoredTensor
from onnxpar_format.manifest import TRANSIENT, StateEntry, TensorOfStates
from onnxpar_runtime.manifest import Manifest


def kept_states(manifest: Manifest) -> list[StateEntry]:
    """Returns the states that a checkpoint has, by name."""
    states = manifest.trained().states
    return [states[name] for name in sorted(states) if states[name].kind not in TRANSIENT]


def kept_tensors(manifest: Manifest) -> dict[str, TensorOfStates]:
    """Returns the tensors that a checkpoint of a directory has, by name."""
    return {state.tensor.name: state.tensor for state in kept_states(manifest)}


def held_states(manifest: Manifest, rank: int) -> list[StateEntry]:
    """Returns the states that a checkpoint has and whose shards a rank holds, by name."""
    stage = manifest.stage_of(rank)
    return [state for state in kept_states(manifest) if stage in state.stages]


def rank_file(rank: int) -> str:
    """Returns the name of the file with what a rank wrote."""
    return f"rank{rank:04d}.safetensors"


@dataclass(frozen=True)
class Written:
    """A shard of a state, and the one rank that writes it.

    Attributes:
        state: The state.
        sharding: Its sharding.
        place: The place of the rank on its stage's mesh.
        rank: The rank that writes the shard.
    """

    state: StateEntry
    sharding: SizedSharding
    place: int
    rank: int


def written(manifest: Manifest) -> Iterator[Written]:
    """Returns every shard of every kept state that is not empty, with the rank that writes it."""
    for number, state in enumerate(kept_states(manifest)):
        sharding = state.sharding(manifest.atoms)
        free = [a for a in range(len(sharding.atoms)) if a not in state.split_atoms]
        sizes = [len(state.stages), *(sharding.atoms[a] for a in free)]
        copy, *digits = coordinates(number % prod(sizes), sizes)
        fixed = dict(zip(free, digits, strict=True))
        for coords in product(
            *([fixed[a]] if a in fixed else range(size) for a, size in enumerate(sharding.atoms))
        ):
            place = 0
            for digit, size in zip(coords, sharding.atoms, strict=True):
                place = place * size + digit
            if all(b.valid for b in sharding.blocks(place)):
                rank = state.stages[copy] * manifest.stage_devices + place
                yield Written(state, sharding, place, rank)


def stored_tensors(manifest: Manifest) -> dict[str, StoredTensor]:
    """Returns what a checkpoint of the ranks of a directory holds, by name.

    A tensor whose parts are states of their own is there as one. Sums are zero, because the
    contents of the tensors are unknown here.
    """
    tensors = kept_tensors(manifest)
    shards: dict[str, list[StoredShard]] = {name: [] for name in tensors}
    for part in written(manifest):
        state = part.state
        shards[state.tensor.name].append(
            StoredShard(
                rank_file(part.rank),
                part.sharding.unpadded_shape(part.place),
                state.in_tensor(part.sharding.boxes(part.place, padded=False)),
                None if state.part is None else state.name,
            )
        )
    return {
        name: StoredTensor(**tensor._asdict(), sum=0, shards=tuple(shards[name]))
        for name, tensor in tensors.items()
    }

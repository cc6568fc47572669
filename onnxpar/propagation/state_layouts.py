"""Layouts of states: what a run leaves must be what the next one takes."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from onnxpar.core.sharding import Component, Sharding
from onnxpar.facts.carried_states import CarriedState
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds


def propagate_with_states(
    plan_of: Callable[[Seeds], Plan],
    seeds: Seeds,
    states: Sequence[CarriedState] = (),
    fixed: Collection[str] = (),
) -> Plan:
    """Returns a plan in which every state has one layout, as an input and as an output.

    A layout that the user fixed is kept; otherwise the one that shards the state more.

    Args:
        plan_of: Returns the plan of the program that follows from seeds.
        seeds: The part of the plan that the user, or a search, fixed. A search does not know what
            states are, and holds inputs as they come.
        states: The states of the program.
        fixed: Inputs whose layout the user fixed.

    Raises:
        ShardingError: As `onnxpar.propagation.propagate.propagate`.
    """
    plan = plan_of(seeds)
    inputs, outputs = dict(seeds.inputs), dict(seeds.outputs)
    for state in states:
        taken, left = plan.inputs[state.input], plan.outputs[state.output]
        if _atoms(taken) == _atoms(left) and not left.partial:
            continue
        if state.input not in fixed and len(left.split_atoms) > len(taken.split_atoms):
            taken = _with_sizes(left, taken)
        inputs[state.input] = taken
        outputs[state.output] = _with_sizes(taken, left)
    if inputs == seeds.inputs and outputs == seeds.outputs:
        return plan
    held = seeds.held | {state.input for state in states if state.output in outputs}
    return plan_of(replace(seeds, inputs=inputs, outputs=outputs, held=held))


def _atoms(sharding: Sharding) -> tuple[tuple[int, ...], ...]:
    return tuple(sharding.dim_atoms(dim) for dim in range(sharding.rank))


def _with_sizes(layout: Sharding, sizes: Sharding) -> Sharding:
    """Returns a layout for a tensor that differs in the size of dims that are not sharded."""
    dims = tuple(
        dim if any(c.atoms for c in dim) else (Component(size, ()),)
        for dim, size in zip(layout.dims, sizes.shape, strict=True)
    )
    return Sharding(dims)

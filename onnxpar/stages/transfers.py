"""In which sharding a value goes to another stage.

The stages have one mesh, and each device sends to its counterpart. If a value is replicated over
some devices of its stage, all of them would send the same. So it may be sent in shards, and
gathered where it is read (the scatter and gather of Narayanan et al., SC 2021); and if its readers
want another sharding, it may be resharded before it is sent. The cost model decides.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxpar.core.machine import Link
from onnxpar.core.sharding import Component, Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.facts.program import Program
from onnxpar.graph.body_captures import read_by
from onnxpar.graph.pipeline_places import Places
from onnxpar.graph.plan import Plan
from onnxpar.resharding.routes import reachable

Wants = Mapping[int, Collection[Sharding]]
"""For each virtual stage that gets a value: the shardings in which its nodes read it."""


@dataclass(frozen=True)
class SentValue:
    """How a value goes to other stages.

    Attributes:
        sharding: The sharding in which it is sent.
        seconds: Seconds until all readers have it, beyond those of resharding it if nothing had to
            be sent.
    """

    sharding: Sharding
    seconds: float


def transfer(cost: CostModel, link: Link, made: Sharding, wants: Wants, itemsize: int) -> SentValue:
    """Returns the fastest way to send a value; in the sharding in which it was made, if equal.

    Args:
        cost: The cost model of a stage's mesh.
        link: The link between a device and its counterpart in another stage.
        made: The sharding in which the value was made.
        wants: Who reads it.
        itemsize: Bytes of an element.
    """

    def moving(sent: Sharding) -> float:
        one = link.latency + cost.elements(sent) * itemsize / link.bandwidth
        ends = sum(cost.reshard(sent, want, itemsize) for them in wants.values() for want in them)
        return cost.reshard(made, sent, itemsize) + len(wants) * one + ends

    found = [made]
    for want in (w for them in wants.values() for w in them if not w.partial):
        if want not in found and cost.elements(want) <= cost.elements(made):
            found.append(want)
    found += _scattered(cost, made)
    ways = [sent for sent in found if _serves(sent, made, wants)]
    best = min(ways, key=moving)
    here = sum(cost.reshard(made, want, itemsize) for them in wants.values() for want in them)
    return SentValue(best, max(moving(best) - here, link.latency))


def with_transfers(
    places: Places,
    program: Program,
    plan: Plan,
    cost: CostModel,
    link: Link,
    states: Collection[str],
) -> Places:
    """Returns the places with the sharding of each value that is not sent as it was made.

    Args:
        places: The places.
        program: The program.
        plan: Its plan.
        cost: The cost model of a stage's mesh.
        link: The link between stages.
        states: Names of its inputs that are buffers of the runtime.
    """
    sent = {}
    for value, wants in _crossing(places, program, plan, states):
        maker, dtype = value.producer(), value.dtype
        assert maker is not None and dtype is not None
        name = value.name or ""
        made = plan.resharded.get(name)
        if made is None:
            made = plan.nodes[maker.name or ""].outputs[maker.outputs.index(value)]
        if not _serves(made, made, wants):
            # Some reader wants partial sums, which only an earlier version of the value has.
            continue
        best = transfer(cost, link, made, wants, int(dtype.itemsize)).sharding
        if best != made:
            sent[name] = best
    return replace(places, sent=sent)


def _crossing(
    places: Places, program: Program, plan: Plan, states: Collection[str]
) -> Iterator[tuple[ir.Value, Wants]]:
    """Yields the values that another stage reads and that depend on data, with their readers."""
    data = {v for v in program.graph.inputs if v.name not in states}
    for node in program.graph:
        if data.isdisjoint(read_by(node)):
            # Another stage computes it again.
            continue
        data.update(node.outputs)
        home = places.virtual_stage[places.nodes[node.name or ""]]
        for value in node.outputs:
            wants: dict[int, dict[Sharding, None]] = {}
            for use in value.uses():
                reader = use.node.name or ""
                # A body reads the value as it was made.
                if reader not in places.nodes or reader not in plan.nodes:
                    break
                virtual = places.virtual_stage[places.nodes[reader]]
                if not places.is_sent(home, virtual):
                    continue
                inputs = plan.nodes[reader].inputs
                want = inputs[use.idx] if use.idx < len(inputs) else None
                if want is None:
                    break
                wants.setdefault(virtual, {})[want] = None
            else:
                if wants and value.dtype is not None:
                    yield value, wants


def _scattered(cost: CostModel, made: Sharding) -> Iterator[Sharding]:
    """Yields a sharding with one dim sharded over all atoms over which a value is not sharded."""
    held = {atom for dim in made.dims for part in dim for atom in part.atoms}
    spare = tuple(atom for atom in range(len(cost.mesh.atoms)) if atom not in held)
    if not spare:
        return
    for axis, dim in enumerate(made.dims):
        if len(dim) != 1:
            continue
        part = Component(dim[0].size, (*dim[0].atoms, *spare))
        if cost.is_even([part]):
            yield Sharding((*made.dims[:axis], (part,), *made.dims[axis + 1 :]))


def _serves(sent: Sharding, made: Sharding, wants: Wants) -> bool:
    """Whether all readers can have a value that is sent in a sharding."""
    ends = (want for them in wants.values() for want in them)
    return reachable(made, sent) and all(reachable(sent, want) for want in ends)

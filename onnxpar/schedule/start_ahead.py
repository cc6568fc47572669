"""Starts the reductions of gradients while the backward pass still computes.

A gradient leaves the training program partial, and the first nodes of the optimizer's program
reduce it (`onnxpar.stages.partition_training`). Here the training program gets nodes `StartAhead`,
each behind the last gradient of a bucket: they start these reductions in the background, in the
memory that both programs share. The optimizer's program stays as it is. Where its node finds that
its operand was started ahead, it takes the result, else it communicates itself: between ranks that
share memory, where a processor would move the data. Of several micro-batches the last one starts
them, when the gradients of all are added up (`onnxpar.schedule.accumulate`).

Buckets as in PyTorch's DistributedDataParallel (Li et al., VLDB 2020), but nothing is copied into
one buffer: a bucket is a list of tensors.
"""

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxpar.core.machine import Machine
from onnxpar.cost.timeline import buckets
from onnxpar.graph.body_captures import read_by
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import START_AHEAD, Collective
from onnxpar.graph.metadata_keys import BYTES, OVER, VALUE
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.schedule.accumulate import Gradient, added_up, gradients_of, put_behind
from onnxpar.schedule.group import NEXT
from onnxpar.schedule.tokens import PEERS

AHEAD = "ahead"
"""Key in the `meta` of the nodes that this module writes."""
_IN_PLACE = "AllReduce"
_REDUCTIONS = (_IN_PLACE, "ReduceScatter")


@dataclass(frozen=True)
class _Reduced:
    """A gradient whose reduction can start ahead.

    Attributes:
        added: The gradient, which the training program adds up.
        reduction: The node of the optimizer's program that reduces it.
    """

    added: Gradient
    reduction: ir.Node


def start_ahead(
    training: PartitionedModel,
    optimizer: PartitionedModel,
    machine: Machine,
    shared: Collection[str] = (),
) -> None:
    """Lets a program start reductions of the optimizer's program.

    The nodes of the training program are changed in place. In the second program only the
    description of its collectives changes (`Collective.started_in`).

    Args:
        training: Forward and backward of a micro-batch, or a part of it; it reads the sums of its
            gradients (`onnxpar.schedule.accumulate`).
        optimizer: The optimizer's program.
        machine: Its links decide how large a bucket is.
        shared: Buffers of gradients that other parts add to.
    """
    found = list(_gradients(training, optimizer, shared))
    builder, mesh = training.builder, training.plan.mesh
    nodes = list(builder.nodes)
    started: dict[str, str] = {}
    names = {o.local: training.states.outputs.get(o.name, o.name) for o in training.outputs}
    behind: dict[int, list[ir.Node]] = {}
    token: ir.Value | None = None
    filled = buckets(
        found,
        _kind,
        lambda g: g.added.bytes,
        lambda g: machine.link(mesh, g.reduction.meta["atoms"]),
    )
    for bucket in sorted(filled, key=lambda b: b[-1].added.position):
        first = bucket[0].reduction
        attributes = {
            name: attribute.value
            for name, attribute in first.attributes.items()
            if name not in PEERS
        }
        values, over = [g.added.value for g in bucket], first.metadata_props[OVER]
        adding, token = added_up(builder, [g.added for g in bucket], token)
        for position, added in adding.items():
            for node in added:
                node.meta[AHEAD] = True
            behind.setdefault(position, []).extend(added)
        builder.nodes = []
        (token,) = builder.ops(
            "StartAhead",
            [token, builder.system_input(START_AHEAD), *values],
            [(ir.DataType.UINT8, [1])],
            {"op": first.op_type, "values": NEXT.join(names[v] for v in values), **attributes},
            domain=DOMAIN,
            name=f"onnxpar.schedule/{first.op_type}.{over}({values[-1].name})/StartAhead",
            metadata={
                "input_names": str(["token", "run", *("X" for _ in values)]),
                VALUE: NEXT.join(v.name or "" for v in values),
                OVER: over,
                BYTES: str(sum(g.added.bytes for g in bucket)),
            },
        )
        made = builder.nodes[-1]
        made.meta.update({key: first.meta[key] for key in ("atoms", "pairs", "stages")})
        made.meta[AHEAD] = True
        position = bucket[-1].added.position
        behind.setdefault(position, []).append(made)
        last = f"the nodes of {training.program} after {nodes[position].name}"
        started |= {g.reduction.name or "": last for g in bucket}
    builder.nodes = put_behind(nodes, behind)
    later = optimizer.builder
    later.collectives = [
        replace(c, started_in=training.program, behind=started[c.node]) if c.node in started else c
        for c in later.collectives
    ]


def _gradients(
    training: PartitionedModel, optimizer: PartitionedModel, shared: Collection[str]
) -> Iterator[_Reduced]:
    read = {value for node in training.builder.nodes for value in read_by(node)}
    reductions = _reductions(optimizer)
    state = {o.local: training.states.outputs.get(o.name, "") for o in training.outputs}
    for gradient in gradients_of(training):
        value = gradient.value
        found = None if state[value] in shared else reductions.get(state[value])
        if found is None or gradient.position < 0:
            continue
        collective, node = found
        if collective.op == _IN_PLACE and value in read:
            # The sum replaces the gradient, which other nodes may not have read by then.
            continue
        yield _Reduced(gradient, node)


def _reductions(optimizer: PartitionedModel) -> dict[str, tuple[Collective, ir.Node]]:
    """Returns the collectives that reduce a state, by the state, if nothing else reads it."""
    held = {i.local: i.name for i in optimizer.inputs if i.name in optimizer.states.inputs}
    held |= {p.local: p.name for p in optimizer.parameters if p.fed}
    readers: dict[str, list[ir.Node]] = {}
    for node in optimizer.builder.nodes:
        for value in read_by(node):
            if value in held:
                readers.setdefault(held[value], []).append(node)
    known = {c.node: c for c in optimizer.builder.collectives}
    found = {}
    for state, nodes in readers.items():
        collective = known.get(nodes[0].name or "")
        if (
            collective
            and len(nodes) == 1
            and collective.op in _REDUCTIONS
            and not collective.stages
        ):
            found[state] = collective, nodes[0]
    return found


def _kind(gradient: _Reduced) -> Hashable:
    """What the gradients of one bucket have in common."""
    node = gradient.reduction
    attributes = str(sorted((n, str(a.value)) for n, a in node.attributes.items()))
    return node.op_type, node.meta["atoms"], attributes, gradient.added.value.dtype

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
from math import prod

import onnx_ir as ir

from onnxpar.core.machine import Machine
from onnxpar.cost.timeline import buckets
from onnxpar.graph.body_captures import read_by
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import START_AHEAD, Collective
from onnxpar.graph.metadata_keys import BYTES, OVER, VALUE
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.schedule.accumulate import accumulate, sums_of
from onnxpar.schedule.group import NEXT
from onnxpar.schedule.tokens import PEERS

AHEAD = "ahead"
"""Key in the `meta` of the nodes that this module writes."""
_IN_PLACE = "AllReduce"
_REDUCTIONS = (_IN_PLACE, "ReduceScatter")


@dataclass(frozen=True)
class _Gradient:
    """A gradient whose reduction can start ahead.

    Attributes:
        value: The output of the training program.
        position: The index of the node that computes it.
        reduction: The node of the optimizer's program that reduces it.
        bytes: Its local size.
    """

    value: ir.Value
    position: int
    reduction: ir.Node
    bytes: int


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
    gradients = _gradients(training, optimizer, shared)
    found = sorted(gradients, key=lambda g: g.position)
    builder, mesh, sums = training.builder, training.plan.mesh, sums_of(training)
    nodes = list(builder.nodes)
    started: dict[str, str] = {}
    names = {o.local: training.states.outputs.get(o.name, o.name) for o in training.outputs}
    behind: dict[int, list[ir.Node]] = {}
    token = builder.const([0], ir.DataType.UINT8)
    filled = buckets(
        found, _kind, lambda g: g.bytes, lambda g: machine.link(mesh, g.reduction.meta["atoms"])
    )
    for bucket in sorted(filled, key=lambda b: b[-1].position):
        first = bucket[0].reduction
        attributes = {
            name: attribute.value
            for name, attribute in first.attributes.items()
            if name not in PEERS
        }
        values, over = [g.value for g in bucket], first.metadata_props[OVER]
        builder.nodes = []
        token = accumulate(builder, token, [(v, sums[v]) for v in values])
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
                BYTES: str(sum(g.bytes for g in bucket)),
            },
        )
        added, made = builder.nodes
        made.meta.update({key: first.meta[key] for key in ("atoms", "pairs", "stages")})
        added.meta[AHEAD] = made.meta[AHEAD] = True
        behind.setdefault(bucket[-1].position, []).extend([added, made])
        last = f"the nodes of {training.program} after {nodes[bucket[-1].position].name}"
        started |= {g.reduction.name or "": last for g in bucket}
    builder.nodes = [
        node for index, own in enumerate(nodes) for node in (own, *behind.get(index, ()))
    ]
    later = optimizer.builder
    later.collectives = [
        replace(c, started_in=training.program, behind=started[c.node]) if c.node in started else c
        for c in later.collectives
    ]


def _gradients(
    training: PartitionedModel, optimizer: PartitionedModel, shared: Collection[str]
) -> Iterator[_Gradient]:
    positions = {
        value: index for index, node in enumerate(training.builder.nodes) for value in node.outputs
    }
    read = {value for node in training.builder.nodes for value in read_by(node)}
    reductions = _reductions(optimizer)
    for output in training.outputs:
        state = training.states.outputs.get(output.name, "")
        found = None if state in shared else reductions.get(state)
        position, dtype = positions.get(output.local), output.local.dtype
        if found is None or position is None or dtype is None:
            continue
        collective, node = found
        if collective.op == _IN_PLACE and output.local in read:
            # The sum replaces the gradient, which other nodes may not have read by then.
            continue
        shape = output.sharding.local_shape(training.plan.mesh)
        size = prod(int(dim) for dim in shape) * int(dtype.itemsize)
        yield _Gradient(output.local, position, node, size)


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


def _kind(gradient: _Gradient) -> Hashable:
    """What the gradients of one bucket have in common."""
    node = gradient.reduction
    attributes = str(sorted((n, str(a.value)) for n, a in node.attributes.items()))
    return node.op_type, node.meta["atoms"], attributes, gradient.value.dtype

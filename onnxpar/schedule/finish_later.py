"""Gathers updated parameters while the next forward pass computes.

At levels 1 and 2 of optimizer parallel, the optimizer's program gathers the parameters that the
next training program reads. Here the gathers become nodes `FinishLater`, which leave them running
in the memory of the parameters, and the training program gets a node `Finish` before the first
reader of each. The gathers run in the order of these readers, whatever the order of the updates. If
ranks share memory, `FinishLater` does what a Bucket does, and `Finish` does nothing.

This is what `overlap_param_gather` does in Megatron-LM's distributed optimizer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxpar.graph.body_captures import bodies_of, read_by, read_instead
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import FINISH_LATER
from onnxpar.graph.metadata_keys import OVER, VALUE
from onnxpar.partition.partitioned_model import PartitionedModel


@dataclass(frozen=True)
class _Read:
    """Where a training program reads a parameter first.

    Attributes:
        part: The number of the program.
        index: The index of the node.
        value: The parameter there.
    """

    part: int
    index: int
    value: ir.Value


def finish_later(optimizer: PartitionedModel, parts: Sequence[PartitionedModel]) -> None:
    """Lets training programs finish the gathers of the optimizer's program.

    The nodes of all programs are changed in place.

    Args:
        optimizer: The optimizer's program; `onnxpar.schedule.group` has made calls of its gathers.
        parts: The training program, or its parts on this stage, in the order in which they begin.
    """
    calls: dict[ir.Node, list[_Read]] = {}
    states = {o.local: optimizer.states.outputs.get(o.name, "") for o in optimizer.outputs}
    read = {value for node in optimizer.builder.nodes for value in read_by(node)}
    known = optimizer.builder.collectives
    gathers = {c.node for c in known if c.op == "AllGather" and not c.stages}
    for node in optimizer.builder.nodes:
        results = node.outputs[1:] if node.name in gathers else ()
        if not results or any(y in read or not states.get(y) for y in results):
            continue
        places = [list(_first_reads(states[y], parts)) for y in results]
        if all(places):
            calls[node] = [place for row in places for place in row]
    if not calls:
        return
    ordered = sorted(calls, key=lambda n: min((r.part, r.index) for r in calls[n]))
    for number, node in enumerate(calls):
        ends = {"first": not number, "last": number == len(calls) - 1}
        _leave(optimizer, node, {"order": ordered.index(node), **ends})
    _describe(optimizer, calls, parts)
    for number, part in enumerate(parts):
        own = [(r, node) for node, row in calls.items() for r in row if r.part == number]
        _finish(part, own)


def _first_reads(state: str, parts: Sequence[PartitionedModel]) -> Iterator[_Read]:
    """Yields the first reader of a parameter in each program; none if a reader must stay as it is.

    A body captures a value by its name, and an output is the state itself.
    """
    found = []
    for number, part in enumerate(parts):
        nodes = part.builder.nodes
        for value in (p.local for p in part.parameters if p.fed and p.name == state):
            readers = [index for index, node in enumerate(nodes) if value in read_by(node)]
            left = any(output.local is value for output in part.outputs)
            if left or any(bodies_of(nodes[index]) for index in readers):
                return
            if readers:
                found.append(_Read(number, readers[0], value))
    yield from found


def _leave(optimizer: PartitionedModel, node: ir.Node, attributes: dict[str, int]) -> None:
    """Turns a Bucket into a FinishLater; its tensors follow the token and the runtime's input."""
    tensors = node.inputs[1:]
    node.resize_inputs(len(node.inputs) + 1)
    node.op_type = "FinishLater"
    for index, value in enumerate([optimizer.builder.system_input(FINISH_LATER), *tensors], 1):
        node.replace_input_with(index, value)
    for name, number in attributes.items():
        node.attributes[name] = ir.AttrInt64(name, number)
    node.metadata_props["input_names"] = str(["token", "run", *("X" for _ in tensors)])


def _describe(
    optimizer: PartitionedModel,
    calls: dict[ir.Node, list[_Read]],
    parts: Sequence[PartitionedModel],
) -> None:
    """Says of each collective which program finishes it, and what is computed meanwhile."""
    known = {}
    for node, reads in calls.items():
        read = min(reads, key=lambda r: (r.part, r.index))
        part = parts[read.part]
        before = part.builder.nodes[read.index].name
        known[node.name] = part.program, f"the nodes of {part.program} before {before}"
    builder = optimizer.builder
    builder.collectives = [
        replace(c, finished_in=known[c.node][0], behind=known[c.node][1]) if c.node in known else c
        for c in builder.collectives
    ]


def _beside(nodes: Sequence[ir.Node], index: int, made: dict[ir.Value, int]) -> ir.Value | None:
    """Returns what is computed before a node, and that this node or what reads its result reads.

    onnxruntime would run a Finish at once that reads nothing but a state, and its reader too, if
    that only casts or transposes the parameter. Integers do not count: they may be in host memory,
    from which a GPU's program would copy them.

    Args:
        nodes: The nodes of a program.
        index: The index of the node.
        made: By value the index of the node that computes it.
    """
    results: set[ir.Value] = set()
    for node in nodes[index:]:
        if node is not nodes[index] and results.isdisjoint(node.inputs):
            continue
        others = [
            v
            for v in node.inputs
            if v is not None
            and made.get(v, index) < index
            and v.dtype is not None
            and v.dtype.is_floating_point()
        ]
        if others:
            return max(others, key=lambda v: made[v])
        results.update(node.outputs)
    return None


def _finish(part: PartitionedModel, reads: Sequence[tuple[_Read, ir.Node]]) -> None:
    """Puts a Finish, which says what it finishes, before the first reader of each parameter.

    Args:
        part: The program.
        reads: The first readers, each with the gather of its parameter.
    """
    builder = part.builder
    nodes = list(builder.nodes)
    made = {value: index for index, node in enumerate(nodes) for value in node.outputs}
    before: dict[int, list[ir.Node]] = {}
    for read, gather in reads:
        value, over = read.value, gather.metadata_props[OVER]
        after = _beside(nodes, read.index, made)
        builder.nodes = []
        (finished,) = builder.ops(
            "Finish",
            [value] if after is None else [value, after],
            [(value.dtype, builder.shapes[value])],
            domain=DOMAIN,
            name=f"onnxpar.schedule/AllGather.{over}({value.name})/Finish",
            metadata={
                "input_names": str(["X"] if after is None else ["X", "after"]),
                VALUE: value.name or "",
                OVER: over,
            },
        )
        before.setdefault(read.index, []).extend(builder.nodes)
        for node in nodes:
            read_instead(node, value, finished)
    builder.nodes = [
        node for index, own in enumerate(nodes) for node in (*before.get(index, ()), own)
    ]

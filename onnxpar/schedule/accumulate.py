"""Adds up the gradients of a step's micro-batches, in the programs that compute them.

Nodes `Accumulate(token, mode, gradients, sums)` follow the nodes that compute gradients. A file
serves every step: its gradients are outputs, and its sums are inputs with memory of their own. In
the first micro-batch of several the nodes copy the gradients to the sums, then they add to the
sums, and in the last micro-batch they add the sums to the gradients. So the gradients are complete
inside the program of the last micro-batch, where their reductions can start
(`onnxpar.schedule.start_ahead`).

Our runtime needs only one buffer for both, see `onnxpar_runtime.added_up`. For its sake
the nodes come early and in groups: a gradient needs memory only until it has been added.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import ACCUMULATE, LocalBuilder
from onnxpar.partition.partitioned_model import GraphValue, PartitionedModel
from onnxpar.schedule.tokens import WAITS

_ADDS_UP = "adds_up"
_GROUP = 1 << 20
"""A node adds up so many bytes, or one gradient: nodes take time, and waiting gradients memory."""


def with_sums(program: PartitionedModel, sums: Mapping[str, str]) -> PartitionedModel:
    """Returns a program that also reads the sums of the gradients that it makes.

    Args:
        program: The program; its builder is changed.
        sums: For the buffer of each gradient, that of its sum.
    """
    states, inputs = program.states, list(program.inputs)
    read = {}
    for output in program.outputs:
        gradient = states.outputs.get(output.name, "")
        if gradient not in sums:
            continue
        name, like = sums[gradient], output.local
        assert like.dtype is not None
        shape = output.sharding.local_shape(program.plan.mesh)
        local = program.builder.declare(ir.Value(name=name), like.dtype, shape)
        inputs.append(GraphValue(name, local, output.sharding))
        read[name] = gradient
    names = states.inputs | read.keys()
    return replace(program, inputs=tuple(inputs), states=replace(states, inputs=names, sums=read))


@dataclass(frozen=True)
class Gradient:
    """A gradient that is added up.

    Attributes:
        value: The output of the program.
        total: The input with its sum.
        position: The index of the node behind which it is complete.
        bytes: Its local size.
        ready: The token of that node, if it completes the gradient in the background.
    """

    value: ir.Value
    total: ir.Value
    position: int
    bytes: int
    ready: ir.Value | None = None


def gradients_of(program: PartitionedModel) -> list[Gradient]:
    """Returns the gradients that a program makes and that no node adds up yet, in order."""
    builder, mesh = program.builder, program.plan.mesh
    done = {v for node in builder.nodes if _ADDS_UP in node.meta for v in node.inputs}
    position = {v: index for index, node in enumerate(builder.nodes) for v in node.outputs}
    ready: dict[ir.Value, ir.Value] = {}
    for index, node in enumerate(builder.nodes):
        value = node.inputs[0] if WAITS in node.meta else None
        if value is not None:
            position[value], ready[value] = index, node.outputs[1]
    states = program.states
    held = {states.sums[i.name]: i.local for i in program.inputs if i.name in states.sums}
    found = []
    for output in program.outputs:
        value, state = output.local, states.outputs.get(output.name, "")
        if state in held and value not in done:
            assert value.dtype is not None
            size = prod(map(int, output.sharding.local_shape(mesh))) * int(value.dtype.itemsize)
            # A gradient that no node makes is an input, which is there from the beginning.
            at = position.get(value, -1)
            found.append(Gradient(value, held[state], at, size, ready.get(value)))
    return sorted(found, key=lambda g: g.position)


def added_up(
    builder: LocalBuilder, gradients: Sequence[Gradient], before: ir.Value | None = None
) -> tuple[dict[int, list[ir.Node]], ir.Value]:
    """Returns nodes that add up gradients, by the position of the node that each follows.

    Args:
        builder: The builder; its nodes stay as they are.
        gradients: The gradients, at least one, in order.
        before: A token that is there before the last one is added.

    Returns:
        The nodes, and a token that is there when all are added.
    """
    nodes = builder.nodes
    behind: dict[int, list[ir.Node]] = {}
    groups = list(_groups(gradients))
    token: ir.Value | None = None
    for group in groups:
        builder.nodes = []
        ready = [token, before if group is groups[-1] else None, *(g.ready for g in group)]
        values = [g.value for g in group]
        (token,) = builder.ops(
            "Accumulate",
            [
                _behind(builder, [r for r in ready if r is not None], values[-1]),
                builder.system_input(ACCUMULATE),
                *values,
                *(g.total for g in group),
            ],
            [(ir.DataType.UINT8, [1])],
            domain=DOMAIN,
            name=f"onnxpar.schedule/Accumulate({values[-1].name})",
            metadata={
                "input_names": str(["token", "mode", *("G" for _ in group), *("S" for _ in group)])
            },
        )
        builder.nodes[-1].meta[_ADDS_UP] = True
        behind.setdefault(group[-1].position, []).extend(builder.nodes)
    builder.nodes = nodes
    assert token is not None
    return behind, token


def accumulate_rest(program: PartitionedModel) -> None:
    """Adds up the gradients of a program that no node adds up yet.

    A gradient that is reduced in the background is complete only behind the Wait. onnxruntime may
    run nodes in another order than the written one, so the node reads the token of the Wait.
    """
    builder = program.builder
    gradients = gradients_of(program)
    if gradients:
        behind, _ = added_up(builder, gradients)
        builder.nodes = put_behind(builder.nodes, behind)


def put_behind(nodes: Sequence[ir.Node], behind: Mapping[int, Sequence[ir.Node]]) -> list[ir.Node]:
    """Returns nodes with others, each group of which follows the node at a position; -1: none."""
    rest = (node for index, own in enumerate(nodes) for node in (own, *behind.get(index, ())))
    return [*behind.get(-1, ()), *rest]


def _groups(gradients: Sequence[Gradient]) -> Iterator[list[Gradient]]:
    """Gradients of one element type, until they have `_GROUP` bytes."""
    group: list[Gradient] = []
    for gradient in gradients:
        if group and group[-1].value.dtype != gradient.value.dtype:
            yield group
            group = []
        group.append(gradient)
        if sum(g.bytes for g in group) >= _GROUP:
            yield group
            group = []
    if group:
        yield group


def _behind(builder: LocalBuilder, tokens: Sequence[ir.Value], last: ir.Value) -> ir.Value:
    """Returns a token that is there when all of some tokens are."""
    if len(tokens) < 2:
        return tokens[0] if tokens else builder.const([0], ir.DataType.UINT8)
    (token,) = builder.ops(
        "Barrier",
        tokens,
        [(ir.DataType.UINT8, [1])],
        domain=DOMAIN,
        name=f"onnxpar.schedule/Accumulate({last.name})/Barrier",
    )
    return token

"""Adds up the gradients of a step's micro-batches, in the programs that compute them.

Each gradient has a second buffer, its sum. Nodes `Accumulate(token, mode, gradients, sums)` work in
the memory of both. In the first micro-batch of several they copy the gradients to the sums, then
they add to the sums, and in the last micro-batch they add the sums to the gradients. So the
gradients are complete inside the program of the last micro-batch, where their reductions can start
(`onnxpar.schedule.start_ahead`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import ACCUMULATE, LocalBuilder
from onnxpar.partition.partitioned_model import GraphValue, PartitionedModel
from onnxpar.schedule.tokens import WAITS

_ADDS_UP = "adds_up"


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


def sums_of(program: PartitionedModel) -> dict[ir.Value, ir.Value]:
    """Returns for each gradient that a program makes the input with its sum."""
    states = program.states
    held = {states.sums[i.name]: i.local for i in program.inputs if i.name in states.sums}
    made = {o.local: states.outputs.get(o.name, "") for o in program.outputs}
    return {local: held[gradient] for local, gradient in made.items() if gradient in held}


def accumulate(
    builder: LocalBuilder, token: ir.Value, pairs: Sequence[tuple[ir.Value, ir.Value]]
) -> ir.Value:
    """Appends a node that adds up gradients of one element type, and returns its token.

    Args:
        builder: The builder.
        token: The token of the node before.
        pairs: Each gradient and its sum.
    """
    gradients, sums = [g for g, _ in pairs], [s for _, s in pairs]
    (token,) = builder.ops(
        "Accumulate",
        [token, builder.system_input(ACCUMULATE), *gradients, *sums],
        [(ir.DataType.UINT8, [1])],
        domain=DOMAIN,
        name=f"onnxpar.schedule/Accumulate({gradients[-1].name})",
        metadata={
            "input_names": str(["token", "mode", *("G" for _ in pairs), *("S" for _ in pairs)])
        },
    )
    builder.nodes[-1].meta[_ADDS_UP] = True
    return token


def accumulate_rest(program: PartitionedModel) -> None:
    """Adds up, at the end of a program, the gradients that no node adds up yet.

    A gradient that is reduced in the background is complete only behind the Wait. onnxruntime may
    run nodes in another order than the written one, so the node reads the tokens of these Waits.
    """
    builder = program.builder
    done = {v for node in builder.nodes if _ADDS_UP in node.meta for v in node.inputs}
    waits = {n.inputs[0]: n.outputs[1] for n in builder.nodes if WAITS in n.meta}
    by_type: dict[ir.DataType | None, list[tuple[ir.Value, ir.Value]]] = {}
    for gradient, total in sums_of(program).items():
        if gradient not in done:
            by_type.setdefault(gradient.dtype, []).append((gradient, total))
    for pairs in by_type.values():
        tokens = [waits[gradient] for gradient, _ in pairs if gradient in waits]
        accumulate(builder, _behind(builder, tokens, pairs[-1][0]), pairs)


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

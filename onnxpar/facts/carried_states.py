"""The states of a forward program: outputs that are inputs of its next run, such as a cache."""

from collections.abc import Mapping
from dataclasses import dataclass

from onnxpar.facts.program import Program
from onnxpar.graph.state_names import grown_dims, state_pairs


@dataclass(frozen=True)
class CarriedState:
    """A state of a forward program.

    Attributes:
        input: Name of the input that takes it.
        output: Name of the output that replaces it in the next run.
        grows: The dim along which a run adds to it; None if it keeps its size.
        appends: Whether the kernel that makes the output may write into the input's buffer. It then
            adds only the new elements, behind those of each sequence, if the input is long enough
            for both.
    """

    input: str
    output: str
    grows: int | None = None
    appends: bool = False


def carried_states(
    program: Program, declared: Mapping[str, str] | None = None
) -> tuple[CarriedState, ...]:
    """Returns the states of a program, in the order of its inputs.

    Args:
        program: The program.
        declared: States that the user names, output by input.

    Raises:
        ModelError: As `onnxpar.graph.state_names.state_pairs`.
    """
    pairs = state_pairs(program.graph, declared)
    grows = grown_dims(program.graph, pairs)
    outputs = {value.name or "": value for value in program.graph.outputs}
    found = []
    for name, output in pairs.items():
        node, appends = outputs[output].producer(), False
        definition = None if node is None else program.rules.ops.get(node.name or "")
        if node is not None and definition is not None:
            appends = any(
                node.outputs[result].name == output
                and (value := node.inputs[operand]) is not None
                and value.name == name
                for operand, result in definition.memory.appends
                if operand < len(node.inputs) and result < len(node.outputs)
            )
        found.append(CarriedState(name, output, grows.get(name), appends))
    return tuple(found)

"""The inputs of a decoder that its encoder supplies: keys, values, and the mask of what it read."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.name_patterns import nearest
from onnxpar.graph.state_names import alike, key_of_input, keys_of_output, type_text

_PREFIX = "encoder_"


@dataclass(frozen=True)
class SuppliedInput:
    """An input that takes its value from another program of the directory, which runs before.

    Attributes:
        input: Name of the input.
        source: Name of the other program.
        value: Name of its output, or of its input if `given`.
        given: Whether both programs take the same input.
    """

    input: str
    source: str
    value: str
    given: bool = False


def supplied_inputs(
    decoder: ir.Graph,
    encoder: ir.Graph,
    source: str,
    states: Collection[str],
    declared: Mapping[str, str] | None = None,
) -> tuple[SuppliedInput, ...]:
    """Returns the inputs of a decoder that an encoder supplies, in the decoder's order.

    An input and an output are paired if they have the same name; if their names differ as those of
    a state do, such as `past_key_values.0.encoder.key` and `present.0.encoder.key`. The input
    `encoder_attention_mask` is paired with the encoder's input `attention_mask`.

    Args:
        decoder: The decoder.
        encoder: The encoder.
        source: Name of the encoder's program.
        states: Inputs of the decoder that are its own states.
        declared: Outputs of the encoder that are known, by input of the decoder.

    Raises:
        ModelError: A declared output does not exist or has another type, or there is no such input.
    """
    outputs = {value.name or "": value for value in encoder.outputs}
    given = {value.name or "": value for value in encoder.inputs}
    by_key = {key: name for name in reversed(outputs) for key in keys_of_output(name)}
    found = []
    for value in decoder.inputs:
        name = value.name or ""
        if name in states:
            continue
        output = (declared or {}).get(name)
        if output is not None and output not in outputs:
            raise ModelError(
                f"input {name!r} of the decoder: expected the output {output!r} of the encoder"
                f"{nearest(output, outputs)}, got a model without it"
            )
        output = output or (name if name in outputs else by_key.get(key_of_input(name)))
        taken = name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else ""
        if output is not None:
            if not alike(value, outputs[output]):
                raise ModelError(
                    f"input {name!r} of the decoder: expected the type {type_text(value)} of the "
                    f"input, got {type_text(outputs[output])} of the encoder's output {output!r}"
                )
            found.append(SuppliedInput(name, source, output))
        elif taken in given and alike(value, given[taken]):
            found.append(SuppliedInput(name, source, taken, given=True))
    if not any(not pair.given for pair in found):
        inputs = [value.name for value in decoder.inputs if value.name not in states]
        raise ModelError(
            "encoder and decoder: expected an output of the encoder that is an input of the "
            f"decoder, such as present.0.encoder.key and past_key_values.0.encoder.key, got the "
            f"outputs {list(outputs)} and the inputs {inputs}"
        )
    return tuple(found)

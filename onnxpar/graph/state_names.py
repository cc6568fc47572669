"""Which outputs of a model are inputs of its next run, by their names.

A decoder takes the keys and values of earlier tokens and returns them with those of the new ones.
Exporters name the two alike but for a word: `past_key_values.0.key` and `present.0.key` (optimum,
onnxruntime-genai), `past_0` and `present_0`, `past_conv.0` and `present_conv.0`, `cache_k_0` and
`new_cache_k_0` or `cache_k_0_out` (what users of `torch.onnx.export` write).
"""

import re
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.name_patterns import nearest

_PAST = re.compile(r"past(_key_values?)?")
_PRESENT = re.compile(r"present(_key_values?)?")
_KEPT = {"past", "cache", "state", "kv"}
_NEW = {"present", "new", "next", "updated", "out", "output"}


def state_pairs(graph: ir.Graph, declared: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the states of a forward program: for each input the output that replaces it.

    Args:
        graph: The graph of the model.
        declared: States that the user names, output by input; their inputs and outputs are not
            looked for by name.

    Raises:
        ModelError: A declared input or output does not exist or is declared twice, or the two
            differ in element type or number of dims.
    """
    inputs = {value.name or "": value for value in graph.inputs}
    outputs = {value.name or "": value for value in graph.outputs}
    found = dict(declared or {})
    _check(found, inputs, outputs)
    by_key = {
        key: name
        for name in reversed(outputs)
        if name not in found.values()
        for key in keys_of_output(name)
    }
    for name, value in inputs.items():
        output = by_key.get(key_of_input(name))
        if name not in found and output is not None and alike(value, outputs[output]):
            found[name] = output
    return {name: found[name] for name in inputs if name in found}


def grown_dims(graph: ir.Graph, states: Mapping[str, str]) -> dict[str, int]:
    """Returns, by input, the dim along which a state grows; states of one size are not in it.

    It is the only symbolic dim whose size the output does not have in the same place.
    """
    inputs = {value.name or "": value for value in graph.inputs}
    outputs = {value.name or "": value for value in graph.outputs}
    found = {}
    for name, output in states.items():
        before, after = inputs[name].shape, outputs[output].shape
        if before is None:
            continue
        dims = [
            dim
            for dim, size in enumerate(before)
            if not isinstance(size, int)
            and (after is None or dim >= len(after) or size != after[dim] or size.value is None)
        ]
        if len(dims) > 1:
            # The sizes of the output say too little: batch is the first dim, and does not grow.
            dims = [dim for dim in dims if dim > 0]
        if len(dims) == 1:
            found[name] = dims[0]
    return found


def _check(
    declared: Mapping[str, str], inputs: Mapping[str, ir.Value], outputs: Mapping[str, ir.Value]
) -> None:
    taken: dict[str, str] = {}
    for name, output in declared.items():
        what = f"state {name}={output}"
        if name not in inputs:
            raise ModelError(f"{what}: the model has no input {name!r}{nearest(name, inputs)}")
        if output not in outputs:
            raise ModelError(
                f"{what}: the model has no output {output!r}{nearest(output, outputs)}"
            )
        if output in taken:
            raise ModelError(
                f"{what}: expected an output of its own, but {output!r} is the state of "
                f"{taken[output]!r}"
            )
        taken[output] = name
        if not alike(inputs[name], outputs[output]):
            raise ModelError(
                f"{what}: expected the type {type_text(inputs[name])} of the input, got "
                f"{type_text(outputs[output])}"
            )


def alike(one: ir.Value, other: ir.Value) -> bool:
    """Returns whether two values have one element type, and one number of dims if it is known."""
    known = one.shape is None or other.shape is None or len(one.shape) == len(other.shape)
    return one.dtype == other.dtype and known


def type_text(value: ir.Value) -> str:
    """Returns the type of a value, for messages."""
    dims = "" if value.shape is None else f" with {len(value.shape)} dims"
    return f"{value.dtype}{dims}"


def _tokens(name: str) -> list[str]:
    return re.split(r"[._/\-]+", name.lower())


def key_of_input(name: str) -> tuple[str, ...]:
    """Returns what the name of a state has besides words such as "past"; nothing for others."""
    text = _PAST.sub("past", name.lower())
    if not _KEPT.intersection(_tokens(text)):
        return ()
    return tuple(token for token in _tokens(text) if token != "past")


def keys_of_output(name: str) -> Iterator[tuple[str, ...]]:
    """Yields the key of the input of which an output may be the next value."""
    tokens = _tokens(_PRESENT.sub("present", name.lower()))
    rest = tuple(token for token in tokens if token not in _NEW and token != "past")
    if rest and len(rest) < len(tokens):
        yield rest

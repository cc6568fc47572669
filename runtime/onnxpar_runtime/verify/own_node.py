"""Computes one node of the undivided program alone, on given operands."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from onnxpar_runtime.collectives import World
from onnxpar_runtime.options import register_libraries
from onnxpar_runtime.tensors import to_host, to_ort
from onnxpar_runtime.wanted_operators import want_operators

Array = NDArray[Any]
_FILE = "own.onnx"
_SHAKES = 4
_SHAKE_ULPS = 8
_UNITS = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Units of rounding of types other than float32."""


class OwnNode:
    """A part of the undivided graph: the nodes that compute some values from others.

    Args:
        graph: The graph in its folder, with weights beside it.
        outputs: The values to compute.
        given: Names of values that are given; everything before them is left out.
        custom_ops: Further custom-op libraries.

    Attributes:
        inputs: Names of all values that it needs.

    Raises:
        Exception: onnxruntime cannot load the part.
    """

    def __init__(
        self,
        graph: Path,
        outputs: Sequence[str],
        given: Collection[str],
        custom_ops: Sequence[str | Path] = (),
    ) -> None:
        """Extracts the part and loads it."""
        self._outputs = list(outputs)
        model, self.inputs = _part(onnx.load(graph, load_external_data=False), outputs, given)
        # The weights are beside it.
        path = graph.parent / _FILE
        onnx.save(model, path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        want_operators(options, model)
        self._world = World.threads(1)
        self._world.rank(0).register(options)
        register_libraries(options, custom_ops)
        self._session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the values by name."""
        binding = self._session.io_binding()
        # A binding does not keep the memory of an array alive.
        names = [value.name for value in self._session.get_inputs()]
        given = {name: to_ort(np.ascontiguousarray(feeds[name])) for name in names}
        for name, value in given.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        found = zip(self._outputs, binding.get_outputs(), strict=True)
        return {name: to_host(value) for name, value in found}

    def moves(self, feeds: Mapping[str, Array], found: Mapping[str, Array]) -> dict[str, float]:
        """Returns by how much each value changes if its operands are changed by rounding.

        Args:
            feeds: The operands.
            found: The values at these operands.
        """
        rng = np.random.default_rng(0)
        moved = dict.fromkeys(found, 0.0)
        for _ in range(_SHAKES):
            shaken = self.run({name: _shaken(array, rng) for name, array in feeds.items()})
            for name, array in shaken.items():
                if array.shape == found[name].shape and array.dtype.kind not in "iub":
                    apart = np.abs(array.astype(np.float64) - found[name].astype(np.float64))
                    moved[name] = max(moved[name], float(np.nan_to_num(apart).max(initial=0.0)))
        return moved

    def close(self) -> None:
        """Frees the session."""
        self._session = None
        self._world.close()


def _shaken(array: Array, rng: np.random.Generator) -> Array:
    """Returns an array whose elements are moved by some units of rounding; integers as they are."""
    if array.dtype.kind in "iub?OSU":
        return array
    factor = 1 + _SHAKE_ULPS * _UNITS.get(str(array.dtype), 2.0**-23) * rng.standard_normal(
        array.shape
    )
    return np.asarray(array * factor).astype(array.dtype)


def _part(
    model: onnx.ModelProto, outputs: Sequence[str], given: Collection[str]
) -> tuple[onnx.ModelProto, list[str]]:
    """Returns the part of a model that computes values from given ones, and what it needs."""
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output if name}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    known = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
    waiting, seen, kept, inputs, used = list(outputs), set(outputs), set(), [], []
    while waiting:
        name = waiting.pop()
        if name in constants:
            used.append(constants[name])
        elif name not in makers or (name in given and name not in outputs):
            inputs.append(name)
        else:
            node = makers[name]
            kept.add(id(node))
            for read in _reads(node):
                if read not in seen:
                    seen.add(read)
                    waiting.append(read)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:], made.graph.initializer[:], made.graph.input[:], made.graph.output[:]
    del made.graph.value_info[:]
    made.graph.node.extend(node for node in graph.node if id(node) in kept)
    made.graph.initializer.extend(used)
    for target, names in ((made.graph.input, inputs), (made.graph.output, outputs)):
        for name in names:
            value = onnx.ValueInfoProto(name=name)
            if name in known:
                value.CopyFrom(known[name])
            target.append(value)
    return made, inputs


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Returns the values that a node reads, also those that its bodies capture."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            own = {name for inner in body.node for name in inner.output}
            own |= {value.name for value in body.input} | {t.name for t in body.initializer}
            for inner in body.node:
                yield from (name for name in _reads(inner) if name not in own)
            yield from (value.name for value in body.output if value.name not in own)

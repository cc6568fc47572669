"""Runs one operator of the domain `onnxpar` alone, with or without its registered kernel."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from onnxpar_runtime.library import custom_op_library
from onnxpar_runtime.wanted_operators import want_operators

Array = np.ndarray
Attribute = str | int | float | list[int]

GATHERS = [
    ((5, 3), (4,), 0),
    ((1000, 65), (7, 50), 0),
    ((2, 70000, 3), (11,), 1),
    ((3, 4, 5), (2, 2), -1),
    ((6,), (), 0),
    ((0, 3), (0,), 0),
    ((4, 0), (2,), 0),
    ((4, 2), (0,), 0),
    ((3, 40), (2500,), 0),
]
"""Shape of the data, shape of the indices, and axis."""


def session(model: onnx.ModelProto, threads: int = 1) -> onnxruntime.InferenceSession:
    """Returns a CPU session of the model with the operator library registered."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    want_operators(options, model)
    options.register_custom_ops_library(str(custom_op_library()))
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def model_of(
    op: str,
    inputs: Sequence[Array | None],
    outputs: Sequence[bool],
    attributes: Mapping[str, Attribute],
    narrow: int | None = None,
) -> onnx.ModelProto:
    """Returns a model of one node; float inputs are cast to `narrow` and outputs back to float32.

    Input i is named `i<i>`, and given dims without sizes; output o is `o<o>`, left out where
    `outputs[o]` is false.
    """
    nodes, names, graph_inputs = [], [], []
    for i, array in enumerate(inputs):
        if array is None:
            names.append("")
            continue
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        dims = [f"d{i}_{k}" for k in range(array.ndim)]
        graph_inputs.append(helper.make_tensor_value_info(f"i{i}", kind, dims))
        names.append(f"i{i}")
        if narrow is not None and array.dtype == np.float32 and array.ndim:
            nodes.append(helper.make_node("Cast", [f"i{i}"], [f"n{i}"], to=narrow))
            names[-1] = f"n{i}"
    results = [f"o{o}" if wanted else "" for o, wanted in enumerate(outputs)]
    made = [f"r{o}" if name else "" for o, name in enumerate(results)]
    nodes.append(helper.make_node(op, names, made, name="node", domain="onnxpar", **attributes))
    for raw, name in zip(made, results, strict=True):
        if not name:
            continue
        if narrow is None:
            nodes.append(helper.make_node("Identity", [raw], [name]))
        else:
            nodes.append(helper.make_node("Cast", [raw], [name], to=onnx.TensorProto.FLOAT))
    infos = [onnx.ValueInfoProto(name=name) for name in results if name]
    graph = helper.make_graph(nodes, "g", graph_inputs, infos)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("onnxpar", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


class Run(Protocol):
    """Runs a node over `inputs` and returns its outputs."""

    def __call__(
        self,
        op: str,
        *inputs: Array | None,
        outputs: Sequence[bool] = (True,),
        narrow: int | None = None,
        **attributes: Attribute,
    ) -> list[Array]:
        """`outputs[o]` says whether the node has output o."""
        ...


def log_softmax(x: Array, axis: int) -> Array:
    """Returns the logarithm of the softmax of `x` over `axis`."""
    shifted = x - x.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))

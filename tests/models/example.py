"""Running an example model and reading its weights."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx_shape_inference import infer_symbolic_shapes

Array = npt.NDArray[np.generic]


def run(model: ir.Model, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of onnxruntime on the CPU, by name; the ONNX checker runs first."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def weights(model: ir.Model) -> dict[str, npt.NDArray[np.float64]]:
    """Every initializer, widened to float64 so that the reference adds no rounding of its own."""
    return {
        name: value.const_value.numpy().astype(np.float64)
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }


def unknown_shapes(model: ir.Model) -> list[str]:
    """The values whose inferred shape is missing or says more than `batch` and `seq` do."""
    inferred = infer_symbolic_shapes(ir.from_proto(ir.to_proto(model)))
    return [
        str(value.name)
        for node in inferred.graph
        for value in node.outputs
        if value.shape is None
        or value.dtype is None
        or value.shape.has_unknown_dim()
        or not value.shape.free_symbols() <= {"batch", "seq"}
    ]

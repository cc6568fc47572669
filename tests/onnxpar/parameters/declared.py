"""Models in text, whose declared values are initializers."""

import numpy as np
import onnx.parser
import onnx_ir as ir
from numpy.typing import ArrayLike

HEAD = '<ir_version: 10, opset_import: ["": 18]>\n'


def read(text: str, **contents: ArrayLike) -> ir.Model:
    """The model as a file would have it.

    What the text declares between `<` and `>` is an initializer, drawn where it is not given.
    """
    proto = onnx.parser.parse_model(HEAD + text)
    rng = np.random.default_rng(0)
    for info in proto.graph.value_info:
        kind = info.type.tensor_type
        data = contents.get(info.name, rng.standard_normal([d.dim_value for d in kind.shape.dim]))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        tensor = onnx.numpy_helper.from_array(np.asarray(data).astype(dtype), info.name)
        proto.graph.initializer.append(tensor)
    del proto.graph.value_info[:]
    return ir.serde.deserialize_model(proto)

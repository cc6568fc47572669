"""Element types: manifest name, numpy dtype, ONNX code, and the conversions that lose nothing."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class ElementType:
    """An element type: ONNX's code (`TensorProto.DataType`) and numpy's dtype."""

    code: int
    dtype: np.dtype[Any]


DTYPES: dict[str, ElementType] = {
    "float32": ElementType(1, np.dtype(np.float32)),
    "uint8": ElementType(2, np.dtype(np.uint8)),
    "int8": ElementType(3, np.dtype(np.int8)),
    "uint16": ElementType(4, np.dtype(np.uint16)),
    "int16": ElementType(5, np.dtype(np.int16)),
    "int32": ElementType(6, np.dtype(np.int32)),
    "int64": ElementType(7, np.dtype(np.int64)),
    "bool": ElementType(9, np.dtype(np.bool_)),
    "float16": ElementType(10, np.dtype(np.float16)),
    "float64": ElementType(11, np.dtype(np.float64)),
    "uint32": ElementType(12, np.dtype(np.uint32)),
    "uint64": ElementType(13, np.dtype(np.uint64)),
    "bfloat16": ElementType(16, np.dtype(ml_dtypes.bfloat16)),
}

_CODES = {element.dtype: element.code for element in DTYPES.values()}


def onnx_code(dtype: np.dtype[Any]) -> int:
    """Returns ONNX's code (`TensorProto.DataType`) of a numpy dtype; KeyError if it has none."""
    return _CODES[dtype]


def lossless(array: Array, dtype: np.dtype[Any]) -> Array | None:
    """Returns `array` as `dtype` if that keeps every value of the array's type, else None.

    Integers widen to integers and floats to floats; there are no other conversions. numpy's files
    return bfloat16 as two opaque bytes, which are read as the dtype that is asked for.
    """
    if array.dtype == dtype:
        return array
    opaque = array.dtype.kind == "V" and array.dtype.names is None and array.dtype.isbuiltin == 0
    if opaque and dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)
    integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    floats = array.dtype.kind == "f" and dtype.kind == "f"
    if (integers or floats) and np.can_cast(array.dtype, dtype, "safe"):
        return array.astype(dtype)
    return None

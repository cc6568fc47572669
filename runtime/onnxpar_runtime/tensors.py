"""Arrays to onnxruntime's values and back, bfloat16 included, which it does not give to numpy."""

import ctypes
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from onnxpar_runtime.dtypes import DTYPES

Array = NDArray[Any]
_BFLOAT16 = DTYPES["bfloat16"]


def to_ort(array: Array, device: str = "cpu", index: int = 0) -> Any:
    """Returns an OrtValue of a C-contiguous array.

    On the CPU it lies on the array's own memory, which it keeps alive. On another device it is a
    copy; bfloat16 stays on the CPU, and onnxruntime copies it when it runs.
    """
    make = onnxruntime.OrtValue
    if array.dtype == _BFLOAT16.dtype:
        return make.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16.code)
    return make.ortvalue_from_numpy(array, device, index)


def host_view(value: Any) -> Array:
    """Returns an OrtValue in host memory: its own where it lies there, else a copy.

    It must not outlive the value.
    """
    if value.device_name() != "cpu" or value.data_type() == "tensor(bfloat16)":
        return to_host(value)
    array: Array = value.numpy()
    return array


def to_host(value: Any) -> Array:
    """Returns a copy of an OrtValue in host memory, of its own."""
    if value.data_type() != "tensor(bfloat16)":
        return np.array(value.numpy())
    shape = tuple(value.shape())
    if value.device_name() != "cpu":
        host = to_ort(np.empty(shape, _BFLOAT16.dtype))
        onnxruntime.copy_tensors([value], [host])
        value = host
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(bytearray(raw), _BFLOAT16.dtype).reshape(shape)

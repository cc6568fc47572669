"""Arrays to onnxruntime's values and back, with bfloat16, which it does not convert to numpy."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES, onnx_code
from onnxpar_runtime.cuda import copy_in, copy_out

Array = NDArray[Any]
_BFLOAT16 = DTYPES["bfloat16"]
_BY_CODE = {element.code: element.dtype for element in DTYPES.values()}


def to_ort(array: Array, device: str = "cpu", index: int = 0) -> Any:
    """Returns an OrtValue of a C-contiguous array.

    On the CPU it shares the array's memory and keeps it alive. On a GPU it is a copy.
    """
    make = onnxruntime.OrtValue
    if device != "cpu":
        value = empty(array.shape, array.dtype, device, index)
        copy_in(value.data_ptr(), array)
        return value
    if array.dtype == _BFLOAT16.dtype:
        return make.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16.code)
    return make.ortvalue_from_numpy(array)


def bind_input(binding: Any, name: str, array: Array) -> None:
    """Binds an input to a C-contiguous array in host memory, which onnxruntime reads itself.

    The binding keeps the array alive.
    """
    if array.dtype == _BFLOAT16.dtype:
        binding.bind_ortvalue_input(name, to_ort(array))
    else:
        binding.bind_cpu_input(name, array)


def empty(shape: Sequence[int], dtype: np.dtype[Any], device: str, index: int) -> Any:
    """Returns an OrtValue on a device whose elements are not set."""
    make = onnxruntime.OrtValue.ortvalue_from_shape_and_type
    return make(shape, onnx_code(dtype), device, index)


def host_view(value: Any) -> Array:
    """Returns an OrtValue in host memory: a view if it is on the host, else a copy.

    A view must not outlive the value.
    """
    if value.device_name() != "cpu" or value.data_type() == "tensor(bfloat16)":
        return to_host(value)
    array: Array = value.numpy()
    return array


def to_host(value: Any) -> Array:
    """Returns a copy of an OrtValue in host memory.

    A copy from a GPU waits for the work that was enqueued before.
    """
    if value.device_name() != "cpu":
        array = np.empty(tuple(value.shape()), _BY_CODE[value.element_type()])
        copy_out(value.data_ptr(), array)
        return array
    if value.data_type() != "tensor(bfloat16)":
        return np.array(value.numpy())
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(bytearray(raw), _BFLOAT16.dtype).reshape(tuple(value.shape()))

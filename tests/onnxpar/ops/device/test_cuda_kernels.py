"""What is said of CUDA kernels, without onnxruntime; `tests/gpu` compares it with the provider."""

import numpy as np
import onnx_ir as ir
import pytest

from onnxpar.ops.device.cuda_kernels import has_kernel_in, type_name, why_no_kernel, why_on_host
from onnxpar.ops.precision import half_operands
from onnxpar.ops.table import REGISTRY
from onnxpar.ops.window.transposed import _even

FLOAT16, BFLOAT16 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16


@pytest.mark.parametrize(
    ("domain", "op_type", "opset", "inputs", "outputs", "expected"),
    [
        ("", "Add", 21, ["bfloat16", "bfloat16"], ["bfloat16"], None),
        ("ai.onnx", "Add", 21, ["float", "float"], ["float"], None),
        ("", "Concat", 21, ["int64"] * 5, ["int64"], None),
        ("", "Reshape", 21, ["bool", "int64"], [None], None),
        ("com.microsoft", "SkipLayerNormalization", 1, ["float", None, "float"], [], None),
        ("", "Greater", 21, ["bfloat16"] * 2, ["bool"], "T is bfloat16"),
        ("", "Pad", 21, ["int64", "int64"], ["int64"], "T is int64"),
        ("", "Unique", 21, ["float"], ["float"], "no kernel for it"),
        ("", "Frobnicate", 21, ["float"], ["float"], "no kernel for it"),
        ("nobody", "Add", 1, ["float", "float"], ["float"], "no kernel for it"),
        ("", "LayerNormalization", 16, ["float", "float"], ["float"], None),  # onnxruntime's own
        ("", "MaxPool", 21, ["float"], ["float"], None),
        ("", "MaxPool", 22, ["float"], ["float"], "no kernel for it"),  # newer than its kernels
        ("", "Swish", 24, ["float"], ["float"], None),  # onnxruntime expands it
        ("", "Celu", 21, ["float"], ["float"], "no kernel for it"),  # the CPU's kernel comes first
    ],
)
def test_kernels(
    domain: str,
    op_type: str,
    opset: int,
    inputs: list[str | None],
    outputs: list[str | None],
    expected: str | None,
) -> None:
    reason = why_no_kernel(domain, op_type, opset, inputs, outputs)
    assert reason is None if expected is None else reason is not None and expected in reason


@pytest.mark.parametrize(
    ("op_type", "attributes", "expected"),
    [
        ("ConvTranspose", {"pads": [1, 2, 1, 2]}, None),
        ("ConvTranspose", {"pads": [1, 2, 2, 1]}, "padding before and after"),
        ("ConvTranspose", {"auto_pad": "SAME_LOWER"}, "may differ"),
        ("LSTM", {"activations": ["Sigmoid", "Tanh", "Tanh"]}, None),
        ("LSTM", {"activations": ["Sigmoid", "Tanh", "Relu"]}, "activations sigmoid, tanh, relu"),
        ("LSTM", {"clip": 2.0}, "clip"),
        ("LSTM", {"input_forget": 1}, "input_forget"),
        ("GRU", {"linear_before_reset": 1}, None),
        ("GRU", {"linear_before_reset": 0}, "linear_before_reset"),
    ],
)
def test_attributes_that_the_provider_refuses(
    op_type: str, attributes: dict[str, object], expected: str | None
) -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node(op_type, [x, x, x], attributes)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    reason = why_on_host(node, 21, REGISTRY)
    assert reason is None if expected is None else reason is not None and expected in reason


def test_a_peephole_is_refused_and_operators_of_our_own_are_not() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    assert "peephole" in str(why_on_host(ir.node("LSTM", [x, x, x, *[None] * 4, x]), 21, REGISTRY))
    assert why_on_host(ir.node("Anything", [x], domain="onnxpar"), 1, REGISTRY) is None


def test_names_of_types() -> None:
    inner = ir.TensorType(ir.DataType.DOUBLE)
    assert [type_name(t) for t in (None, inner, ir.SequenceType(inner))] == [
        None,
        "double",
        "seq(double)",
    ]


@pytest.mark.parametrize(
    ("op_type", "opset", "dtype", "expected"),
    [
        ("MatMul", 18, FLOAT16, True),
        ("MatMul", 18, BFLOAT16, True),
        ("Conv", 21, FLOAT16, True),
        ("Conv", 21, BFLOAT16, False),  # ONNX has it since 22
        ("Conv", 22, BFLOAT16, True),
        ("Pad", 21, BFLOAT16, False),
        ("Reshape", 21, BFLOAT16, True),
        ("Where", 21, BFLOAT16, True),
        ("Celu", 21, FLOAT16, False),
    ],
)
def test_16_bits_where_the_device_has_a_kernel(
    op_type: str, opset: int, dtype: ir.DataType, expected: bool
) -> None:
    assert has_kernel_in(op_type, opset, dtype) is expected
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    assert (half_operands(ir.node(op_type, [x, x]), opset, dtype, REGISTRY) is not None) is expected


@pytest.mark.parametrize(
    ("op_type", "opset", "dtype", "expected"),
    [
        ("MaxPool", 22, FLOAT16, True),
        ("MaxPool", 22, BFLOAT16, True),
        ("MaxPool", 21, BFLOAT16, False),  # ONNX has it since 22
        ("Dropout", 22, BFLOAT16, True),
        ("Elu", 22, BFLOAT16, True),
    ],
)
def test_16_bits_where_there_is_another_form(
    op_type: str, opset: int, dtype: ir.DataType, expected: bool
) -> None:
    assert not has_kernel_in(op_type, opset, dtype)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    assert (half_operands(ir.node(op_type, [x]), opset, dtype, REGISTRY) is not None) is expected


def test_uneven_shards_become_even_padding() -> None:
    for stride in (1, 2, 3):
        for length in range(9, 14):
            indices = np.arange(length)
            for before in range(4):
                for after in range(-stride + 1, 5):
                    pad, more, start = _even(before, after, stride)
                    # What output padding gives back is beyond the end where nothing was sliced off.
                    assert 0 <= more < stride and pad >= 0
                    padded = np.concatenate([indices, np.full(stride, -1)])
                    left = padded[pad : length - pad + more]
                    size = length - before - after
                    wanted = padded[before : before + size]
                    got = left if start is None else left[start : start + size]
                    assert got.tolist() == wanted.tolist(), (stride, length, before, after)

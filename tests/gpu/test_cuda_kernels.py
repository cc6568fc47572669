"""The table of CUDA kernels, and what is said of nodes by it, against the provider itself."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser, shape_inference

from onnxpar.ops.device.cuda_kernels import table_version, why_on_host
from onnxpar.ops.operator import OpDef, written_only
from onnxpar.ops.table import REGISTRY

ROOT = Path(__file__).parents[2]
OPSET, NEWEST = 21, 26
CUDA = "CUDAExecutionProvider"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_kernels", ROOT / "tools/cuda_kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def same_version() -> None:
    if onnxruntime.__version__ != table_version():
        pytest.skip(f"the table is of {table_version()}, installed is {onnxruntime.__version__}")


@pytest.mark.usefixtures("same_version")
def test_the_table_is_the_providers(standin_cuda: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "cuda_kernels.py"), "--dump"],
        env=dict(standin_cuda),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    cuda_kernels = tool()
    assert cuda_kernels.TABLE.read_text() == cuda_kernels.text_of(json.loads(done.stdout))


NODES = [
    *(
        f"{t}[n, m] x, {t}[n, m] y -> z = Add(x, y)"
        for t in ("float", "double", "float16", "bfloat16", "int64", "int32")
    ),
    "float[n, m] x, int64[k] s -> z = Reshape(x, s)",
    "bfloat16[n, m] x, int64[k] s -> z = Expand(x, s)",
    "int64 a, int64 b, int64 c -> z = Range(a, b, c)",
    *(
        f"{t}[n, m] x, int64[k] a, int64[k] b, int64[k] c, int64[k] d -> z = Slice(x, a, b, c, d)"
        for t in ("float", "int64", "bfloat16", "bool")
    ),
    *(f"{t}[n, m] x, int64[k] p, {t} v -> z = Pad(x, p, v)" for t in ("float", "int64", "bool")),
    "int64[k] s -> z = ConstantOfShape(s)",
    "float[n, m] x, int64[k] r -> z = Tile(x, r)",
    "float[n, m] x, int64[1] k -> z, i = TopK(x, k)",
    "int64[n] i, int64 d, float[2] v -> z = OneHot(i, d, v)",
    "float[n, m] x, int64[2] s -> z, y = Split(x, s)",
    "float[n, 1] x, int64[1] a -> z = Squeeze(x, a)",
    "float[n, m] x, int64[1] a -> z = Unsqueeze(x, a)",
    "float[n, m] x, int64 a -> z = CumSum(x, a)",
    "float[n, m] x, int64 k -> z = Trilu(x, k)",
    "float[n, m] x, float a, float b -> z = Clip(x, a, b)",
    "float[a, b, n, m] x, float[k] r, float[4] s -> z = Resize(x, r, s)",
    "float[n, m] x, float r, bool t -> z, k = Dropout(x, r, t)",
    "float[n, m] x, int64[k] a -> z = ReduceSum(x, a)",
    "bfloat16[n, m] x, int64[k] a -> z = ReduceMax(x, a)",
    "float[n, m] x, int64[k] i -> z = Gather(x, i)",
    "float[n, m] x, int64[k, 2] i, float[k] u -> z = ScatterND(x, i, u)",
    "float[n, m] x, int64[k, m] i, float[k, m] u -> z = ScatterElements(x, i, u)",
    "float[b, s, c] x, float[b, u, s] y, int64[1] k, float[1] i, float[1] t"
    " -> z = NonMaxSuppression(x, y, k, i, t)",
    "float[n, m] x -> z = Shape(x)",
    "float[n, m] x -> z = Size(x)",
    "float[n, m] x -> z = NonZero(x)",
    "float[n] x -> z = Unique(x)",
    "float[n, m] x -> z = Hardmax(x)",
    "bfloat16[n, m] x, bfloat16[m, k] y -> z = MatMul(x, y)",
    "int64[n, m] x, int64[m, k] y -> z = MatMul(x, y)",
    "float[n, c, h, w] x, float[c, d, 3, 3] y -> z = ConvTranspose <pads = [1, 1, 1, 1]> (x, y)",
    "float[n, c, h, w] x, float[c, d, 3, 3] y -> z = ConvTranspose <pads = [1, 1, 0, 0]> (x, y)",
    "float[n, c, h, w] x, float[c, d, 3, 3] y"
    ' -> z = ConvTranspose <auto_pad = "SAME_UPPER"> (x, y)',
    "float[t, b, i] x, float[1, 32, i] w, float[1, 32, 8] r"
    " -> z = LSTM <hidden_size = 8> (x, w, r)",
    "float[t, b, i] x, float[1, 32, i] w, float[1, 32, 8] r"
    " -> z = LSTM <hidden_size = 8, clip = 3.0> (x, w, r)",
    "float[t, b, i] x, float[1, 32, i] w, float[1, 32, 8] r"
    " -> z = LSTM <hidden_size = 8, input_forget = 1> (x, w, r)",
    "float[t, b, i] x, float[1, 24, i] w, float[1, 24, 8] r"
    " -> z = GRU <hidden_size = 8, linear_before_reset = 1> (x, w, r)",
    "float[t, b, i] x, float[1, 24, i] w, float[1, 24, 8] r"
    " -> z = GRU <hidden_size = 8, linear_before_reset = 0> (x, w, r)",
    "float[t, b, i] x, float[1, 8, i] w, float[1, 8, 8] r"
    ' -> z = RNN <hidden_size = 8, activations = ["Relu"]> (x, w, r)',
    "float[n, m] x, float[n, m] s, float[m] g, float[m] b"
    " -> z = com.microsoft.SkipLayerNormalization(x, s, g, b)",
    "bfloat16[n, m] x, bfloat16[n, m] s, bfloat16[m] g, bfloat16[m] b"
    " -> z = com.microsoft.SkipLayerNormalization(x, s, g, b)",
]


# Of the newest opset that onnxruntime takes: what lost its kernels, what gained some, what
# onnxruntime expands.
NEWER = [
    *(
        f"{t}[n, c, h, w] x -> z = {op}(x)"
        for t in ("float", "float16", "bfloat16")
        for op in (
            "MaxPool <kernel_shape = [2, 2]>",
            "AveragePool <kernel_shape = [2, 2]>",
            *("Cos", "Dropout", "Elu", "GlobalAveragePool", "HardSigmoid", "HardSwish", "Selu"),
            *("Softplus", "Softsign", "ThresholdedRelu", "Round", "Sin", "Transpose", "Identity"),
        )
    ),
    *(f"float[n, m] x -> z = {op}(x)" for op in ("Acos", "Atan", "Celu", "Cosh", "EyeLike", "Tan")),
    "float[n, c, h, w] x, float[c] s -> z = InstanceNormalization(x, s, s)",
    "bfloat16[n, c, h, w] x, bfloat16[c, d, 3, 3] y -> z = Conv(x, y)",
    "float[n, c, h, w] x, float[c, d, 3, 3] y -> z = ConvTranspose(x, y)",
    "bfloat16[n, m] x, int64[1] k -> z, i = TopK(x, k)",
    "float[n, m] x, int64[k] s -> z = Reshape(x, s)",
    "float[n, m] x, int64[k] p -> z = Pad(x, p)",
    "float[n, m] x, float[m] s -> z = RMSNormalization(x, s)",
    "float[b, h, s, d] x -> z = Attention(x, x, x)",
]


def _record(node: ir.Node) -> OpDef:
    return REGISTRY.of(node) or OpDef(node.domain, node.op_type, 1, written_only)


def one_node(text: str, opset: int = OPSET) -> onnx.ModelProto:
    inputs, body = text.split(" -> ")
    outputs = body.partition(" = ")[0].split(", ")
    head = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    model = parser.parse_model(f"{head} g ({inputs}) => (float {outputs[0]}) {{ {body} }}")
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return model


@pytest.mark.usefixtures("same_version")
def test_what_is_said_of_nodes_is_what_the_provider_does(
    standin_cuda: Mapping[str, str], tmp_path: Path
) -> None:
    texts = [*((text, OPSET) for text in NODES), *((text, NEWEST) for text in NEWER)]
    models = [one_node(text, opset) for text, opset in texts]
    paths = [str(tmp_path / f"{i}.onnx") for i in range(len(models))]
    for model, path in zip(models, paths, strict=True):
        onnx.save(model, path)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/standin/kernel_places.py")],
        input=json.dumps(paths),
        env=dict(standin_cuda),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for (text, opset), model, (providers, wanted) in zip(
        texts, models, json.loads(done.stdout), strict=True
    ):
        (node,) = ir.from_proto(shape_inference.infer_shapes(model)).graph
        reason = why_on_host(node, 1 if node.domain else opset, REGISTRY)
        assert (reason is None) == (providers == [CUDA]), (text, reason, providers)
        if reason is None:
            given = [i for i in _record(node).host_operands if i < len(node.inputs)]
            assert given == wanted, (text, given, wanted)


def test_results_that_stay_on_the_host_are_sizes() -> None:
    found = {
        text
        for text in NODES
        if _record(next(iter(ir.from_proto(one_node(text)).graph))).reads_shape_only
    }
    assert {text.rpartition("= ")[2] for text in found} == {"Shape(x)", "Size(x)"}

"""Compares the times of convolutions and pools, forward and backward, with PyTorch on the CPU.

Both compute Σ y · d and its gradients by the image and the weights, alternately, so that whatever
else the machine does meets both. A ratio is of the two medians, the last one of the least times,
which a busy machine disturbs less. Run from the repository's root:

    python tools/bench/convolutions.py [--threads 2] [--rounds 15] [--only 3x3]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch

from onnxpar.autodiff.differentiate import differentiate
from onnxpar.core.mesh import Mesh
from onnxpar.emit.rank_graph import emit_rank
from onnxpar.facts.program import Program
from onnxpar.frontend.load import normalise, symbol_table
from onnxpar.graph.seeds import Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.ops.table import REGISTRY
from onnxpar.partition.partition import partition
from onnxpar.propagation.propagate import propagate
from onnxpar_runtime.library import custom_op_library

Run = Callable[[], object]


@dataclass(frozen=True)
class Layer:
    """A layer of a network: its name, its node, shapes of image and weights, and PyTorch's form."""

    name: str
    node: str
    image: tuple[int, ...]
    weights: tuple[int, ...]
    torch: Callable[..., torch.Tensor]


def _conv(name: str, image: tuple[int, ...], weights: tuple[int, ...], stride: int = 1) -> Layer:
    """A Conv of ResNet or ConvNeXt, padded by half its kernel; depthwise where weights have one."""
    pad = weights[2] // 2
    group = image[1] // weights[1]
    node = f"Conv<pads=[{pad},{pad},{pad},{pad}], strides=[{stride},{stride}], group={group}>(x, w)"
    return Layer(
        name,
        node,
        image,
        weights,
        lambda x, w: torch.nn.functional.conv2d(x, w, None, stride, pad, 1, group),
    )


LAYERS = (
    _conv("3x3, 64 of 56x56", (8, 64, 56, 56), (64, 64, 3, 3)),
    _conv("3x3, 256 of 14x14", (8, 256, 14, 14), (256, 256, 3, 3)),
    _conv("3x3, 128 of 56x56, stride 2", (8, 128, 56, 56), (128, 128, 3, 3), 2),
    _conv("1x1, 256 to 64 of 56x56", (8, 256, 56, 56), (64, 256, 1, 1)),
    _conv("1x1, 256 to 512 of 56x56, stride 2", (8, 256, 56, 56), (512, 256, 1, 1), 2),
    _conv("7x7, 3 to 64 of 224x224, stride 2", (8, 3, 224, 224), (64, 3, 7, 7), 2),
    _conv("7x7 depthwise, 96 of 56x56", (8, 96, 56, 56), (96, 1, 7, 7)),
    Layer(
        "MaxPool 3x3, 64 of 112x112, stride 2",
        "MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)",
        (8, 64, 112, 112),
        (),
        lambda x, w: torch.nn.functional.max_pool2d(x, 3, 2, 1),
    ),
    Layer(
        "AveragePool 3x3, 64 of 56x56",
        "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(x)",
        (8, 64, 56, 56),
        (),
        lambda x, w: torch.nn.functional.avg_pool2d(x, 3, 1, 1),
    ),
)


def _program(layer: Layer, results: tuple[int, ...]) -> onnx.ModelProto:
    """The program of one device: loss and gradients."""

    def text(shape: tuple[int, ...]) -> str:
        return f"float[{','.join(map(str, shape))}]"

    operands = f"{text(layer.image)} x, {text(results)} d"
    if layer.weights:
        operands += f", {text(layer.weights)} w"
    graph = onnx.parser.parse_graph(
        f"g ({operands}) => (float loss) {{ y = {layer.node} s = Mul(y, d) "
        "loss = ReduceSum<keepdims=0>(s) }"
    )
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    model = normalise(ir.from_proto(proto))
    env = shapes(model, symbol_table(model, {}))
    variables = ["x", "w"] if layer.weights else ["x"]
    done = differentiate(model, env, REGISTRY, "loss", variables)
    program = Program.of(model, done.env, REGISTRY)
    plan = propagate(program, Seeds(Mesh.of(), {}, {}), done.links)
    return ir.to_proto(emit_rank(partition(program, plan), 0))


def _runs(layer: Layer, threads: int) -> tuple[Run, Run]:
    """Our step and PyTorch's, whose gradients are compared once."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(layer.image).astype(np.float32)
    w = rng.standard_normal(layer.weights).astype(np.float32)
    images, weights = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    results = tuple(layer.torch(images, weights).shape)
    d = rng.standard_normal(results).astype(np.float32)
    cotangent = torch.tensor(d)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.register_custom_ops_library(str(custom_op_library()))
    session = ort.InferenceSession(
        _program(layer, results).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {"x": x, "d": d} | ({"w": w} if layer.weights else {})
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}

    def theirs() -> list[np.ndarray]:
        images.grad = weights.grad = None
        loss = (layer.torch(images, weights) * cotangent).sum()
        loss.backward()
        found = [loss.detach().numpy(), images.grad.numpy()]
        return found + ([weights.grad.numpy()] if layer.weights else [])

    def ours() -> list[np.ndarray]:
        return list(session.run(None, feeds))

    for got, want in list(zip(ours(), theirs(), strict=True))[1:]:
        # Sums of up to 1e5 products in another order, of float32.
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max(), layer.name
    return ours, theirs


def main() -> None:
    """Prints a table row for each layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| layer | onnxpar, ms | PyTorch, ms | ratio | of the least |\n" + "| --- " * 5 + "|")
    for layer in LAYERS:
        if options.only not in layer.name:
            continue
        runs = _runs(layer, options.threads)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds):
            for run, taken in zip(runs, times, strict=True):
                start = time.perf_counter()
                run()
                taken.append(1e3 * (time.perf_counter() - start))
        ours, theirs = (statistics.median(taken) for taken in times)
        least = min(times[0]) / min(times[1])
        row = (layer.name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}", f"{least:.2f}")
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

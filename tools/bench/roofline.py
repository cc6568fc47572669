#!/usr/bin/env python3
"""Says how close a training step on one device comes to the rate of matrix products.

    tools/bench/roofline.py                    # MLP, GPT, Llama, ViT and ResNet-50
    tools/bench/roofline.py --model gpt --threads 1

First the rate of matrix products is measured, for square matrices of 1024. Networks are exported
from PyTorch (step_networks.py and roofline_networks.py), and trained with AdamW for some steps
under onnxruntime's profiler. A table has the share of each operator in the time of all operators:
the least times of nodes, so that interruptions count little.
On a machine with other work, long nodes are always interrupted, so the share of products is too
large, and times of several threads mean little.

*Products* are MatMul, Gemm and Conv with what is fused to them. Their operations follow from the
shapes that the profiler notes. *Of the rate* is what the step's products would take at the rate of
square matrices, divided by the time of all operators: 100 % is the roofline.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime
from bench_options import conditions
from onnx import TensorProto, helper
from step_cases import MODELS, WEIGHT_DECAY, Batch
from step_profile import PRODUCTS

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar_format.options import Settings
from onnxpar_runtime.launch import init
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.trainer import Trainer

HERE = Path(__file__).resolve().parent
SIDE = 1024
SQUARES = 30
"""Products of square matrices; the fastest counts, as nothing makes a product too fast."""
SHOWN = 8
IMAGES = {
    "llama": ((8, 128), 8192, 128),
    "vit": ((8, 3, 224, 224), 1000, 224),
    "resnet50": ((4, 3, 160, 160), 1000, 160),
}
"""Shape of a batch, number of classes or tokens, and the exporter's size."""


@dataclass(frozen=True)
class Network:
    """A network and what it is trained with.

    Attributes:
        path: Its ONNX file.
        batch: A batch.
    """

    path: Path
    batch: Batch


def prepare(name: str, folder: Path) -> Network:
    """Exports a network, and draws a batch."""
    path = folder / f"{name}.onnx"
    if name not in IMAGES:
        model = MODELS[f"{name}-dynamo"]
        model.export(path)
        return Network(path, model.batches()[0])
    shape, classes, size = IMAGES[name]
    command = [sys.executable, str(HERE / "roofline_networks.py"), name, str(size), str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rng = np.random.default_rng(0)
    if name == "llama":
        return Network(path, {k: rng.integers(0, classes, shape) for k in ("x", "labels")})
    data = rng.standard_normal(shape, dtype=np.float32)
    return Network(path, {"x": data, "labels": rng.integers(0, classes, shape[:1])})


def square_rate(threads: int) -> float:
    """Operations per second of a product of square matrices."""
    kind, shape = TensorProto.FLOAT, [SIDE, SIDE]
    values = [helper.make_tensor_value_info(name, kind, shape) for name in "abc"]
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    graph = helper.make_graph([node], "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {name: np.random.default_rng(0).random(shape, np.float32) for name in "ab"}
    times = []
    for _ in range(SQUARES):
        start = perf_counter()
        session.run(None, feeds)
        times.append(perf_counter() - start)
    return 2 * float(SIDE) ** 3 / min(times)


def shapes(facts: Any) -> list[Sequence[int]]:
    """Shapes of tensors, as onnxruntime's profiler notes them."""
    return [next(iter(one.values())) for one in facts or ()]


def operations(event: Mapping[str, Any]) -> float:
    """Multiplications and additions of a product, from the shapes in its event."""
    ins, outs = (shapes(event["args"].get(f"{end}_type_shape")) for end in ("input", "output"))
    if "Conv" in event["args"]["op_name"]:
        # Each element of the result is a sum over a filter, whose first dim is the channels'.
        return 2.0 * prod(outs[0]) * prod(ins[1][1:])
    # For each of `count` products, the sizes of both operands and of the result are m k, k n, m n.
    count = prod(outs[0][:-2]) if len(ins[1]) > 2 else 1
    left, right, result = (float(prod(shape)) for shape in (ins[0], ins[1], outs[0]))
    return float(2 * (left * right * result / count) ** 0.5)


@dataclass(frozen=True)
class Spent:
    """Where the time of a step's operators goes.

    Attributes:
        seconds: By operator.
        calls: Number of nodes by operator.
        operations: Of all products.
    """

    seconds: Mapping[str, float]
    calls: Mapping[str, int]
    operations: float

    def lines(self, name: str, threads: int, rate: float) -> Iterator[str]:
        """The step for people."""
        total = sum(self.seconds.values())
        products = sum(s for op, s in self.seconds.items() if op in PRODUCTS)
        yield (
            f"{name}, {threads} threads: operators {1e3 * total:.1f} ms, products "
            f"{products / total:.1%} at {self.operations / products / 1e9:.1f} GFLOP/s; "
            f"{self.operations / rate / total:.1%} of the rate"
        )
        others = [(s, op) for op, s in self.seconds.items() if op not in PRODUCTS]
        for seconds, op in sorted(others, reverse=True)[:SHOWN]:
            share = f"{seconds / total:6.1%}"
            yield f"  {op:28s}{1e3 * seconds:9.2f} ms {self.calls[op]:5d} nodes {share}"


def measure(network: Network, threads: int, steps: int, folder: Path) -> Spent:
    """Trains under the profiler."""
    out = folder / f"{network.path.stem}-sharded"
    if not out.exists():
        spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"))
        shard_model(network.path, "dp=1", out, training=spec)
    hyper = hyperparameters("adamw", Settings(weight_decay=WEIGHT_DECAY["adamw"]))
    scratch = Path(tempfile.mkdtemp(dir=folder))
    options = {
        "intra_op_num_threads": str(threads),
        "enable_profiling": "1",
        "profile_file_prefix": str(scratch / "profile"),
    }
    with Trainer(out, rank=init("threads", "cpu"), ort_options=options) as trainer:
        for number in range(1, steps + 1):
            trainer.train_step([network.batch], hyper.at(number, 1e-4))
    found: dict[str, list[float]] = defaultdict(list)
    facts: dict[str, tuple[str, float]] = {}
    for file in scratch.glob("profile*"):
        for event in json.loads(file.read_text(encoding="utf-8")):
            node = event.get("name", "")
            if event.get("cat") != "Node" or not node.endswith("_kernel_time"):
                continue
            op = event["args"]["op_name"]
            node = f"{file.name}/{node}"
            found[node].append(event["dur"] / 1e6)
            facts[node] = op, operations(event) if op in PRODUCTS else 0.0
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for node, times in found.items():
        seconds[facts[node][0]] += min(times)
        calls[facts[node][0]] += 1
    return Spent(seconds, calls, sum(of for _, of in facts.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["mlp", "gpt", *IMAGES]
    parser.add_argument("--model", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[1, 2], help="one table for each number (1 2)"
    )
    parser.add_argument("--steps", type=int, default=7, help="steps under the profiler (7)")
    options = parser.parse_args(arguments)
    print(conditions(), flush=True)
    with tempfile.TemporaryDirectory(prefix="onnxpar-roofline-") as scratch:
        folder = Path(scratch)
        networks = {name: prepare(name, folder) for name in options.model}
        for threads in options.threads:
            rate = square_rate(threads)
            print(f"square matrices, {threads} threads: {rate / 1e9:.1f} GFLOP/s", flush=True)
            for name, network in networks.items():
                spent = measure(network, threads, options.steps, folder)
                print("\n".join(spent.lines(name, threads, rate)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

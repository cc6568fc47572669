"""A small regression network for hybrid parallelism: three dense layers, ReLU between them.

    python models/hybrid.py -o hybrid.onnx

`image` [batch, 1, 28, 28] float32 -> `y` [batch, 1] float32. The nodes are `/flatten/Flatten`,
`/layer1/Gemm`, `/relu1/Relu`, `/layer2/Gemm`, `/relu2/Relu` and `/layer3/Gemm`. Weights have
the layout of PyTorch and MindSpore, [outputs, inputs].
"""

import math
from dataclasses import dataclass, replace

import onnx_ir as ir
from _exporter import Exported, GraphWriter, main, size


@dataclass(frozen=True)
class Config(Exported):
    """The sizes of the network, in elements."""

    side: int = size(28, "height and width of an image")
    hidden: int = size(512, "width of the hidden layers")


def build(config: Config | None = None, **fields: int) -> ir.Model:
    """The network as a model with the symbolic dim `batch`; `fields` replace those of `config`."""
    config = replace(config or Config(), **fields)
    writer = GraphWriter(config.seed)

    def dense(value: ir.Value, name: str, rows: int, columns: int) -> ir.Value:
        bound = 1 / math.sqrt(columns)
        weight = writer.weight(f"{name}.weight", (rows, columns), std=bound)
        bias = writer.weight(f"{name}.bias", (rows,), std=bound)
        return writer.op("Gemm", value, weight, bias, name=f"/{name}/Gemm", transB=1)

    image = writer.input("image", ir.DataType.FLOAT, ["batch", 1, config.side, config.side])
    value = writer.op("Flatten", image, name="/flatten/Flatten")
    value = dense(value, "layer1", config.hidden, config.side**2)
    value = writer.op("Relu", value, name="/relu1/Relu")
    value = dense(value, "layer2", config.hidden, config.hidden)
    value = writer.op("Relu", value, name="/relu2/Relu")
    value = dense(value, "layer3", 1, config.hidden)
    return writer.model({"y": (value, ["batch", 1])}, "hybrid")


if __name__ == "__main__":
    main("Write a small regression network for hybrid parallelism as ONNX.", Config, build)

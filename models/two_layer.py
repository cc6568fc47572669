"""The smallest network worth sharding: MatMul, ReLU, MatMul.

    python models/two_layer.py -o two_layer.onnx

`x` [batch, 32] float32 -> `y` [batch, 16] float32 through `/matmul1/MatMul` (32x16), `/relu/Relu`
and `/matmul2/MatMul` (16x16). Weights are drawn as in He et al. (2015), for ReLU networks.
"""

import math
from dataclasses import dataclass, replace

import onnx_ir as ir
from _exporter import Exported, GraphWriter, main, size


@dataclass(frozen=True)
class Config(Exported):
    """The sizes of the network, in elements."""

    inputs: int = size(32, "width of the input")
    hidden: int = size(16, "width between the layers")
    outputs: int = size(16, "width of the output")


def build(config: Config | None = None, **fields: int) -> ir.Model:
    """The network as a model with the symbolic dim `batch`; `fields` replace those of `config`."""
    config = replace(config or Config(), **fields)
    writer = GraphWriter(config.seed)
    x = writer.input("x", ir.DataType.FLOAT, ["batch", config.inputs])
    first = writer.weight(
        "matmul1.weight", (config.inputs, config.hidden), std=math.sqrt(2 / config.inputs)
    )
    second = writer.weight(
        "matmul2.weight", (config.hidden, config.outputs), std=math.sqrt(2 / config.hidden)
    )
    hidden = writer.op("MatMul", x, first, name="/matmul1/MatMul")
    hidden = writer.op("Relu", hidden, name="/relu/Relu")
    y = writer.op("MatMul", hidden, second, name="/matmul2/MatMul")
    return writer.model({"y": (y, ["batch", config.outputs])}, "two_layer")


if __name__ == "__main__":
    main("Write a network of two layers as ONNX.", Config, build)

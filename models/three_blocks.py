"""Three equal blocks, each two dense layers with Gelu between them, to be sharded one by one.

    python models/three_blocks.py -o three_blocks.onnx

`x` [batch, 32] float32 -> `y` [batch, 32] float32. The nodes are named `/block1/dense1/Gemm`,
`/block1/gelu/Gelu`, `/block1/dense2/Gemm`, `/block2/dense1/Gemm`, ..., so that `/block1/*` is a
block. Weights have the layout of PyTorch and MindSpore, [outputs, inputs].
"""

import math
from dataclasses import dataclass, replace

import onnx_ir as ir
from _exporter import Exported, GraphWriter, main, size


@dataclass(frozen=True)
class Config(Exported):
    """The sizes of the network, in elements."""

    width: int = size(32, "width of every layer")
    blocks: int = size(3, "number of blocks")


def build(config: Config | None = None, **fields: int) -> ir.Model:
    """The network as a model with the symbolic dim `batch`; `fields` replace those of `config`."""
    config = replace(config or Config(), **fields)
    writer = GraphWriter(config.seed)
    width = config.width

    def dense(value: ir.Value, name: str) -> ir.Value:
        weight = writer.weight(f"{name}.weight", (width, width), std=1 / math.sqrt(width))
        bias = writer.weight(f"{name}.bias", (width,), std=1 / math.sqrt(width))
        path = name.replace(".", "/")
        return writer.op("Gemm", value, weight, bias, name=f"/{path}/Gemm", transB=1)

    value = writer.input("x", ir.DataType.FLOAT, ["batch", width])
    for block in range(1, config.blocks + 1):
        value = dense(value, f"block{block}.dense1")
        value = writer.op("Gelu", value, name=f"/block{block}/gelu/Gelu")
        value = dense(value, f"block{block}.dense2")
    return writer.model({"y": (value, ["batch", width])}, "three_blocks")


if __name__ == "__main__":
    main("Write a network of equal blocks as ONNX.", Config, build)

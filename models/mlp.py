"""A classifier of 28x28 images: three matrix products with ReLU between them.

    python models/mlp.py -o mlp.onnx

`x` [batch, 1, 28, 28] float32 -> Flatten -> `logits` [batch, 10] float32. The layers are named
`/fc1/MatMul`, `/relu1/Relu`, `/fc2/MatMul`, ... and have no bias, so that each is one matrix
product that a strategy can address. Weights are drawn as in He et al. (2015), for ReLU.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import onnx_ir as ir
from _exporter import Exported, GraphWriter, main, size


@dataclass(frozen=True)
class Config(Exported):
    """The sizes of the network, in elements."""

    image: int = size(28, "height and width of an image")
    hidden: tuple[int, ...] = size((512, 512), "width of each hidden layer")
    classes: int = size(10, "width of the output")


def build(config: Config | None = None, **fields: int | tuple[int, ...]) -> ir.Model:
    """The network as a model with the symbolic dim `batch`; `fields` replace those of `config`."""
    config = replace(config or Config(), **fields)  # type: ignore[arg-type]
    writer = GraphWriter(config.seed)
    images = writer.input("x", ir.DataType.FLOAT, ["batch", 1, config.image, config.image])
    value = writer.op("Flatten", images, name="/flatten/Flatten", axis=1)
    widths = (config.image**2, *config.hidden, config.classes)
    for layer, (rows, columns) in enumerate(pairwise(widths), start=1):
        weight = writer.weight(f"fc{layer}.weight", (rows, columns), std=math.sqrt(2 / rows))
        value = writer.op("MatMul", value, weight, name=f"/fc{layer}/MatMul")
        if layer < len(widths) - 1:
            value = writer.op("Relu", value, name=f"/relu{layer}/Relu")
    return writer.model({"logits": (value, ["batch", config.classes])}, "mlp")


if __name__ == "__main__":
    main("Write a classifier of 28x28 images as ONNX.", Config, build)

"""The tutorial's classifier of 28x28 images: three matrix products with ReLU between them.

    python models/mlp.py -o mlp.onnx

`x` [batch, 1, 28, 28] float32 -> Flatten -> `logits` [batch, 10] float32. The layers are named
`/fc1/MatMul`, `/relu1/Relu`, `/fc2/MatMul`, ... and have no bias, so that each is one matrix
product that a strategy can address. Weights are drawn as in He et al. (2015), for ReLU.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import onnx_ir as ir
from _exporter import GraphWriter, check_positive, main


@dataclass(frozen=True)
class Config:
    """The sizes of the network, in elements.

    Raises:
        ValueError: a size that is not positive.
    """

    image: int = field(default=28, metadata={"help": "height and width of an image"})
    hidden: tuple[int, ...] = field(
        default=(512, 512), metadata={"help": "width of each hidden layer"}
    )
    classes: int = field(default=10, metadata={"help": "width of the output"})
    seed: int = field(default=0, metadata={"help": "seed of the weights"})

    def __post_init__(self) -> None:
        """Refuse sizes that no layer can have."""
        check_positive(self, "image", "hidden", "classes")


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
    main("Write the tutorial's classifier as ONNX.", Config, build)

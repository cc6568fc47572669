"""Exports a known network from PyTorch to ONNX, in a small size and with random weights.

    python models/zoo.py gpt2 -o gpt2.onnx
    python models/zoo.py --list

Each is a configuration of the `transformers` package (`zoo_language.py`, `zoo_vision.py`), or a
plain module (`zoo_other.py`). It has two to sixteen layers and the structure of the original, but
is narrower: ResNet has the depths of ResNet-50, Llama and its descendants have fewer key and value
heads than query heads, and Mixtral and Qwen3 route each token to two of several experts. Nothing is
downloaded. Dropout is off, so that PyTorch and the exported model compute the same. Open dims are
`batch` and, for networks that have a sequence, `seq`.
"""

import argparse
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import zoo_language
import zoo_other
import zoo_vision
from _zoo import Network
from export_torch import report
from torch import nn

from onnxpar.api.pytorch.export_module import OPSET, export, save

LAYERS = 2

ZOO: Mapping[str, Callable[[int], Network]] = {
    make.__name__: make for file in (zoo_other, zoo_language, zoo_vision) for make in file.NETWORKS
}


def example(name: str, seed: int = 0, layers: int = LAYERS) -> Network:
    """Returns a network of the zoo in evaluation mode, with random weights.

    Args:
        name: A name in `ZOO`.
        seed: Seed of the weights.
        layers: Number of layers; networks that halve their images ignore it.

    Raises:
        KeyError: There is no such network.
    """
    make = ZOO[name]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    made = make(layers)
    if made.perturbed:
        _draw(made.module)
    return replace(made, module=made.module.eval())


def _draw(module: nn.Module) -> None:
    """Adds random numbers to zeros and ones: a scale of 1 applied twice would have no effect."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim <= 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


def main() -> None:
    """Exports one network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("name", nargs="?", choices=ZOO, help="the network")
    parser.add_argument("-o", "--output", type=Path, help="the .onnx file to write")
    parser.add_argument("--opset", type=int, default=OPSET, help=f"default {OPSET}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument(
        "--layers",
        type=int,
        default=LAYERS,
        help=f"default {LAYERS}; networks that halve their images ignore it",
    )
    parser.add_argument("--list", action="store_true", help="print the names")
    options = parser.parse_args()
    if options.list:
        for name, make in ZOO.items():
            print(f"{name:18} {(make.__doc__ or '').strip().splitlines()[0]}")
        return
    if options.name is None or options.output is None:
        parser.error("expected a name and -o FILE, or --list")
    made = example(options.name, options.seed, options.layers)
    model = export(made, options.opset)
    save(model, options.output)
    report(made.module, model, options.output)


if __name__ == "__main__":
    main()

"""Llama, ViT and ResNet-50 at sizes that a processor trains in seconds, for roofline.py.

    python tools/bench/roofline_networks.py llama 128 OUT.onnx

They are modules of the package transformers, exported by `torch.onnx.export` as it is by default.
ResNet-50 is exported as models/export_torch.py does, since the default folds its norms away.
"""

# mypy: ignore-errors
# PyTorch is installed only where this is measured, and its types are not strict.

import sys
from pathlib import Path

import onnx_ir as ir
import torch
import transformers
from torch import Tensor, nn

from onnxpar.api.pytorch.export_module import Example, export, plain_export

TRACED = 3
"""The batch at which a network is traced; its dim stays open."""


class Logits(nn.Module):
    """A network of transformers that returns its logits alone."""

    def __init__(self, network: nn.Module, argument: str, **options: object) -> None:
        """Takes the network, and the name of its input."""
        super().__init__()
        self.network, self.argument, self.options = network, argument, options

    def forward(self, x: Tensor) -> Tensor:
        """The logits of an input."""
        return self.network(**{self.argument: x}, **self.options).logits


def llama(seq: int) -> Example:
    """Four blocks of Llama, 512 wide: RMS norms, rotary positions, grouped heads, SwiGLU."""
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=8192, max_position_embeddings=seq,
    )  # fmt: skip
    net = Logits(transformers.LlamaForCausalLM(config), "input_ids", use_cache=False)
    return Example(net, {"x": torch.zeros((TRACED, seq), dtype=torch.int64)}, {"x": {0: "batch"}})


def vit(size: int) -> Example:
    """Four layers of a ViT, 384 wide, in patches of 16 × 16."""
    config = transformers.ViTConfig(
        hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536,
        image_size=size, patch_size=16, num_labels=1000,
    )  # fmt: skip
    net = Logits(transformers.ViTForImageClassification(config), "pixel_values")
    return Example(net, {"x": torch.zeros(TRACED, 3, size, size)}, {"x": {0: "batch"}})


def resnet50(size: int) -> Example:
    """ResNet-50 at full width."""
    net = Logits(
        transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)),
        "pixel_values",
    )
    return Example(net, {"x": torch.zeros(TRACED, 3, size, size)}, {"x": {0: "batch"}})


def write(name: str, size: int, path: Path) -> None:
    """Writes a network."""
    torch.manual_seed(0)
    example = {"llama": llama, "vit": vit, "resnet50": resnet50}[name](size)
    example.module.train()
    model = export(example) if name == "resnet50" else plain_export(example, optimize=True)
    model.graph.outputs[0].name = "logits"
    ir.save(model, path)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

#!/usr/bin/env python
"""Exports large models of Hugging Face without weights, to plan for them, and small twins of them.

    tools/bench/large_models.py NAME -o FILE.onnx [--layers N] [--small]

The names are those of `MODELS`. While PyTorch exports, all elements of a parameter are one number
in memory, and the data file is sparse. A small twin has the same nodes, little width, and weights.

The sizes are those of Llama 3.1 (Grattafiori et al., 2024), Mixtral (Jiang et al., 2024) and
ViT-22B (Dehghani et al., 2023). There are two differences: here the experts of Mixtral have a
capacity, so that their shapes do not depend on the data; and the layers of ViT-22B are those of a
plain vision transformer, with the feed-forward after the attention.
"""

# mypy: allow-subclassing-any
# To mypy, modules of PyTorch are of any type.

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
from _exporter import save

from onnxpar.api.pytorch.export_module import Example, export


@dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer.

    Attributes:
        width: Width of the residual stream.
        inner: Width of the feed-forward.
        layers: Number of layers.
        heads: Heads of queries; language models have 8 heads of keys and values.
        classes: Tokens of the vocabulary, or classes of images.
        positions: Longest sequence, or the width of an image.
    """

    width: int
    inner: int
    layers: int
    heads: int
    classes: int
    positions: int


SMALL = Sizes(width=64, inner=128, layers=4, heads=8, classes=128, positions=64)
EXPERTS, CHOSEN = 8, 2
"""Experts of Mixtral, and how many of them a token has."""
PATCH = 14
"""Width of a patch of an image."""


def _language(sizes: Sizes) -> dict[str, int | bool]:
    return {
        "vocab_size": sizes.classes, "hidden_size": sizes.width, "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads,
        "num_key_value_heads": 8, "max_position_embeddings": sizes.positions, "use_cache": False,
    }  # fmt: skip


def llama(sizes: Sizes) -> nn.Module:
    """Returns Llama."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_language(sizes)))


class Experts(nn.Module):
    """A mixture of experts with a capacity (Lepikhin et al., "GShard", 2021).

    Of each sequence, an expert takes as many tokens as its share, and a quarter more. A token that
    finds no place in an expert goes without it.
    """

    def __init__(self, sizes: Sizes) -> None:
        """Makes experts that are Llama's feed-forward."""
        super().__init__()
        self.capacity = sizes.positions * CHOSEN * 5 // (EXPERTS * 4)
        self.router = nn.Linear(sizes.width, EXPERTS, bias=False)
        shape = (EXPERTS, sizes.width, sizes.inner)
        self.gate, self.up = (nn.Parameter(0.02 * torch.randn(shape)) for _ in range(2))
        self.down = nn.Parameter(0.02 * torch.randn(EXPERTS, sizes.inner, sizes.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of each token's experts; x is [batch, seq, width]."""
        weights, chosen = torch.topk(torch.softmax(self.router(x), dim=-1), CHOSEN, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        taken = (chosen.unsqueeze(-1) == torch.arange(EXPERTS)).to(x.dtype)
        shares = (taken * weights.unsqueeze(-1)).sum(dim=2)
        takes = taken.sum(dim=2)
        # The place of a token is the number of tokens before it that have the same expert.
        places = (torch.cumsum(takes, dim=1) - takes).unsqueeze(-1)
        held = (places == torch.arange(self.capacity)).to(x.dtype) * takes.unsqueeze(-1)
        inputs = torch.einsum("bsec,bsm->ebcm", held, x)
        gate = nn.functional.silu(torch.einsum("ebcm,emf->ebcf", inputs, self.gate))
        inner = gate * torch.einsum("ebcm,emf->ebcf", inputs, self.up)
        outputs = torch.einsum("ebcf,efm->ebcm", inner, self.down)
        return torch.einsum("bsec,ebcm->bsm", held * shares.unsqueeze(-1), outputs)


def mixtral(sizes: Sizes) -> nn.Module:
    """Returns Llama with a mixture of experts in each layer."""
    model = llama(replace(sizes, inner=1))
    for layer in model.model.layers:
        layer.mlp = Experts(sizes)
    return model


def vit(sizes: Sizes) -> nn.Module:
    """Returns a vision transformer."""
    config = transformers.ViTConfig(
        hidden_size=sizes.width, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        intermediate_size=sizes.inner, image_size=sizes.positions, patch_size=PATCH,
        num_labels=sizes.classes,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, tuple[Callable[[Sizes], nn.Module], Sizes]] = {
    "llama-8b": (llama, Sizes(4096, 14336, 32, 32, 128256, 131072)),
    "llama-70b": (llama, Sizes(8192, 28672, 80, 64, 128256, 131072)),
    "llama-405b": (llama, Sizes(16384, 53248, 126, 128, 128256, 131072)),
    "mixtral-8x7b": (mixtral, Sizes(4096, 14336, 32, 32, 32000, 4096)),
    "vit-22b": (vit, Sizes(6144, 24576, 48, 48, 29593, 224)),
}


def without_weights(build: Callable[[Sizes], nn.Module], sizes: Sizes) -> nn.Module:
    """Returns a model whose tensors take no memory."""
    with torch.device("meta"):
        model = build(sizes)
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            zero = torch.zeros((), dtype=parameter.dtype)
            setattr(module, key, nn.Parameter(zero.expand(parameter.shape)))
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.zeros(buffer.shape, dtype=buffer.dtype))
    return model


def example(name: str, *, small: bool = False, layers: int | None = None) -> Example:
    """Returns a model with inputs to trace it.

    Args:
        name: One of `MODELS`.
        small: Whether it is the small twin, with weights.
        layers: The number of layers, if not the model's own.
    """
    build, sizes = MODELS[name]
    if small:
        image = 4 * PATCH if build is vit else SMALL.positions
        sizes = replace(SMALL, positions=image)
    sizes = replace(sizes, layers=layers or sizes.layers)
    torch.manual_seed(0)
    model = (build(sizes) if small else without_weights(build, sizes)).eval()
    if build is vit:
        images = torch.zeros((3, 3, sizes.positions, sizes.positions))
        return Example(model, {"pixel_values": images}, {"pixel_values": {0: "batch"}})
    tokens = {"input_ids": torch.zeros((3, 5), dtype=torch.int64)}
    return Example(model, tokens, {"input_ids": {0: "batch", 1: "seq"}})


def main() -> None:
    """Exports one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--small", action="store_true", help="the small twin, with weights")
    options = parser.parse_args()
    model = export(example(options.name, small=options.small, layers=options.layers))
    save(model, options.out, materialise=options.small)


if __name__ == "__main__":
    main()

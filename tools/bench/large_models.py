#!/usr/bin/env python
"""Exports large models of Hugging Face without weights, to plan for them.

    tools/bench/large_models.py llama-8b|llama-70b|llama-405b -o FILE.onnx [--layers N]

The configurations are those of Llama 3.1 (Grattafiori et al., 2024). While PyTorch exports, all
elements of a parameter are one number in memory. The data file is sparse.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
from _exporter import save
from export_torch import Example, export

MODELS = {
    "llama-8b": (4096, 14336, 32, 32),
    "llama-70b": (8192, 28672, 80, 64),
    "llama-405b": (16384, 53248, 126, 128),
}
"""Width, feed-forward width, layers, heads; all have 8 heads of keys and values."""
VOCABULARY, POSITIONS = 128256, 131072


def empty(name: str, layers: int | None) -> nn.Module:
    """Returns a model whose tensors take no memory."""
    width, inner, depth, heads = MODELS[name]
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=layers or depth, num_attention_heads=heads, num_key_value_heads=8,
        max_position_embeddings=POSITIONS, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            zero = torch.zeros((), dtype=parameter.dtype)
            setattr(module, key, nn.Parameter(zero.expand(parameter.shape)))
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.zeros(buffer.shape, dtype=buffer.dtype))
    model.eval()
    return model


def main() -> None:
    """Exports one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="fewer layers, to try it")
    options = parser.parse_args()
    tokens = {"input_ids": torch.zeros((3, 5), dtype=torch.int64)}
    dims = {"input_ids": {0: "batch", 1: "seq"}}
    model = export(Example(empty(options.name, options.layers), tokens, dims))
    save(model, options.out, materialise=False)


if __name__ == "__main__":
    main()

"""Known networks with random weights, exported from PyTorch: transformers' own code, small sizes.

    python models/zoo.py gpt2 -o gpt2.onnx
    python models/zoo.py --list

Each is a configuration of the `transformers` package, or a plain module, in two to sixteen layers
with the structure of the original and narrower: ResNet has the depths of ResNet-50, Llama and its
descendants fewer key and value heads than query heads, Mixtral and Qwen3 route each token to two
experts of several. Nothing is downloaded. Dropout is off, so that PyTorch and the exported model
compute the same. Open dims are `batch` and, where the network has one, `seq`.
"""

import argparse
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from export_torch import OPSET, Example, export, report, save
from torch import nn

VOCAB = 96
WIDTH = 32
CLASSES = 10
LAYERS = 2
LANGUAGE = {"batch": 3, "seq": 7}

Outer = Mapping[str, Mapping[int, str]]


def _tokens(*names: str) -> tuple[dict[str, torch.Tensor], Outer]:
    """Inputs of token ids, and their open dims."""
    size = (LANGUAGE["batch"], LANGUAGE["seq"])
    inputs = {name: torch.zeros(size, dtype=torch.int64) for name in names}
    return inputs, {name: {0: "batch", 1: "seq"} for name in names}


def _images(size: int) -> tuple[dict[str, torch.Tensor], Outer]:
    return {"pixel_values": torch.zeros(3, 3, size, size)}, {"pixel_values": {0: "batch"}}


def _ids() -> dict[str, int]:
    """Special tokens that lie in the small vocabulary."""
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def mlp(layers: int) -> Example:
    """A classifier of linear layers with norms between them."""
    modules: list[nn.Module] = [nn.Linear(64, 128)]
    for _ in range(layers):
        modules += [nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128)]
    module = nn.Sequential(*modules, nn.GELU(), nn.Linear(128, CLASSES))
    return Example(module, {"input": torch.zeros(3, 64)}, {"input": {0: "batch"}})


def gpt2(layers: int) -> Example:
    """GPT-2 (Radford et al. 2019); the output projection is the token table."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=WIDTH, n_layer=layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **_ids(),
    )  # fmt: skip
    return Example(transformers.GPT2LMHeadModel(config), *_tokens("input_ids"))


def bert(layers: int) -> Example:
    """BERT with its masked-language head (Devlin et al. 2019)."""
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * WIDTH, max_position_embeddings=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, use_cache=False,
    )  # fmt: skip
    return Example(transformers.BertForMaskedLM(config), *_tokens("input_ids", "token_type_ids"))


def _llama_sizes(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "use_cache": False, **_ids(),
    }  # fmt: skip


def llama(layers: int) -> Example:
    """Llama (Touvron et al. 2023) with two query heads to each key and value head."""
    config = transformers.LlamaConfig(**_llama_sizes(layers))
    return Example(transformers.LlamaForCausalLM(config), *_tokens("input_ids"))


def mixtral(layers: int) -> Example:
    """Mixtral (Jiang et al. 2024): Llama with four experts, two to each token."""
    config = transformers.MixtralConfig(
        **_llama_sizes(layers), num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return Example(transformers.MixtralForCausalLM(config), *_tokens("input_ids"))


def qwen3_moe(layers: int) -> Example:
    """Qwen3-MoE (Yang et al. 2025): eight experts, two to each token, queries and keys normed."""
    config = transformers.Qwen3MoeConfig(
        **_llama_sizes(layers), head_dim=8, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=WIDTH, norm_topk_prob=True, experts_implementation="batched_mm",
    )  # fmt: skip
    return Example(transformers.Qwen3MoeForCausalLM(config), *_tokens("input_ids"))


def _two_sequences() -> tuple[dict[str, torch.Tensor], Outer]:
    """Tokens of an encoder and, in another number, of a decoder."""
    batch, seq = LANGUAGE["batch"], LANGUAGE["seq"]
    inputs = {
        "input_ids": torch.zeros(batch, seq, dtype=torch.int64),
        "decoder_input_ids": torch.zeros(batch, seq + 4, dtype=torch.int64),
    }
    return inputs, {
        "input_ids": {0: "batch", 1: "seq"},
        "decoder_input_ids": {0: "batch", 1: "target"},
    }


def t5(layers: int) -> Example:
    """T5 (Raffel et al. 2020): relative positions in buckets, no biases."""
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=3 * WIDTH, num_layers=layers, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        use_cache=False,
        attn_implementation="eager", # PyTorch 2.13 cannot export the other form with a bias
    )  # fmt: skip
    return Example(transformers.T5ForConditionalGeneration(config), *_two_sequences())


def bart(layers: int) -> Example:
    """BART (Lewis et al. 2020)."""
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=WIDTH, max_position_embeddings=64,
        encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=3 * WIDTH, decoder_ffn_dim=3 * WIDTH,
        dropout=0.0, use_cache=False,
        decoder_start_token_id=2, **_ids(),
    )  # fmt: skip
    return Example(transformers.BartForConditionalGeneration(config), *_two_sequences())


def whisper(layers: int) -> Example:
    """Whisper (Radford et al. 2022): two convolutions over 16 mel bands, then as BART."""
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=WIDTH, num_mel_bins=16, max_source_positions=20,
        max_target_positions=64, encoder_layers=layers, decoder_layers=layers,
        encoder_ffn_dim=3 * WIDTH, decoder_ffn_dim=3 * WIDTH, encoder_attention_heads=4,
        decoder_attention_heads=4, use_cache=False, decoder_start_token_id=2, **_ids(),
    )  # fmt: skip
    inputs, dims = _tokens("decoder_input_ids")
    inputs = {"input_features": torch.zeros(LANGUAGE["batch"], 16, 40), **inputs}
    module = transformers.WhisperForConditionalGeneration(config)
    return Example(module, inputs, {"input_features": {0: "batch"}, **dims})


def vit(layers: int) -> Example:
    """The vision transformer (Dosovitskiy et al. 2021) on images of 32×32 in 16 patches."""
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * WIDTH, image_size=32, patch_size=8, num_labels=CLASSES,
    )  # fmt: skip
    return Example(transformers.ViTForImageClassification(config), *_images(32))


def resnet50(layers: int) -> Example:
    """ResNet-50 (He et al. 2016), every width an eighth, on images of 128×128.

    So the maps of the last stage are 4×4. The last norm of each block begins with a small scale
    (Goyal et al. 2017 begin with 0), since fifty layers that each divide by the deviation of a few
    random numbers carry rounding on until 32 bits are not enough to compare anything.
    """
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[32, 64, 128, 256], depths=[3, 4, 6, 3],
        layer_type="bottleneck", num_labels=CLASSES,
    )  # fmt: skip
    module = transformers.ResNetForImageClassification(config)
    for name, parameter in module.named_parameters():
        if name.endswith("layer.2.normalization.weight"):
            nn.init.constant_(parameter, 0.2)
    return Example(module, *_images(128))


def convnext(layers: int) -> Example:
    """ConvNeXt (Liu et al. 2022) on images of 64×64."""
    config = transformers.ConvNextConfig(
        hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 3, 2], image_size=64, num_labels=CLASSES,
        layer_scale_init_value=0.1,
    )  # fmt: skip
    return Example(transformers.ConvNextForImageClassification(config), *_images(64))


def mamba(layers: int) -> Example:
    """Mamba (Gu and Dao 2023); its scan is unrolled, so that the length is fixed, at 8 tokens."""
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, state_size=8, num_hidden_layers=layers,
        time_step_rank=4, use_cache=False, use_associative_scan=False, use_mambapy=False, **_ids(),
    )  # fmt: skip
    inputs = {"input_ids": torch.zeros(3, 8, dtype=torch.int64)}
    return Example(transformers.MambaForCausalLM(config), inputs, {"input_ids": {0: "batch"}})


ZOO: Mapping[str, Callable[[int], Example]] = {
    f.__name__: f
    for f in (
        mlp, gpt2, bert, llama, mixtral, qwen3_moe, t5, bart, vit, resnet50, convnext, whisper,
        mamba,
    )
}  # fmt: skip


def example(name: str, seed: int = 0, layers: int = LAYERS) -> Example:
    """Returns a network of the zoo, its weights drawn from the seed, in evaluation mode.

    Args:
        name: A name in `ZOO`.
        seed: Seed of the weights.
        layers: How many; `resnet50` and `convnext` have their own number.

    Raises:
        KeyError: There is none of that name.
    """
    make = ZOO[name]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    made = make(layers)
    _draw(made.module)
    return replace(made, module=made.module.eval())


def _draw(module: nn.Module) -> None:
    """Draws what begins as zeros or ones: a scale applied twice would change nothing."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


def main() -> None:
    """Exports one network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("name", nargs="?", choices=ZOO, help="the network")
    parser.add_argument("-o", "--output", type=Path, help="the .onnx file to write")
    parser.add_argument("--opset", type=int, default=OPSET, help=f"default {OPSET}")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument(
        "--layers",
        type=int,
        default=LAYERS,
        help=f"default {LAYERS}; but for resnet50 and convnext",
    )
    parser.add_argument("--list", action="store_true", help="print the names")
    options = parser.parse_args()
    if options.list:
        for name, make in ZOO.items():
            print(f"{name:10} {(make.__doc__ or '').strip().splitlines()[0]}")
        return
    if options.name is None or options.output is None:
        parser.error("expected a name and -o FILE, or --list")
    made = example(options.name, options.seed, options.layers)
    model = export(made, options.opset)
    save(model, options.output)
    report(made.module, model, options.output)


if __name__ == "__main__":
    main()

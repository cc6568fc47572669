"""Exports a decoder of Hugging Face with its cache to ONNX, as a model of any size.

    python models/decoder.py llama -o llama.onnx
    python models/decoder.py qwen3 -o qwen3 --cache shared --bits 4 --set num_hidden_layers=8
    python models/decoder.py folder/with/config.json -o model.onnx

The network is a family in small sizes (`--list`), or the `config.json` of any decoder. If the
weights are in the folder of that file, they are read; otherwise they are drawn at random. `--set
NAME=VALUE` changes the configuration.

Inputs: `input_ids` [batch, seq] and `attention_mask` int64, and for each layer
`past_key_values.N.key` and `.value` [batch, kv_heads, past, head_dim]. Outputs: `logits`
[batch, seq, vocab], and `present.N.key` and `.value`, which the next step takes.

`--cache growing` is what optimum writes: the new keys and values are appended by Concat, the mask
has `past + seq` columns, and `position_ids` [batch, seq] are an input. `--cache shared` is what the
builder of onnxruntime-genai writes: attention is one node, GroupQueryAttention, whose past and
present may be one buffer of a fixed length (`models/_contrib.py`). `--bits 4` makes each product
with a weight a MatMulNBits.

If the output is a folder, it gets `model.onnx` and, for a shared cache, a `genai_config.json`.
"""

import argparse
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import transformers
from _contrib import SharedCache, few_bits, tables_of_angles
from export_torch import report
from torch import nn

from onnxpar.api.pytorch.export_module import OPSET, Example, arguments, export, save

BATCH, SEQ, PAST = 3, 7, 5
"""Sizes to trace with."""

_SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.125, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "phi3": ("Phi3", {"sliding_window": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi": ("Phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "head_dim": 32}),
}  # fmt: skip
"""By name: the class of its configuration, and what it has besides the common sizes."""


def configuration(
    network: str,
    changes: Mapping[str, Any] | None = None,
    families: Mapping[str, tuple[str, Mapping[str, Any]]] = FAMILIES,
    sizes: Mapping[str, Any] = _SIZES,
) -> Any:
    """Returns the configuration of a family, or of a file or folder, with changes.

    Args:
        network: The family, or the file or folder.
        changes: New values by name.
        families: By name: the class of a configuration, and what it has besides the sizes.
        sizes: What all families have.

    Raises:
        ValueError: There is no such family or file, or the configuration has no such entry.
    """
    path, changes = Path(network), changes or {}
    if network in families:
        kind, own = families[network]
        # Changed here as well: entries that follow from others, such as the width of a head.
        known = {name: changes[name] for name in changes if name in {**sizes, **own}}
        own = {**own, **_repeated(own, changes), **known}
        config = getattr(transformers, f"{kind}Config")(**{**sizes, **own})
    elif path.exists():
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    else:
        raise ValueError(f"{network}: expected {', '.join(families)}, or a config.json")
    for name in changes:
        if not hasattr(config, name):
            raise ValueError(f"{name}: {type(config).__name__} has no such entry")
    values = config.to_dict()
    return type(config).from_dict({**values, **_repeated(values, changes), **changes})


def _repeated(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Repeats the kinds of layers if only their number is changed."""
    kinds, layers = values.get("layer_types"), changes.get("num_hidden_layers")
    if kinds is None or layers is None:
        return {}
    return {"layer_types": [kinds[n % len(kinds)] for n in range(layers)]}


def network(
    config: Any,
    *,
    seed: int = 0,
    folder: Path | None = None,
    auto: Any = transformers.AutoModelForCausalLM,
) -> nn.Module:
    """Returns the network in evaluation mode, with the weights of a folder or random ones.

    Args:
        config: Its configuration.
        seed: Seed of random weights.
        folder: Where weights may lie.
        auto: The class that makes such networks.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    options: dict[str, Any] = {"attn_implementation": "eager"}
    if hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
        options["experts_implementation"] = "batched_mm"
    if folder is not None and any(folder.glob("*.safetensors")):
        module = auto.from_pretrained(folder, config=config, local_files_only=True, **options)
    else:
        torch.manual_seed(seed)
        module = auto.from_config(config, **options)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim <= 1:
                    # A scale of 1 that is applied twice, or a bias of 0, would have no effect.
                    parameter.add_(0.1 * torch.randn_like(parameter))
    found: nn.Module = module.eval()
    return found


def example(module: nn.Module, *, shared: bool = False) -> Example:
    """Returns a decoder with its cache as inputs and outputs, ready to export.

    Args:
        module: The decoder; its `forward` is replaced.
        shared: Whether the cache is a buffer of a fixed length that attention updates.

    Raises:
        ValueError: A layer keeps other states than keys and values, or its positions are not
            rotary and the cache is shared.
    """
    sizes = _cache_sizes(module)
    names = [f"{n}.{part}" for n in range(len(sizes)) for part in ("key", "value")]
    inputs = {
        "input_ids": torch.zeros((BATCH, SEQ), dtype=torch.int64),
        "attention_mask": torch.ones((BATCH, PAST + SEQ), dtype=torch.int64),
    }
    dims = {
        "input_ids": {0: "batch", 1: "seq"},
        "attention_mask": {0: "batch", 1: "total"},
    }
    if not shared:
        inputs["position_ids"] = torch.arange(PAST, PAST + SEQ).repeat(BATCH, 1)
        dims["position_ids"] = {0: "batch", 1: "seq"}
    dtype = next(module.parameters()).dtype
    for name, (heads, width) in zip(names, [s for size in sizes for s in size], strict=True):
        inputs[f"past_key_values.{name}"] = torch.zeros((BATCH, heads, PAST, width), dtype=dtype)
        dims[f"past_key_values.{name}"] = {0: "batch", 2: "past"}
    if shared:
        tables_of_angles(module)
    _take_cache(module, list(inputs), shared=shared)
    return Example(module, inputs, dims, ["logits", *(f"present.{name}" for name in names)])


def _cache_sizes(module: nn.Module) -> list[tuple[tuple[int, int], ...]]:
    """Returns heads and width of the keys and of the values of each layer."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        module(input_ids=torch.zeros((1, 1), dtype=torch.int64), past_key_values=cache)
    if not cache.layers:
        raise ValueError(f"{type(module).__name__}: expected a cache of keys and values, got none")
    found = []
    for n, layer in enumerate(cache.layers):
        pair = [getattr(layer, part, None) for part in ("keys", "values")]
        sizes = [(x.shape[1], x.shape[3]) for x in pair if x is not None and x.ndim == 4]
        if len(sizes) < 2:
            raise ValueError(f"layer {n}: expected a cache of keys and values, got {layer}")
        found.append(tuple(sizes))
    return found


def _take_cache(module: nn.Module, names: Sequence[str], *, shared: bool) -> None:
    """Replaces `forward` by one that takes and returns the tensors of the cache."""
    inner = module.forward

    def forward(**given: torch.Tensor) -> list[torch.Tensor]:
        past = [t for name, t in given.items() if name.startswith("past_key_values")]
        pairs = list(zip(past[::2], past[1::2], strict=True))
        ids, mask = given["input_ids"], given["attention_mask"]
        if shared:
            held = SharedCache(module, pairs, mask)
            with held.attending():
                out = inner(input_ids=ids, position_ids=torch.zeros_like(ids), past_key_values=held)
            return [out.logits, *held.present()]
        grown = transformers.DynamicCache(pairs)
        positions = given["position_ids"]
        out = inner(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=grown
        )
        return [out.logits, *(t for layer in grown.layers for t in (layer.keys, layer.values))]

    module.forward = arguments(forward, names)


def build(
    config: Any,
    *,
    shared: bool = False,
    bits: int = 32,
    block: int = 32,
    seed: int = 0,
    folder: Path | None = None,
    opset: int = OPSET,
) -> tuple[nn.Module, ir.Model]:
    """Returns a decoder, before its weights are rounded to few bits, and its export."""
    module = network(config, seed=seed, folder=folder)
    if bits != 32:
        few_bits(module, bits, block)
    made = example(module, shared=shared)
    model = export(made, opset)
    name_dims(model, shared=shared)
    return module, model


def name_dims(model: ir.Model, *, shared: bool) -> None:
    """Writes the dims that PyTorch cannot state: the columns of the mask, the length of present."""
    graph = model.graph
    if not shared:
        mask = next(v for v in graph.inputs if v.name == "attention_mask")
        mask.shape = ir.Shape(["batch", "past + seq"])
    for value in graph.outputs[1:]:
        assert value.shape is not None
        dims: list[Any] = list(value.shape)
        value.shape = ir.Shape(["batch", dims[1], "total" if shared else "past + seq", dims[3]])


def genai_config(config: Any, layers: int, file: str) -> dict[str, Any]:
    """Returns what the builder of onnxruntime-genai writes beside a decoder."""
    heads = config.num_attention_heads
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": file,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": getattr(config, "num_key_value_heads", heads),
    }
    return {
        "model": {
            "bos_token_id": config.bos_token_id,
            "context_length": config.max_position_embeddings,
            "decoder": decoder,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id or 0,
            "type": config.model_type,
            "vocab_size": config.vocab_size,
        },
        "search": {
            "do_sample": False, "early_stopping": True, "length_penalty": 1.0,
            "max_length": config.max_position_embeddings, "min_length": 0,
            "no_repeat_ngram_size": 0, "num_beams": 1, "num_return_sequences": 1,
            "past_present_share_buffer": True, "repetition_penalty": 1.0, "temperature": 1.0,
            "top_k": 1, "top_p": 1.0,
        },
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Exports one decoder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cache", choices=("growing", "shared"), default="growing")
    parser.add_argument(
        "--bits", type=int, choices=(4, 8, 32), default=32, help="bits of each weight"
    )
    parser.add_argument(
        "--block", type=int, default=32, help="weights that share a scale, default 32"
    )
    options = parsed(parser, arguments, FAMILIES, "the .onnx file or the folder to write")
    shared, path = options.cache == "shared", options.output
    try:
        config = configuration(options.network, dict(change(text) for text in options.changes))
        module, model = build(
            config,
            shared=shared,
            bits=options.bits,
            block=options.block,
            seed=options.seed,
            folder=folder_of(options.network),
            opset=options.opset,
        )
        if path.suffix != ".onnx":
            path.mkdir(parents=True, exist_ok=True)
            if shared:
                layers = (len(model.graph.outputs) - 1) // 2
                text = json.dumps(genai_config(config, layers, "model.onnx"), indent=4)
                (path / "genai_config.json").write_text(text + "\n")
            path /= "model.onnx"
        save(model, path)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    report(module, model, path)


def parsed(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    families: Iterable[str],
    output: str,
) -> argparse.Namespace:
    """Adds what each exporter of networks takes, and reads the command line; `--list` ends it.

    Args:
        parser: Has the exporter's own options.
        arguments: The command line; by default the process's.
        families: The families that it knows.
        output: What it writes, for the help.
    """
    parser.add_argument("network", nargs="?", help="a family, or a config.json or its folder")
    parser.add_argument("-o", "--output", type=Path, metavar="PATH", help=output)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="changes")
    parser.add_argument("--opset", type=int, default=OPSET, help=f"default {OPSET}")
    parser.add_argument("--list", action="store_true", help="print the families")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(families))
        parser.exit()
    if options.network is None or options.output is None:
        parser.error("expected a network and -o PATH, or --list")
    return options


def folder_of(network: str) -> Path | None:
    """Returns the folder of a network that is given by a path; None for a family."""
    given = Path(network)
    return given if given.is_dir() else given.parent if given.is_file() else None


def change(text: str) -> tuple[str, Any]:
    """Returns the name and the value of NAME=VALUE; the value is JSON, or text.

    Raises:
        ValueError: There is no `=`.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--set {text}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


if __name__ == "__main__":
    main()

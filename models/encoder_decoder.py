"""Encoder-decoders of Hugging Face with their cache: an encoder and a decoder, random weights.

    python models/encoder_decoder.py whisper -o whisper
    python models/encoder_decoder.py t5 -o t5 --set num_decoder_layers=4
    python models/encoder_decoder.py folder/with/config.json -o folder

The network is a family in small sizes (`--list`), or the `config.json` of any encoder-decoder of
transformers. Weights are read if they lie beside it, and drawn otherwise. The folder gets
`encoder.onnx`, `decoder.onnx` and `genai_config.json`, which names the inputs and outputs of both
as the builder of onnxruntime-genai does.

The encoder runs once. Its inputs are `input_features` [batch, channels, frames], or `input_ids` and
`attention_mask` [batch, source]. Its outputs are, for each layer of the decoder, the keys and
values of what it read: `present.N.encoder.key` and `.value` [batch, heads, source, head_dim].

The decoder takes them in every step as `past_key_values.N.encoder.key` and `.value`. Its other
inputs are `input_ids` [batch, seq], `encoder_attention_mask` if the encoder has a mask, and the
cache that grows, `past_key_values.N.decoder.key` and `.value` [batch, heads, past, head_dim]. Where
the network can leave padding out, it also takes `attention_mask` [batch, past + seq], and perhaps
`position_ids` [batch, seq]. Outputs: `logits`, and `present.N.decoder.key` and `.value`.
"""

import argparse
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import transformers
from decoder import BATCH, PAST, SEQ, change, configuration, folder_of, network, parsed
from torch import nn

from onnxpar.api.pytorch.export_module import OPSET, Example, arguments, export, save

SOURCE = 11
"""Tokens of the encoder to trace with."""

_SIZES = {
    "vocab_size": 256, "d_model": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "decoder_start_token_id": 3, "tie_word_embeddings": False,
}  # fmt: skip
_LAYERS = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "init_std": 0.125,
}  # fmt: skip
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "whisper": (
        "Whisper",
        {**_LAYERS, "num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 256},
    ),
    "t5": (
        "T5",
        {
            "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 128,
            "relative_attention_num_buckets": 8, "relative_attention_max_distance": 32,
        },
    ),
    "bart": ("Bart", {**_LAYERS, "max_position_embeddings": 256, "forced_eos_token_id": None}),
}  # fmt: skip
"""By name: the class of its configuration, and what it has besides the common sizes."""


@dataclass(frozen=True)
class Network:
    """An encoder-decoder, with what its two programs take and keep.

    Attributes:
        module: The network, in evaluation mode.
        features: Shape of the encoder's features without the batch; None if it takes tokens.
        masked: Whether the decoder can leave out the padding of its own tokens.
        placed: Whether it takes their positions.
        sizes: Heads and width of the decoder's own keys and values of each layer.
        crossed: Heads and width of those of the encoder's results.
    """

    module: nn.Module
    features: tuple[int, int] | None
    masked: bool
    placed: bool
    sizes: Sequence[tuple[int, int]]
    crossed: Sequence[tuple[int, int]]

    @property
    def parts(self) -> list[str]:
        """The number and the kind of each tensor of a cache, such as `0.key` and `0.value`."""
        return [f"{n}.{part}" for n in range(len(self.sizes) // 2) for part in ("key", "value")]

    @property
    def dtype(self) -> torch.dtype:
        """The element type of keys and values."""
        return next(self.module.parameters()).dtype


def known(module: Any) -> Network:
    """Returns a network with what its programs take.

    Raises:
        ValueError: It keeps other states than keys and values.
    """
    encoder, decoder = module.get_encoder(), module.get_decoder()
    config, features = module.config, None
    if "input_features" in inspect.signature(encoder.forward).parameters:
        features = (config.num_mel_bins, 2 * config.max_source_positions)
    cache = _empty()
    with torch.no_grad():
        found = encoder(**_source(features, 1, torch.float32))
        _decode(module, found.last_hidden_state, cache)
    sizes = [
        [
            (t.shape[1], t.shape[3])
            for layer in part.layers
            for t in (layer.keys, layer.values)
            if t.ndim == 4
        ]
        for part in (cache.self_attention_cache, cache.cross_attention_cache)
    ]
    if not sizes[0] or len(sizes[0]) != len(sizes[1]):
        raise ValueError(f"{type(module).__name__}: expected keys and values of each layer")
    taken = inspect.signature(decoder.forward).parameters
    placed = "position_ids" in taken
    # Positions that only count columns would count padding too.
    relative = hasattr(config, "relative_attention_num_buckets")
    return Network(module, features, placed or relative, placed, sizes[0], sizes[1])


def _empty() -> Any:
    made = transformers.EncoderDecoderCache
    return made(transformers.DynamicCache(), transformers.DynamicCache())


def _source(
    features: tuple[int, int] | None, batch: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns inputs of the encoder."""
    if features is not None:
        return {"input_features": torch.zeros((batch, *features), dtype=dtype)}
    shape = (batch, SOURCE)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": mask}


def _decode(module: Any, read: torch.Tensor, cache: Any) -> None:
    """Runs the decoder over one token, which fills the cache."""
    ids = torch.zeros((read.shape[0], 1), dtype=torch.int64)
    module.get_decoder()(
        input_ids=ids, encoder_hidden_states=read, past_key_values=cache, use_cache=True
    )


def encoder_example(found: Network) -> Example:
    """Returns the encoder, with the decoder's projections of its results, ready to export.

    Example's module is the complete network; its `forward` is replaced.
    """
    module: Any = found.module
    inputs = _source(found.features, BATCH, found.dtype)
    encoder = module.get_encoder()

    def forward(**given: torch.Tensor) -> list[torch.Tensor]:
        cache = _empty()
        # Only the projections of what was read are used, so that nothing else is exported.
        _decode(module, encoder(**given).last_hidden_state, cache)
        layers = cache.cross_attention_cache.layers
        return [t for layer in layers for t in (layer.keys, layer.values)]

    module.forward = arguments(forward, list(inputs))
    open_dims = {0: "batch"} if found.features is not None else {0: "batch", 1: "source"}
    names = [part.replace(".", ".encoder.") for part in found.parts]
    outputs = [f"present.{name}" for name in names]
    return Example(module, inputs, dict.fromkeys(inputs, open_dims), outputs)


def decoder_example(found: Network) -> Example:
    """Returns the decoder with both caches as inputs, ready to export.

    Example's module is the complete network; its `forward` is replaced.
    """
    module: Any = found.module
    length = SOURCE if found.features is None else module.config.max_source_positions
    inputs = {"input_ids": torch.zeros((BATCH, SEQ), dtype=torch.int64)}
    dims: dict[str, dict[int, str]] = {"input_ids": {0: "batch", 1: "seq"}}
    if found.masked:
        inputs["attention_mask"] = torch.ones((BATCH, PAST + SEQ), dtype=torch.int64)
        dims["attention_mask"] = {0: "batch", 1: "total"}
    if found.placed:
        inputs["position_ids"] = torch.arange(PAST, PAST + SEQ).repeat(BATCH, 1)
        dims["position_ids"] = {0: "batch", 1: "seq"}
    cross = {0: "batch"}
    if found.features is None:
        inputs["encoder_attention_mask"] = torch.ones((BATCH, SOURCE), dtype=torch.int64)
        dims["encoder_attention_mask"] = {0: "batch", 1: "source"}
        cross[2] = "source"
    for kind, sizes, n, open_dims in (
        ("decoder", found.sizes, PAST, {0: "batch", 2: "past"}),
        ("encoder", found.crossed, length, cross),
    ):
        for part, (heads, width) in zip(found.parts, sizes, strict=True):
            name = f"past_key_values.{part.replace('.', f'.{kind}.')}"
            inputs[name] = torch.zeros((BATCH, heads, n, width), dtype=found.dtype)
            dims[name] = open_dims
    decoder, heads = module.get_decoder(), module.get_output_embeddings()
    width = module.config.d_model

    def forward(**given: torch.Tensor) -> list[torch.Tensor]:
        pairs = []
        for kind in ("decoder", "encoder"):
            past = [t for name, t in given.items() if f"_{kind}_" in name and "past" in name]
            pairs.append(list(zip(past[::2], past[1::2], strict=True)))
        own, read = (transformers.DynamicCache(pair) for pair in pairs)
        cache = transformers.EncoderDecoderCache(own, read)
        cache.is_updated = dict.fromkeys(range(len(pairs[1])), True)
        keys = pairs[1][0][0]
        names = ("input_ids", "attention_mask", "position_ids", "encoder_attention_mask")
        taken = {name: given[name] for name in names if name in given}
        # Attention asks whether there is an encoder, and for its length; its keys are in the cache.
        absent = keys.new_zeros((keys.shape[0], keys.shape[2], width))
        out = decoder(**taken, encoder_hidden_states=absent, past_key_values=cache, use_cache=True)
        state = out.last_hidden_state
        if getattr(module.config, "scale_decoder_outputs", False):
            state = state * width**-0.5
        logits = heads(state)
        bias = getattr(module, "final_logits_bias", None)
        logits = logits if bias is None else logits + bias
        return [logits, *(t for layer in own.layers for t in (layer.keys, layer.values))]

    module.forward = arguments(forward, list(inputs))
    names = [part.replace(".", ".decoder.") for part in found.parts]
    return Example(module, inputs, dims, ["logits", *(f"present.{name}" for name in names)])


def build(
    config: Any, *, seed: int = 0, folder: Path | None = None, opset: int = OPSET
) -> tuple[nn.Module, ir.Model, ir.Model]:
    """Returns a network with its own `forward`, and the export of its encoder and decoder."""
    auto = transformers.AutoModelForSeq2SeqLM
    if type(config) in transformers.AutoModelForSpeechSeq2Seq._model_mapping:
        auto = transformers.AutoModelForSpeechSeq2Seq
    module = network(config, seed=seed, folder=folder, auto=auto)
    found, forward = known(module), module.forward
    encoder = export(encoder_example(found), opset)
    decoder = export(decoder_example(found), opset)
    module.forward = forward
    name_dims(decoder)
    return module, encoder, decoder


def name_dims(decoder: ir.Model) -> None:
    """Writes the dims that PyTorch cannot state: the columns of the mask, the length of present."""
    graph = decoder.graph
    for value in graph.inputs:
        if value.name == "attention_mask":
            value.shape = ir.Shape(["batch", "past + seq"])
    for value in graph.outputs[1:]:
        assert value.shape is not None
        dims: list[Any] = list(value.shape)
        value.shape = ir.Shape(["batch", dims[1], "past + seq", dims[3]])


def genai_config(config: Any, encoder: ir.Model, decoder: ir.Model) -> dict[str, Any]:
    """Returns a configuration of onnxruntime-genai: both files, their inputs and outputs."""
    taken = [value.name or "" for value in encoder.graph.inputs]
    given = {value.name or "": value for value in decoder.graph.inputs}
    first = given["past_key_values.0.decoder.key"].shape
    assert first is not None
    roles = {"input_features": "audio_features"}
    own = ("input_ids", "attention_mask", "position_ids", "encoder_attention_mask")
    own_inputs = {name: name for name in own if name in given}
    return {
        "model": {
            "bos_token_id": config.bos_token_id,
            "decoder_start_token_id": config.decoder_start_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "type": config.model_type,
            "vocab_size": config.vocab_size,
            "encoder": {
                "filename": "encoder.onnx",
                "inputs": {roles.get(name, name): name for name in taken},
                "outputs": {
                    "cross_present_key_names": "present.%d.encoder.key",
                    "cross_present_value_names": "present.%d.encoder.value",
                },
            },
            "decoder": {
                "filename": "decoder.onnx",
                "head_size": first[3],
                "num_key_value_heads": first[1],
                "inputs": {
                    **own_inputs,
                    "past_key_names": "past_key_values.%d.decoder.key",
                    "past_value_names": "past_key_values.%d.decoder.value",
                    "cross_past_key_names": "past_key_values.%d.encoder.key",
                    "cross_past_value_names": "past_key_values.%d.encoder.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.decoder.key",
                    "present_value_names": "present.%d.decoder.value",
                },
            },
        },
        "search": {"do_sample": False, "num_beams": 1, "past_present_share_buffer": False},
    }


def save_folder(config: Any, encoder: ir.Model, decoder: ir.Model, folder: Path) -> None:
    """Writes both programs and their configuration.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save(encoder, folder / "encoder.onnx")
    save(decoder, folder / "decoder.onnx")
    text = json.dumps(genai_config(config, encoder, decoder), indent=4)
    (folder / "genai_config.json").write_text(text + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Exports one encoder-decoder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    options = parsed(parser, arguments, FAMILIES, "the folder to write")
    try:
        changes = dict(change(text) for text in options.changes)
        config = configuration(options.network, changes, FAMILIES, _SIZES)
        _, encoder, decoder = build(
            config,
            seed=options.seed,
            folder=folder_of(options.network),
            opset=options.opset,
        )
        save_folder(config, encoder, decoder, options.output)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for name, model in (("encoder", encoder), ("decoder", decoder)):
        weights = [value.const_value for value in model.graph.initializers.values()]
        elements = sum(tensor.size for tensor in weights if tensor is not None)
        nodes = len(list(model.graph))
        print(f"{options.output / name}.onnx: {nodes} nodes, {elements:,} elements of weights")


if __name__ == "__main__":
    main()

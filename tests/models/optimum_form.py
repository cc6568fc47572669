"""Folders in the form that Hugging Face's Optimum exports, for which it needs older transformers.

The files, their inputs and outputs, the names of these and of their dims, and the exporter (tracing
with TorchScript) are those of optimum-onnx 0.1.0. Its decoder that continues is traced with one
token, too.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers
from onnx import TensorProto, helper
from torch import nn

ROWS, SOURCE, TOKENS, PAST = 2, 11, 3, 5
Names = Sequence[str]
DIMS = {
    "encoder": {0: "batch_size", 1: "encoder_sequence_length"},
    "tokens": {0: "batch_size", 1: "decoder_sequence_length"},
    "cache": {0: "batch_size", 2: "past_decoder_sequence_length"},
    "made": {0: "batch_size", 2: "past_decoder_sequence_length + decoder_sequence_length"},
    "cross": {0: "batch_size", 2: "encoder_sequence_length"},
}


class _Called(nn.Module):
    """A network that is called with tensors in order."""

    def __init__(self, module: nn.Module, body: Any) -> None:
        super().__init__()
        self.module, self._body = module, body

    def forward(self, *tensors: Any) -> Any:
        return self._body(*tensors)


def _export(
    module: nn.Module,
    body: Any,
    inputs: Mapping[str, Any],
    outputs: Names,
    dims: Mapping[str, Any],
    path: Path,
) -> None:
    torch.onnx.export(
        # Afterwards the exporter sets the network's mode to that of what it has exported.
        _Called(module, body).eval(),
        tuple(inputs.values()),
        path,
        input_names=list(inputs),
        output_names=list(outputs),
        dynamic_axes={name: dims[name] for name in (*inputs, *outputs) if name in dims},
        opset_version=18,
        dynamo=False,
    )


def write_folder(module: Any, folder: Path) -> Path:
    """Writes the three files of an encoder-decoder of tokens, and its configuration."""
    folder.mkdir(parents=True)
    module.config.save_pretrained(folder)
    mask = torch.ones((ROWS, SOURCE), dtype=torch.int64)
    mask[1, -2:] = 0
    source = {"input_ids": torch.randint(3, 99, (ROWS, SOURCE)), "attention_mask": mask}
    encoder, decoder = module.get_encoder(), module.get_decoder()

    def encode(ids: Any, mask: Any) -> Any:
        return encoder(input_ids=ids, attention_mask=mask).last_hidden_state

    read = encode(*source.values()).detach()
    dims: dict[str, Any] = {
        **dict.fromkeys(
            (*source, "encoder_attention_mask", "last_hidden_state", "encoder_hidden_states"),
            DIMS["encoder"],
        ),
        "logits": DIMS["tokens"],
    }
    _export(module, encode, source, ["last_hidden_state"], dims, folder / "encoder_model.onnx")

    def decode(ids: Any, mask: Any, read: Any, cache: Any) -> list[Any]:
        out = decoder(
            input_ids=ids, encoder_hidden_states=read, encoder_attention_mask=mask,
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        return [module.get_output_embeddings()(out.last_hidden_state) + _bias(module)]

    def tensors(cache: Any) -> list[Any]:
        pairs = zip(
            cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True
        )
        return [t for layers in pairs for layer in layers for t in (layer.keys, layer.values)]

    def begin(mask: Any, ids: Any, read: Any) -> list[Any]:
        cache = _cache([], [])
        return [*decode(ids, mask, read, cache), *tensors(cache)]

    ids = torch.randint(3, 99, (ROWS, TOKENS))
    first = {"encoder_attention_mask": mask, "input_ids": ids, "encoder_hidden_states": read}
    made = begin(*first.values())[1:]
    kinds = [f"{kind}.{part}" for kind in ("decoder", "encoder") for part in ("key", "value")]
    parts = [f"{n}.{kind}" for n in range(len(made) // 4) for kind in kinds]
    for part in parts:
        dims[f"present.{part}"] = DIMS["cross" if "encoder" in part else "made"]
        dims[f"past_key_values.{part}"] = DIMS["cross" if "encoder" in part else "cache"]
    dims["input_ids"] = DIMS["tokens"]
    presents = [f"present.{part}" for part in parts]
    _export(module, begin, first, ["logits", *presents], dims, folder / "decoder_model.onnx")

    def go_on(mask: Any, ids: Any, *past: Any) -> list[Any]:
        own, crossed = ([past[i : i + 2] for i in range(n, len(past), 4)] for n in (0, 2))
        cache = _cache(own, crossed)
        absent = past[2].new_zeros((past[2].shape[0], past[2].shape[2], module.config.d_model))
        found = decode(ids, mask, absent, cache)
        layers = cache.self_attention_cache.layers
        return [*found, *(t for layer in layers for t in (layer.keys, layer.values))]

    following = {"encoder_attention_mask": mask, "input_ids": ids[:, :1]}
    following |= {f"past_key_values.{p}": t.detach() for p, t in zip(parts, made, strict=True)}
    own = [name for name in presents if ".decoder." in name]
    path = folder / "decoder_with_past_model.onnx"
    _export(module, go_on, following, ["logits", *own], dims, path)
    return folder


def _bias(module: Any) -> Any:
    return getattr(module, "final_logits_bias", 0.0)


def _cache(own: Any, crossed: Any) -> Any:
    made = [transformers.DynamicCache(pairs or None) for pairs in (own, crossed)]
    cache = transformers.EncoderDecoderCache(*made)
    cache.is_updated = dict.fromkeys(range(len(crossed)), True)
    return cache


def merge(folder: Path, target: Path) -> Path:
    """Writes a folder whose decoders are the branches of one If, as Optimum merges them."""
    target.mkdir()
    (target / "encoder_model.onnx").write_bytes((folder / "encoder_model.onnx").read_bytes())
    first, following = (
        onnx.load(folder / f"{name}.onnx") for name in ("decoder_model", "decoder_with_past_model")
    )
    weights: dict[str, Any] = {}
    for prefix, model in (("first.", first), ("next.", following)):
        _prefix(model.graph, prefix, weights)
    outputs = list(first.graph.output)
    made = {value.name for value in following.graph.output}
    for value in outputs:
        if value.name not in made:
            # No one reads them.
            shape = [0, *[d.dim_value or 1 for d in value.type.tensor_type.shape.dim][1:]]
            empty = helper.make_tensor("value", TensorProto.FLOAT, shape, [])
            following.graph.node.append(
                helper.make_node("Constant", [], [f"next.{value.name}"], value=empty)
            )
    branches = []
    for name, model, tag in (("no_past", first, "first."), ("with_past", following, "next.")):
        results = [copy.deepcopy(value) for value in outputs]
        for value in results:
            value.name = f"{tag}{value.name}"
        branches.append(helper.make_graph(list(model.graph.node), name, [], results))
    names = [value.name for value in outputs]
    choice = helper.make_node(
        "If", ["use_cache_branch"], names, then_branch=branches[1], else_branch=branches[0]
    )
    given = {v.name: v for v in (*first.graph.input, *following.graph.input)}
    chosen = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    graph = helper.make_graph(
        [choice], "merged", [*given.values(), chosen], outputs, list(weights.values())
    )
    made_model = helper.make_model(graph, opset_imports=first.opset_import, ir_version=9)
    onnx.save(made_model, target / "decoder_model_merged.onnx")
    return target


def _prefix(graph: Any, prefix: str, weights: dict[str, Any]) -> None:
    """Gives all values names of their own, but for inputs and equal weights."""
    by_content = {(t.data_type, tuple(t.dims), t.raw_data): t.name for t in weights.values()}
    fixed = {value.name for value in graph.input}
    names = {"": ""}
    for tensor in graph.initializer:
        key = (tensor.data_type, tuple(tensor.dims), tensor.raw_data)
        names[tensor.name] = by_content.get(key, f"{prefix}{tensor.name}")
        if key not in by_content:
            tensor.name = names[tensor.name]
            weights[tensor.name] = tensor
    for node in graph.node:
        node.name = f"{prefix}{node.name}"
        for kind in (node.input, node.output):
            kind[:] = [n if n in fixed else names.get(n, f"{prefix}{n}") for n in kind]

"""Small decoders with both kinds of cache, alone and together."""

from pathlib import Path

import llama_4bit
import numpy as np
import onnx
from _exporter import save
from onnx import helper, numpy_helper

from tests.decoders import growing


def decoder(kind: str, folder: Path) -> Path:
    """Writes the decoder whose cache is `growing` or extended `in_place`."""
    path = folder / f"{kind}.onnx"
    if kind == "growing":
        return growing(path)
    sizes = {
        "layers": 2,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 4,
        "ffn": 128,
        "seed": 1,
        "max_positions": 256,
    }
    save(llama_4bit.build(llama_4bit.Config(**sizes)), path)  # type: ignore[arg-type]
    return path


def mixed(folder: Path) -> Path:
    """Writes a decoder whose cache is extended in place, and which also keeps all tokens by Concat.

    The sum of the tokens so far turns the scores, so that a token that is missing or there twice
    changes what is chosen.
    """
    path = decoder("in_place", folder)
    model = onnx.load(path)
    graph = model.graph
    scores = next(value for value in graph.output if value.name == "logits")
    vocabulary = scores.type.tensor_type.shape.dim[2].dim_value
    last = next(node for node in graph.node if "logits" in node.output)
    last.output[0] = "scores"
    arrays = {
        "kept_axes": np.array([1, 3]),
        "sum_axes": np.array([1, 2, 3]),
        "turned_axes": np.array([1, 2]),
        "waves": 3 * np.random.default_rng(3).standard_normal(vocabulary).astype(np.float32),
    }
    graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    seen, now = (["batch", 1, length, 1] for length in ("seen", "seen_now"))
    graph.input.append(helper.make_tensor_value_info("past_key_values.2.key", 1, seen))
    graph.output.append(helper.make_tensor_value_info("present.2.key", 1, now))
    graph.node.extend(
        [
            helper.make_node("Cast", ["input_ids"], ["new_numbers"], to=1),
            helper.make_node("Unsqueeze", ["new_numbers", "kept_axes"], ["new_kept"]),
            helper.make_node(
                "Concat", ["past_key_values.2.key", "new_kept"], ["present.2.key"], axis=2
            ),
            helper.make_node(
                "ReduceSum", ["present.2.key", "sum_axes"], ["total_kept"], keepdims=0
            ),
            helper.make_node("Unsqueeze", ["total_kept", "turned_axes"], ["turned_by"]),
            helper.make_node("Mul", ["turned_by", "waves"], ["angles"]),
            helper.make_node("Sin", ["angles"], ["turned"]),
            helper.make_node("Add", ["scores", "turned"], ["logits"]),
        ]
    )
    for number, node in enumerate(graph.node):
        node.name = node.name or f"kept/{number}"
    onnx.save(model, path)
    return path

"""Directories of small models: what reads data, parameters and tokenizers on the command line."""

from pathlib import Path

import numpy as np
import onnx
from onnx import parser

from onnxpar import LossKind, LossSpec, OptimizerKind, TrainingSpec, shard_model

_HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
_MODELS = {
    "flat": f"""
    net (float[batch, 64] x) => (float[batch, 10] logits)
    <float[64, 10] w = {{{", ".join(["0.5"] * 640)}}}> {{ logits = MatMul(x, w) }}
    """,
    "words": f"""
    net (int64[batch, seq] ids) => (float[batch, seq, 16] logits)
    <float[16, 4] e = {{{", ".join(["0.5"] * 64)}}}, float[4, 16] w = {{{", ".join(["1"] * 64)}}}>
    {{ rows = Gather(e, ids) logits = MatMul(rows, w) }}
    """,
    "generator": f"""
    net (int64[batch, seq] input_ids, float[batch, 1, past, 4] past)
        => (float[batch, seq, 258] logits, float[batch, 1, total, 4] present)
    <float[258, 4] e = {{{", ".join(["0.5"] * 1032)}}},
     float[4, 258] w = {{{", ".join(str(n % 258) for n in range(1032))}}}, int64[1] axis = {{1}}>
    {{ rows = Gather(e, input_ids) kept = Unsqueeze(rows, axis)
       present = Concat<axis = 2>(past, kept) logits = MatMul(rows, w) }}
    """,
}


def make(name: str, case: Path) -> None:
    """Writes the directory of a model, and four samples for `flat`, to a folder."""
    onnx.save(parser.parse_model(_HEAD + _MODELS[name]), case / f"{name}.onnx")
    loss = LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY)
    training = TrainingSpec(loss, OptimizerKind.SGD)
    shard_model(case / f"{name}.onnx", "dp=1", case / name, training=training)
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    np.savez(case / "samples.npz", x=x, labels=np.arange(4))


def trained_on(name: str, data: str, case: Path) -> list[str]:
    """The command that trains a model for a step."""
    more = ["--lr", "0.1", "--batch-size", "2", "--steps", "1"]
    return ["train", str(case / name), "--data", data.replace("{}", str(case)), *more]


def generator(case: Path) -> None:
    """Writes the directory of a model that generates tokens, 258 of them, to a folder."""
    model = case / "generator.onnx"
    onnx.save(parser.parse_model(_HEAD + _MODELS["generator"]), model)
    shard_model(model, "dp=1", case / "generator", states={"past": "present"})

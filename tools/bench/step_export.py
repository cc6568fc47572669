"""Writes a network of tools/bench/step_networks.py as ONNX, in one of the forms that people export.

    python tools/bench/step_export.py gpt dynamo OUT.onnx 4 512 8 128 8192

The numbers are the sizes of the network. The forms are `export` (models/export_torch.py), `dynamo`
(`torch.onnx.export` as it is by default), `raw` (with `optimize=False`) and `legacy`
(`dynamo=False`).
"""

# mypy: ignore-errors
# PyTorch is installed only where this is measured, and its types are not strict.

import logging
import sys
import warnings
from pathlib import Path

import onnx_ir as ir
import torch
from step_networks import network

from onnxpar.api.pytorch.export_module import Example, export, plain_export, save

TRACED = 3
"""The batch at which a network is traced; its dim stays open."""


def example(name: str, sizes: tuple[int, ...]) -> Example:
    """The network and an input of it."""
    if name == "mlp":
        key, data = "x", torch.zeros(TRACED, 1, 28, 28)
    else:
        key, data = "input_ids", torch.zeros(TRACED, sizes[3], dtype=torch.int64)
    return Example(network(name, sizes), {key: data}, {key: {0: "batch"}})


def write(name: str, form: str, path: Path, sizes: tuple[int, ...]) -> None:
    """Writes the network in a form."""
    made = example(name, sizes)
    if form == "export":
        save(export(made), path)
    elif form == "legacy":
        ((key, data),) = made.inputs.items()
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                made.module,
                (data,),
                str(path),
                dynamo=False,
                input_names=[key],
                output_names=["logits"],
                dynamic_axes={key: {0: "batch"}, "logits": {0: "batch"}},
            )
    else:
        model = plain_export(made, optimize=form == "dynamo")
        model.graph.outputs[0].name = "logits"
        ir.save(model, path)


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], Path(sys.argv[3]), tuple(int(n) for n in sys.argv[4:]))

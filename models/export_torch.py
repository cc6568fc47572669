"""Exports a PyTorch module to ONNX with every parameter under its own name.

    python models/export_torch.py package.module:function -o model.onnx

`function` takes nothing and returns an `Example` of `onnxpar.api.pytorch.export_module`: the
module, inputs to trace it with and the names of their open dims.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onnxpar.api.pytorch.export_module import OPSET, Example, export, save


def load_function(name: str) -> Callable[[], Any]:
    """Returns `function` of `package.module:function`; the current folder is searched too.

    Raises:
        ValueError: There is no such function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{name}: expected package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from None
    if not callable(found):
        raise ValueError(f"{name}: expected a function, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def main() -> None:
    """Exports the module that the user's function returns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("function", help="package.module:function that returns an Example")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the .onnx file to write")
    parser.add_argument("--opset", type=int, default=OPSET, help=f"default {OPSET}")
    options = parser.parse_args()
    try:
        example: Example = load_function(options.function)()
        model = export(example, options.opset)
        save(model, options.output)
    except (ValueError, AttributeError, OSError) as error:
        parser.error(str(error))
    report(example.module, model, options.output)


def report(module: torch.nn.Module, model: ir.Model, output: Path) -> None:
    """Prints a summary, and the parameters that are not in the graph."""
    own = dict(module.named_parameters())
    missing = [name for name in own if name not in model.graph.initializers]
    elements = sum(own[name].numel() for name in own if name not in missing)
    print(
        f"{output}: {len(list(model.graph))} nodes, {len(own) - len(missing)} of {len(own)} "
        f"parameters by name, {elements:,} elements"
    )
    for name in missing:
        print(f"not used by the outputs: {name}")


if __name__ == "__main__":
    main()

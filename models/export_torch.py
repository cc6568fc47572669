"""Exports a PyTorch module to ONNX with every parameter under its own name.

    python models/export_torch.py package.module:function -o model.onnx

`function` takes nothing and returns an `Example`: the module, inputs to trace it with and the names
of their open dims. From Python, `export(Example(...))` returns the model.

`torch.onnx.export` by default folds a transposed weight into a nameless initializer, makes one
initializer of all that are equal, and folds BatchNormalization into the convolution before it. A
model so treated computes the same, but cannot be trained as it was. Here the graph is simplified by
the same passes (onnxscript's optimizer), but parameters and buffers are graph *inputs* meanwhile,
of which nothing can be folded, merged or fused away. They become initializers again afterwards,
under the names of `state_dict()` and laid out as there. The price is one Transpose for each
`nn.Linear`, which onnxruntime computes with the product.

Parameters that require no gradient are marked as buffers, which `onnxpar shard --train` does not
train. Nodes are named by their module: `/h.0/attn/c_attn/Gemm`.
"""

import argparse
import collections
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import torch
from _exporter import EXTERNAL_BYTES, IR_VERSION, weight_bytes

OPSET = 20
"""The default: what PyTorch's exporter writes without rewriting (18) brought to Gelu's opset."""

WHOLE_OPSET = 23
"""The first with Attention, RMSNormalization and RotaryEmbedding, which stay whole then."""

_SCOPES = "pkg.torch.onnx.name_scopes"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Metadata keys that PyTorch's exporter writes."""


@dataclass(frozen=True)
class Example:
    """A module and what is needed to trace it.

    Attributes:
        module: In the mode to export: after `train()`, Dropout drops.
        inputs: Keyword arguments of `forward` by name, tensors. A dim that is named in `dims` must
            be 2 or more: PyTorch takes 0 and 1 for constants. Sizes of different symbols must
            differ, and differ from the module's own sizes.
        dims: For each input, the symbol of each open dim: `{"input_ids": {0: "batch", 1: "seq"}}`.
        outputs: Names for the leading outputs; further ones are dropped.
        ranges: Least and greatest value of a symbol, where not every size from 2 is legal.
    """

    module: torch.nn.Module
    inputs: Mapping[str, torch.Tensor]
    dims: Mapping[str, Mapping[int, str]]
    outputs: Sequence[str] = ("logits",)
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)


def export(example: Example, opset: int = OPSET) -> ir.Model:
    """Returns the module as ONNX, every parameter that it uses by name.

    Args:
        example: The module and its inputs. With more outputs than names, the others are dropped.
        opset: Version of the default operator domain, 18 or more.

    Raises:
        ValueError: A dim is of no input, or there are more names than outputs.
        torch.onnx.OnnxExporterError: PyTorch cannot export it.
    """
    for name in example.dims:
        if name not in example.inputs:
            raise ValueError(f"dims of {name!r}: expected one of {', '.join(example.inputs)}")
    module = example.module
    model = _translate(example, opset)
    graph = model.graph
    if len(graph.outputs) < len(example.outputs):
        raise ValueError(
            f"{len(example.outputs)} names for outputs, of which there are {len(graph.outputs)}"
        )
    del graph.outputs[len(example.outputs) :]
    for value, name in zip(graph.outputs, example.outputs, strict=True):
        value.name = name
    _canonical_names(graph, module)
    _simplify(model, frozenset(module.state_dict()))
    for name, parameter in module.named_parameters():
        if name in graph.initializers and not parameter.requires_grad:
            graph.initializers[name].metadata_props[_KIND] = "BUFFER"
    _name_nodes(graph)
    model.ir_version = IR_VERSION
    model.producer_name = "export_torch"
    return model


def save(model: ir.Model, path: Path) -> None:
    """Writes the model; more than 16 MiB of weights go to `<path>.data`.

    Raises:
        OSError: The file cannot be written.
    """
    large = weight_bytes(model) > EXTERNAL_BYTES
    ir.save(model, path, external_data=f"{path.name}.data" if large else None)


def _translate(example: Example, opset: int) -> ir.Model:
    """PyTorch's own translation, nothing simplified."""
    symbols = {}
    for dims in example.dims.values():
        for symbol in dims.values():
            least, most = example.ranges.get(symbol, (None, None))
            symbols[symbol] = torch.export.Dim(symbol, min=least, max=most)
    shapes = {
        name: {axis: symbols[s] for axis, s in example.dims.get(name, {}).items()}
        for name in example.inputs
    }
    with warnings.catch_warnings(), _silent("torch.onnx", "torch.export"):
        # Of PyTorch's internals, and of modules that are exported in training mode, as they may.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            example.module,
            (),
            kwargs=dict(example.inputs),
            dynamic_shapes=shapes,
            input_names=list(example.inputs),
            opset_version=opset,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    model: ir.Model = program.model
    found = model.opset_imports.get("", 0)
    if found != opset:
        raise ValueError(f"opset {opset}: PyTorch wrote opset {found}")
    return model


@contextmanager
def _silent(*names: str) -> Iterator[None]:
    """Lets no warning of these loggers through: of packages that the module may not need."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _canonical_names(graph: ir.Graph, module: torch.nn.Module) -> None:
    """Gives a tensor that has several names the one of `named_parameters()`."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        wanted = first.get(id(tensor), name)
        if wanted != name and name in graph.initializers and wanted not in graph.initializers:
            graph.initializers[name].name = wanted


def _simplify(model: ir.Model, kept: frozenset[str]) -> None:
    """Folds constants and fuses nodes; initializers of the names given are out of reach."""
    graph = model.graph
    held = {}
    for name in [n for n in graph.initializers if n in kept]:
        value = graph.initializers.pop(name)
        held[name] = value.const_value
        value.const_value = None
        graph.inputs.append(value)
    onnxscript.optimizer.optimize_ir(model, num_iterations=4)
    for value in [v for v in graph.inputs if v.name in held]:
        graph.inputs.remove(value)
        if value.uses():
            assert value.name is not None
            value.const_value = held[value.name]
            graph.register_initializer(value)


def _name_nodes(graph: ir.Graph) -> None:
    """Names each node by the module that it came from and its operator, as `/h.0/ln_1/Mul_1`."""
    counts: collections.Counter[str] = collections.Counter()
    for node in graph.all_nodes():
        scopes = _scopes(node)
        base = "/".join(["", *scopes, node.op_type])
        counts[base] += 1
        node.name = base if counts[base] == 1 else f"{base}_{counts[base] - 1}"


def _scopes(node: ir.Node) -> list[str]:
    """Returns the modules around a node, outermost first, each relative to the one before."""
    text = node.metadata_props.get(_SCOPES, "[]")
    names = [part.strip().strip("'\"") for part in text.strip("[]").split(",")]
    found, last = [], ""
    for name in names[:-1]:
        # PyTorch's name for what belongs to no module is not a path.
        if name.isidentifier() and name.startswith("_empty_nn_module_stack"):
            continue
        if name and name != last:
            found.append(name.removeprefix(f"{last}."))
            last = name
    return found


def load_function(name: str) -> Callable[[], Any]:
    """Returns `function` of `package.module:function`; the current folder is searched too.

    Raises:
        ValueError: There is none.
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
    """Exports what a function of the user's returns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("function", help="package.module:function that returns an Example")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the .onnx file to write")
    parser.add_argument("--opset", type=int, default=OPSET, help=f"default {OPSET}")
    options = parser.parse_args()
    try:
        example = load_function(options.function)()
        if not isinstance(example, Example):
            # The command runs this file as __main__, whose Example is another class.
            example = Example(**{f: getattr(example, f) for f in Example.__dataclass_fields__})
        model = export(example, options.opset)
        save(model, options.output)
    except (ValueError, AttributeError, OSError) as error:
        parser.error(str(error))
    report(example.module, model, options.output)


def report(module: torch.nn.Module, model: ir.Model, output: Path) -> None:
    """Prints what was written, and the parameters that the graph does not have."""
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

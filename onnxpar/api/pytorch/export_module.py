"""Exports a PyTorch module to ONNX with every parameter under its own name.

By default, `torch.onnx.export` folds a transposed weight into a nameless initializer, merges equal
initializers, and folds BatchNormalization into the convolution before it. The resulting model
computes the same, but cannot be trained like the original. Here the same passes (onnxscript's
optimizer) simplify the graph. While they run, parameters and buffers are graph *inputs*, so they
cannot be folded, merged or fused. Afterwards they become initializers again, with the names and
layouts of `state_dict()`. The price is one Transpose for each `nn.Linear`, which onnxruntime
computes with the product.

Each initializer is marked in PyTorch's own metadata. PARAMETER marks parameters of the module that
require a gradient, including scalars. BUFFER marks everything else: buffers, parameters that
require no gradient, and what PyTorch makes itself (slopes, masks, the ones of a norm without a
scale). `onnxpar shard --train` trains the PARAMETERs. Nodes are named by their module:
`/h.0/attn/c_attn/Gemm`.

`plain_export` returns the plain result of PyTorch, for comparison.
"""

import collections
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnx_shape_inference import infer_symbolic_shapes
from onnxscript import rewriter
from torch.export.graph_signature import ConstantArgument, OutputKind

IR_VERSION = 11
"""The first with multi-device fields."""

EXTERNAL_BYTES = 16 * 2**20
"""Models with more bytes of weights than this store them in a file beside the `.onnx`."""

OPSET = 20
"""The default: the opset of Gelu; without conversion, PyTorch's exporter writes opset 18."""

ATTENTION_OPSET = 23
"""The first with Attention, RMSNormalization and RotaryEmbedding, which are then single nodes."""

_SCOPES = "pkg.torch.onnx.name_scopes"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Metadata keys that PyTorch's exporter writes."""


@dataclass(frozen=True)
class Example:
    """A module and what is needed to trace it.

    Attributes:
        module: In the mode to export: after `train()`, Dropout drops.
        inputs: Keyword arguments of `forward` by name, tensors. A dot in a name is an underscore in
            the argument's. A dim that is named in `dims` must be 2 or more: PyTorch treats 0 and 1
            as constants. Sizes of different symbols must differ from one another and from the
            module's own sizes.
        dims: For each input, the symbol of each open dim: `{"input_ids": {0: "batch", 1: "seq"}}`.
        outputs: Names for the first outputs; the others are dropped. If there are none, all are
            kept, as `output`, `output_1` and so on.
        ranges: Least and greatest value of a symbol, if not every size from 2 is legal.
    """

    module: torch.nn.Module
    inputs: Mapping[str, torch.Tensor]
    dims: Mapping[str, Mapping[int, str]]
    outputs: Sequence[str] = ("logits",)
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """How a module packs the tensors that it returns.

    Attributes:
        spec: PyTorch's description of tuples, dicts and more.
        places: For each leaf the number of its output, or None if the module returns None there.
    """

    spec: Any
    places: tuple[int | None, ...]

    def packed(self, tensors: Sequence[Any]) -> Any:
        """Returns the tensors of all outputs as the module returns them."""
        leaves = [None if place is None else tensors[place] for place in self.places]
        return torch.utils._pytree.tree_unflatten(leaves, self.spec)


def export(example: Example, opset: int = OPSET) -> ir.Model:
    """Returns the module as ONNX, with every parameter that it uses under its name.

    Args and errors are those of `export_packing`.
    """
    return export_packing(example, opset)[0]


def export_packing(example: Example, opset: int = OPSET) -> tuple[ir.Model, Results]:
    """Returns the module as ONNX, and how it packs its results.

    Args:
        example: The module and its inputs.
        opset: Version of the default operator domain, 18 or more.

    Raises:
        ValueError: A dim belongs to no input or was fixed by PyTorch, or there are more names than
            outputs.
        torch.onnx.OnnxExporterError: PyTorch cannot export it.
    """
    module = example.module
    model, results = _translate(example, optimize=False, opset=opset)
    graph = model.graph
    _own_outputs(graph)
    names = example.outputs or [f"output_{i}" if i else "output" for i in range(len(graph.outputs))]
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name
    _canonical_names(graph, module)
    if any(isinstance(part, _RECURRENT) for part in module.modules()):
        _correct_shapes(model)
    _simplify(model, frozenset(module.state_dict()))
    _mark(graph, module)
    _name_nodes(graph)
    model.ir_version = IR_VERSION
    model.producer_name = "export_torch"
    return model, results


def plain_export(example: Example, *, optimize: bool, opset: int | None = None) -> ir.Model:
    """Returns the result of `torch.onnx.export`, with only the outputs that the example names.

    Args:
        example: The module and its inputs. The names of outputs are only counted.
        optimize: Whether PyTorch simplifies the graph, as it does by default.
        opset: Version of the default operator domain; None for PyTorch's choice.

    Raises:
        ValueError: As `export`.
        torch.onnx.OnnxExporterError: PyTorch cannot export it.
    """
    return _translate(example, optimize=optimize, opset=opset)[0]


def save(model: ir.Model, path: Path) -> None:
    """Writes the model; more than 16 MiB of weights go to `<path>.data`.

    Raises:
        OSError: The file cannot be written.
    """
    weights = (value.const_value for value in model.graph.initializers.values())
    large = sum(tensor.nbytes for tensor in weights if tensor is not None) > EXTERNAL_BYTES
    ir.save(model, path, external_data=f"{path.name}.data" if large else None)


def _translate(example: Example, *, optimize: bool, opset: int | None) -> tuple[ir.Model, Results]:
    """Returns PyTorch's own translation without the outputs that have no name, and all results."""
    for name in example.dims:
        if name not in example.inputs:
            raise ValueError(f"dims of {name!r}: expected one of {', '.join(example.inputs)}")
    symbols = {}
    for dims in example.dims.values():
        for symbol in dims.values():
            least, most = example.ranges.get(symbol, (None, None))
            symbols[symbol] = torch.export.Dim(symbol, min=least, max=most)
    shapes = {
        _argument(name): {axis: symbols[s] for axis, s in example.dims.get(name, {}).items()}
        for name in example.inputs
    }
    _forget_recurrent()
    with warnings.catch_warnings(), _silent("torch.onnx", "torch.export"):
        # Warnings about PyTorch's internals, and about modules in training mode, which are allowed.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            example.module,
            (),
            kwargs={_argument(name): tensor for name, tensor in example.inputs.items()},
            dynamic_shapes=shapes,
            input_names=list(example.inputs),
            opset_version=opset,
            dynamo=True,
            optimize=optimize,
            verbose=False,
        )
    assert program is not None
    model: ir.Model = program.model
    found = model.opset_imports.get("", 0)
    if opset is not None and found != opset:
        raise ValueError(f"opset {opset}: PyTorch wrote opset {found}")
    _check_open(model.graph, example)
    exported = program.exported_program
    assert exported is not None
    results = _results(exported)
    outputs = model.graph.outputs
    if not example.outputs:
        return model, results
    if len(outputs) < len(example.outputs):
        raise ValueError(
            f"{len(example.outputs)} names for outputs, of which there are {len(outputs)}"
        )
    del outputs[len(example.outputs) :]
    return model, results


def _results(program: torch.export.ExportedProgram) -> Results:
    """Returns how a program packs its results; it gives no output for a result that is None."""
    places: list[int | None] = []
    outputs = count()
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT:
            constant = isinstance(spec.arg, ConstantArgument)
            places.append(None if constant else next(outputs))
    return Results(program.call_spec.out_spec, tuple(places))


def _own_outputs(graph: ir.Graph) -> None:
    """Gives each output a value of its own, also inputs, weights and results that come twice."""
    seen = {*graph.inputs, *graph.initializers.values()}
    for place, value in enumerate(graph.outputs):
        if value in seen:
            node = ir.node("Identity", [value])
            node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
            graph.append(node)
            graph.outputs[place] = node.outputs[0]
        seen.add(value)


def arguments(forward: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Declares a `forward` that takes keywords with these names; PyTorch asks for its signature."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(_argument(name), kind) for name in names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def _argument(name: str) -> str:
    """Returns the argument of `forward` for an input: no name in Python has a dot."""
    return name.replace(".", "_")


def _forget_recurrent() -> None:
    """Clears PyTorch's cache of how it dispatches LSTM and GRU.

    While it traces, its exporter replaces both by loops of open length. But if a module was traced
    or run before, PyTorch uses the cached entries instead, and fixes the length.
    """
    for operator in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
        operator._dispatch_cache.clear()


def _check_open(graph: ir.Graph, example: Example) -> None:
    """Raises ValueError for a dim that PyTorch has fixed without a message."""
    for value in graph.inputs:
        for axis, symbol in example.dims.get(value.name or "", {}).items():
            assert value.shape is not None
            if isinstance(size := value.shape[axis], int):
                raise ValueError(
                    f"input {value.name!r}, dim {axis} ({symbol}): expected it to stay open, got "
                    f"{size}: the module can only be traced at this size"
                )


@contextmanager
def _silent(*names: str) -> Iterator[None]:
    """Suppresses warnings of these loggers, about packages that the module may not need."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_RECURRENT = (torch.nn.LSTM, torch.nn.GRU)


def _correct_shapes(model: ir.Model) -> None:
    """Opens dims after LSTM and GRU for which PyTorch stored the traced length.

    Otherwise the output would have that length, and constants could be folded from it.
    """
    dims = [dim for value in model.graph.inputs for dim in value.shape or ()]
    symbols = {str(dim.value) for dim in dims if isinstance(dim, ir.SymbolicDim)}
    values = [value for node in model.graph for value in node.outputs]
    stored = [value.shape for value in values]
    for value in values:
        value.shape = None
    infer_symbolic_shapes(model, warn_on_missing=False)
    for value, shape in zip(values, stored, strict=True):
        found = value.shape
        if shape is not None and found is not None and len(found) == len(shape):
            open_dims = [not isinstance(f, int) and f.free_symbols() <= symbols for f in found]
            pairs = zip(open_dims, found, shape, strict=True)
            shape = ir.Shape([f if is_open else s for is_open, f, s in pairs])
        value.shape = shape


def first_names(module: torch.nn.Module) -> dict[str, str]:
    """Returns for each name in `state_dict()` the first name of the same tensor."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    own = module.state_dict(keep_vars=True)
    return {name: first.get(id(tensor), name) for name, tensor in own.items()}


def _canonical_names(graph: ir.Graph, module: torch.nn.Module) -> None:
    """Gives a tensor with several names one initializer, named as in `named_parameters()`."""
    for name, wanted in first_names(module).items():
        if wanted == name or name not in graph.initializers:
            continue
        if wanted in graph.initializers:
            graph.initializers[name].replace_all_uses_with(graph.initializers[wanted])
            del graph.initializers[name]
        else:
            graph.initializers[name].name = wanted


def _mark(graph: ir.Graph, module: torch.nn.Module) -> None:
    """Marks the parameters to train, and all other initializers."""
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    for name, value in graph.initializers.items():
        value.metadata_props[_KIND] = "PARAMETER" if name in trained else "BUFFER"


def _simplify(model: ir.Model, kept: frozenset[str]) -> None:
    """Folds constants and fuses nodes, but not the initializers with these names."""
    graph = model.graph
    held = {}
    for name in [n for n in graph.initializers if n in kept]:
        value = graph.initializers.pop(name)
        held[name] = value.const_value
        value.const_value = None
        graph.inputs.append(value)
    with _fast_rules():
        onnxscript.optimizer.optimize_ir(model, num_iterations=4)
    for value in [v for v in graph.inputs if v.name in held]:
        graph.inputs.remove(value)
        if value.uses():
            assert value.name is not None
            value.const_value = held[value.name]
            graph.register_initializer(value)


@contextmanager
def _fast_rules() -> Iterator[None]:
    """Leaves out the optimizer's rules with several last nodes.

    To match such a rule, the optimizer visits all nodes for each node. For a model of 80 layers
    that takes most of an hour. There is one: it makes a Split of two Slices without steps. The
    Slices that PyTorch writes have steps.
    """
    rules = rewriter._DEFAULT_REWRITE_RULES
    one = tuple(rule for rule in rules if rule._target_pattern.has_single_output_node)
    rewriter._DEFAULT_REWRITE_RULES = one
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules


def _name_nodes(graph: ir.Graph) -> None:
    """Names each node after its module and its operator, as in `/h.0/ln_1/Mul_1`."""
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
        # PyTorch's name for nodes outside of modules is not a path.
        if name.isidentifier() and name.startswith("_empty_nn_module_stack"):
            continue
        if name and name != last:
            found.append(name.removeprefix(f"{last}."))
            last = name
    return found

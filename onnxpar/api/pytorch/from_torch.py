"""`onnxpar.from_torch`: a PyTorch module as an ONNX model that can be sharded and trained."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch

from onnxpar.api.pytorch.export_module import OPSET, Example, export
from onnxpar.core.errors import CallError, ModelError
from onnxpar.core.name_patterns import nearest

HOOKS = tuple(name for name in vars(torch.nn.Module()) if "_hooks" in name)
"""Attributes of a module that hold its hooks."""

OpenDims = Mapping[int, Any] | Sequence[Any] | None
"""The open dims of an input, as `torch.export` takes them: by dim, or one entry for each dim."""


def from_torch(
    module: torch.nn.Module,
    args: Sequence[torch.Tensor] | torch.Tensor = (),
    kwargs: Mapping[str, torch.Tensor] | None = None,
    *,
    dynamic_shapes: Mapping[str, OpenDims] | Sequence[OpenDims] | None = None,
    outputs: Sequence[str] = ("output",),
    opset: int = OPSET,
) -> ir.Model:
    """Returns a module as an ONNX model in which every tensor has its name in `state_dict()`.

    A module of Hugging Face needs no wrapper: name the inputs in `kwargs`. It is exported without
    the cache of a decoder (`models/decoder.py` exports decoders with it). The module is exported
    in its current mode: after `train()`, Dropout drops. Tied weights are one tensor under the first
    of their names; `onnxpar.state_dict` gives all names back. If the module returns a loss, name it
    in `outputs`, and train with `onnxpar shard --train --loss output:NAME`.

    Args:
        module: The module.
        args: Tensors to trace it with, as positional arguments of `forward`.
        kwargs: Further tensors by the names of arguments.
        dynamic_shapes: The open dims, as `torch.export.export` takes them: for each input, by name
            or in the order of `args`, a dict from the dim to its symbol, which is a name or a
            `torch.export.Dim`. An open dim needs a traced size of 2 or more that differs from the
            sizes of other symbols.
        outputs: Names for the first results, in order. The other results are dropped.
        opset: Version of ONNX's operators, 18 or more. 23 keeps attention as single nodes.

    Raises:
        ModelError: `module` is no nn.Module, an argument is no tensor, `outputs` is empty, a name
            is no input, a symbol is of another kind, or PyTorch fixed an open dim or has fewer
            results than names.
        torch.onnx.OnnxExporterError: PyTorch cannot export the module.
    """
    check_module(module)
    if not outputs:
        raise ModelError("outputs: expected a name for at least one result, got none")
    inputs = named_inputs(module, args, kwargs or {})
    dims, ranges = open_dims(dynamic_shapes, inputs)
    try:
        with without_cache(module):
            return export(Example(module, inputs, dims, outputs, ranges), opset)
    except ValueError as error:
        raise ModelError(f"{type(module).__name__}: {error}") from None


@contextmanager
def without_cache(module: torch.nn.Module) -> Iterator[None]:
    """Lets a module of Hugging Face return no cache, which is no tensor and cannot be exported."""
    configs = {id(c): c for part in module.modules() for c in [getattr(part, "config", None)]}
    # Only configurations of transformers have a `model_type`.
    named: list[Any] = [c for c in configs.values() if hasattr(c, "model_type")]
    found = [c for c in named if getattr(c, "use_cache", False) is True]
    for config in found:
        config.use_cache = False
    try:
        yield
    finally:
        for config in found:
            config.use_cache = True


def check_module(module: Any) -> None:
    """Raises ModelError unless this is a module whose tensors are complete."""
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if hasattr(tensor, "full_tensor"):
            raise ModelError(
                f"{type(module).__name__}: expected complete tensors, got {name!r} as a shard "
                f"({type(tensor).__name__}); give the module without FSDP"
            )


def named_inputs(
    module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Returns the traced tensors by the names of the arguments of `forward`.

    Args:
        module: The module.
        args: A tuple or list of positional arguments, or the only one.
        kwargs: Further arguments by name.

    Raises:
        ModelError: They are not those of `forward`, or one is not a tensor.
    """
    args = args if isinstance(args, tuple | list) else (args,)
    name, signature = type(module).__name__, inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ModelError(f"{name}.forward: {error}") from None
    found: dict[str, Any] = {}
    for argument, value in bound.arguments.items():
        kind = signature.parameters[argument].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ModelError(f"{name}.forward: expected named arguments, got *{argument}")
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[argument] = value
    for argument, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"{name}.forward, argument {argument!r}: expected a tensor, got "
                f"{type(value).__name__}; set other arguments in the module or with a wrapper"
            )
    return found


@contextmanager
def without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Takes away the hooks of a module, but not of its parts."""
    own = vars(module)
    kept = {name: own[name] for name in HOOKS}
    own |= {name: type(hooks)() for name, hooks in kept.items()}
    try:
        yield
    finally:
        own |= kept


def open_dims(
    given: Mapping[str, OpenDims] | Sequence[OpenDims] | None,
    inputs: Mapping[str, torch.Tensor],
) -> tuple[dict[str, dict[int, str]], dict[str, tuple[int, int | None]]]:
    """Returns the symbols of open dims by input, and the ranges of symbols that have one."""
    names = list(inputs)
    if given is None:
        return {}, {}
    if not isinstance(given, Mapping):
        if len(given) > len(names):
            raise ModelError(
                f"dynamic_shapes: expected at most {len(names)} entries, one for each of "
                f"{', '.join(names)}, got {len(given)}"
            )
        given = dict(zip(names, given, strict=False))
    dims: dict[str, dict[int, str]] = {}
    ranges: dict[str, tuple[int, int | None]] = {}
    for name, entry in given.items():
        if name not in names:
            raise ModelError(
                f"dynamic_shapes: expected one of {', '.join(names)}, got {name!r}"
                f"{nearest(name, names)}"
            )
        pairs = entry.items() if isinstance(entry, Mapping) else enumerate(entry or ())
        for dim, symbol in pairs:
            if dim not in range(rank := inputs[name].ndim):
                raise ModelError(
                    f"dynamic_shapes, input {name!r}: expected dims from 0 to {rank - 1}, got "
                    f"{dim!r}"
                )
            if symbol is None:
                continue
            if isinstance(symbol, str):
                dims.setdefault(name, {})[dim] = symbol
                continue
            least, most = getattr(symbol, "min", None), getattr(symbol, "max", None)
            text = getattr(symbol, "__name__", None)
            if text is None or least is None:
                raise ModelError(
                    f"dynamic_shapes, input {name!r}, dim {dim}: expected a name or a "
                    f"torch.export.Dim, got {symbol!r}"
                )
            dims.setdefault(name, {})[dim] = text
            ranges[text] = least, most
    return dims, ranges


def check_inputs(given: Mapping[str, torch.Tensor], example: Example) -> None:
    """Raises CallError unless the tensors of a call are of the kinds that were traced."""
    title = type(example.module).__name__
    if given.keys() != example.inputs.keys():
        raise CallError(
            f"{title}: expected the inputs with which it was traced, "
            f"{', '.join(example.inputs)}; got {', '.join(given) or 'none'}"
        )
    sizes: dict[str, tuple[int, str]] = {}
    for name, traced in example.inputs.items():
        tensor, dims = given[name], example.dims.get(name, {})
        if tensor.dtype != traced.dtype:
            raise CallError(
                f"{title}, input {name!r}: expected {traced.dtype}, as it was traced, got "
                f"{tensor.dtype}"
            )
        wanted = [dims.get(axis, size) for axis, size in enumerate(traced.shape)]
        if len(wanted) != tensor.ndim or any(
            isinstance(want, int) and want != size
            for want, size in zip(wanted, tensor.shape, strict=True)
        ):
            raise CallError(
                f"{title}, input {name!r}: expected the shape ({', '.join(map(str, wanted))}), "
                f"got {tuple(tensor.shape)}; open further dims with dynamic_shapes"
            )
        for axis, symbol in dims.items():
            size = int(tensor.shape[axis])
            least, most = example.ranges.get(symbol, (1, None))
            # An export for more than one row is right for one row, too, and PyTorch says 2.
            least = 1 if least <= 2 else least
            if size < least or (most is not None and size > most):
                raise CallError(
                    f"{title}, input {name!r}, dim {axis}: expected {symbol} "
                    f"{f'>= {least}' if most is None else f'from {least} to {most}'}, got {size}"
                )
            known, where = sizes.setdefault(symbol, (size, name))
            if known != size:
                raise CallError(
                    f"{title}, input {name!r}, dim {axis}: expected {symbol} = {known}, as in "
                    f"input {where!r}, got {size}"
                )

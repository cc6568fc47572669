"""Whether a tensor that an exporter folded from parameters can be trained in their place.

The exporter leaves the names of the values that it folded, but not their operators. A folded tensor
is trained only if these names show that each of its elements is one element of one parameter: it
was rearranged by the module's own code, or by the translation of an operator that is known to do no
more. All other folded tensors are in doubt.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.ops.operand_roles import invertible, is_weight
from onnxpar.ops.registry import Registry
from onnxpar.parameters.origin import array_of, sizes
from onnxpar.parameters.torch_metadata import (
    Signature,
    arguments_of,
    folded_from,
    function_of,
    has_factor,
    is_inner,
    target_of,
)

REARRANGING = frozenset(
    (
        "alias", "chunk", "clone", "contiguous", "detach", "flatten", "getitem", "lift_fresh_copy",
        "movedim", "numpy_T", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
        "squeeze", "swapaxes", "t", "to", "to_copy", "transpose", "type_as", "unbind", "unflatten",
        "unsafe_view", "unsqueeze", "view",
    )
)  # fmt: skip
"""Functions of PyTorch whose result has elements of the argument, each at most once."""

_PICKING = frozenset({"select", "slice"})
"""Those of them that return one part of the argument, which may overlap with other parts."""

_TRANSLATED = frozenset(
    (
        "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training", "_prelu_kernel", "addmm", "batch_norm", "bmm",
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "convolution",
        "einsum", "embedding", "expand", "group_norm", "gru", "index", "instance_norm",
        "layer_norm", "linear", "lstm", "matmul", "mm", "native_batch_norm", "native_group_norm",
        "native_layer_norm", "prelu", "repeat", "rnn_relu", "rnn_tanh",
    )
)  # fmt: skip
"""Operators of PyTorch whose translation only rearranges parameters."""

MAKING = frozenset(
    (
        "arange", "full", "full_like", "ones", "ones_like", "scalar_tensor",
        "scalar_tensor_default", "zeros", "zeros_like",
    )
)  # fmt: skip
"""Functions of PyTorch whose result does not depend on the elements of a tensor."""

_SHIFTING = "add"
_LOOK_UP = "embedding"


def functions_of(
    value: ir.Value,
    signature: Signature,
    uses: Iterable[tuple[ir.Node, int]],
    live: Collection[str],
) -> frozenset[str]:
    """Returns the functions of PyTorch with which a module computed a tensor from placeholders.

    Empty if only the translation of the reader's operator computed it. A function that was applied
    several times is named with its count, since its arguments are unknown, unless it rearranges.

    Args:
        value: The tensor.
        signature: The placeholders.
        uses: Its readers.
        live: Names of values that a run computes; only their shapes can have been folded.
    """
    made = [
        name
        for name in (value.name or "", *folded_from(value))
        if not is_inner(name)
        and name not in signature.targets
        and name not in live
        and function_of(name) not in MAKING
    ]
    if {a for node, _ in uses for a in arguments_of(node)}.isdisjoint(made):
        return frozenset()
    counts = Counter(map(function_of, made))
    return frozenset(
        function if count == 1 or function in REARRANGING else f"{function} {count} times"
        for function, count in counts.items()
    )


def doubt(
    value: ir.Value, functions: frozenset[str], parameters: Sequence[str], others: Sequence[str]
) -> str:
    """Returns why a folded tensor cannot be trained in place of its parameters; empty if it can.

    Args:
        value: The tensor.
        functions: The result of `functions_of`.
        parameters: Names in the module of the parameters from which it was computed.
        others: Names of buffers and constants from which it was computed.
    """
    names = ", ".join((*parameters, *others))
    within = {
        target_of(node)
        for node, _ in value.uses()
        if target_of(node) and value.name not in arguments_of(node)
        if target_of(node) not in _TRANSLATED or has_factor(node)
    }
    if within:
        return f"computed from {names} inside {', '.join(sorted(within))}"
    computed = functions - REARRANGING
    if not functions and not others:
        return ""
    if len(parameters) == 1:
        if computed == {_LOOK_UP} and _rows_differ(value):
            return ""
        if not computed and not others:
            return ""
        # A number was added: the difference between the parameter and the tensor stays the same.
        inner = [name for name in folded_from(value) if is_inner(name)]
        vector = sum(1 for size in sizes(value) if size > 1) <= 1
        if functions == {_SHIFTING} and not others and len(inner) == 1 and vector:
            return ""
    by = f" by {', '.join(sorted(computed))}" if computed else ""
    return f"computed from {names}{by}"


def overlap(functions: frozenset[str]) -> bool:
    """Whether the result of functions may share elements with another part of its parameter."""
    parts = functions & {"chunk", "split", "split_with_sizes", "unbind"}
    return not parts or bool(functions & _PICKING)


def order(functions: frozenset[str], value: ir.Value) -> list[str]:
    """Returns element-wise functions in the order in which they were applied, first to last.

    The order of an exponential and a negative follows from the sign of the result. Empty if the
    order is unknown, or a function cannot be inverted.
    """
    computed = functions - REARRANGING
    if not all(map(invertible, computed)):
        return []
    if computed == {"exp", "neg"}:
        array = array_of(value)
        if (array < 0).all():
            return ["exp", "neg"]
        return ["neg", "exp"] if (array > 0).all() else []
    return list(computed) if len(computed) == 1 else []


def dims(value: ir.Value, functions: frozenset[str], registry: Registry) -> int:
    """Returns how many dims the parameter had from which a tensor was folded.

    Weights of products have the dims of the parameter, and so do tensors that the module computed
    without a rearrangement. Other tensors are vectors to which the translation adds dims of size 1.
    """
    shape = sizes(value)
    if any(is_weight(node, index, registry) for node, index in value.uses()):
        return len(shape)
    if functions and not functions & REARRANGING:
        return len(shape)
    return sum(1 for size in shape if size != 1)


def _rows_differ(value: ir.Value) -> bool:
    """Whether no two rows, along the last dim, are the same."""
    rows = array_of(value).reshape(-1, sizes(value)[-1])
    return len(np.unique(rows, axis=0)) == len(rows)

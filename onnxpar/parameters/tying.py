"""Tensors that are one parameter: one of them is computed from the other."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import permutations
from math import prod

import numpy as np
import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.name_patterns import nearest
from onnxpar.graph.names import Names, names_of
from onnxpar.graph.new_nodes import constant
from onnxpar.ops.operand_roles import reshaped, transposed
from onnxpar.parameters.origin import array_of, is_floating, is_uniform, sizes

_RANKS = 5
"""Permutations are tried up to this number of dims."""

_LARGE = 64
"""The least number of elements of tensors that are not equal by accident."""


def tie(graph: ir.Graph, base: ir.Value, other: ir.Value, names: Names) -> bool:
    """Replaces an initializer by Transpose and Reshape of another one.

    Args:
        graph: The graph of both, which is changed.
        base: The initializer that stays.
        other: The one that goes.
        names: Names that new values must not have; theirs are added.

    Returns:
        Whether the two have equal elements in some order of dims; if not, nothing is changed.
    """
    found = _rearrangement(base, other)
    if found is None:
        return False
    perm, reshape = found
    made, shape = base, sizes(other)
    if perm is not None:
        made = put(graph, transposed(made, perm), base, names)
    if reshape:
        sized = constant(names.fresh(f"{base.name or ''}.sizes"), np.array(shape, np.int64))
        graph.register_initializer(sized)
        made = put(graph, reshaped(made, sized), made, names)
    other.replace_all_uses_with(made)
    del graph.initializers[other.name or ""]
    return True


def put(graph: ir.Graph, node: ir.Node, of: ir.Value, names: Names) -> ir.Value:
    """Inserts a new node right after its operand, names it, and returns its result."""
    node.name = node.outputs[0].name = names.fresh(f"{of.name or ''}.again")
    if of.dtype is not None:
        node.outputs[0].dtype = of.dtype
    maker = of.producer()
    if maker is not None:
        graph.insert_after(maker, node)
    else:
        graph.insert_before(graph[0], node)
    return node.outputs[0]


def tie_named(model: ir.Model, pairs: Sequence[str]) -> tuple[str, ...]:
    """Ties the initializers that the user names.

    Args:
        model: The model, which is changed.
        pairs: `A=B` each: B is computed from A, which is trained.

    Returns:
        A notice for each.

    Raises:
        ModelError: A pair is malformed, names no floating-point initializer, or tensors whose
            elements differ.
    """
    graph, names, notices = model.graph, names_of(model.graph, nodes=False), []
    for text in pairs:
        known = [n for n, v in graph.initializers.items() if is_floating(v)]
        first, _, second = text.partition("=")
        if not first or not second or first == second:
            raise ModelError(f"--tie {text!r}: expected two names, A=B")
        for name in (first, second):
            if name not in known:
                raise ModelError(
                    f"--tie {text!r}: expected names of floating-point initializers, got "
                    f"{name!r}{nearest(name, known)}"
                )
        a, b = graph.initializers[first], graph.initializers[second]
        if not tie(graph, a, b, names):
            shapes = f"{list(sizes(a))} and {list(sizes(b))}"
            raise ModelError(
                f"--tie {text!r}: expected tensors with equal elements, possibly transposed, "
                f"got different ones, of shapes {shapes}"
            )
        notices.append(f"{second!r} is computed from {first!r}, as --tie says")
    return tuple(notices)


def equal_tensors(values: Iterable[ir.Value]) -> list[list[ir.Value]]:
    """Returns initializers that are equal, possibly transposed, in groups of two or more.

    Tensors with fewer than `_LARGE` elements, and those whose elements are all the same, are left
    out.
    """
    # The first and the last element are the same in any order of dims.
    alike: dict[object, list[ir.Value]] = defaultdict(list)
    for value in values:
        shape = sizes(value)
        if len(shape) > 1 and prod(shape) >= _LARGE:
            flat = array_of(value).ravel()
            ends = (float(flat[0]), float(flat[-1]))
            alike[value.dtype, tuple(sorted(shape)), ends].append(value)
    groups = []
    for found in alike.values():
        while len(found) > 1:
            first, *rest = found
            if is_uniform(first):
                break
            same = [v for v in rest if _rearrangement(first, v) is not None]
            if same:
                groups.append([first, *same])
            found = [v for v in rest if v not in same]
    return groups


def _rearrangement(base: ir.Value, other: ir.Value) -> tuple[tuple[int, ...] | None, bool] | None:
    """Returns how to compute a tensor from another: the order of dims, and whether to reshape."""
    a, b = sizes(base), sizes(other)
    if base.dtype != other.dtype or prod(a) != prod(b):
        return None
    x, y = array_of(base), array_of(other)
    if np.array_equal(x.ravel(), y.ravel()):
        return None, a != b
    for perm in permutations(range(len(a))) if 1 < len(a) <= _RANKS else ():
        moved = tuple(a[i] for i in perm)
        if [s for s in moved if s != 1] == [s for s in b if s != 1] and np.array_equal(
            x.transpose(perm).ravel(), y.ravel()
        ):
            return perm, moved != b
    return None

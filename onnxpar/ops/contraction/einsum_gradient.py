"""Gradient of Einsum: for each operand, an Einsum of the cotangent and the other operands."""

from collections.abc import Sequence
from string import ascii_letters

import onnx_ir as ir

from onnxpar.ops.grad_node import GradNode

Labels = tuple[str, ...]


def einsum_gradient(
    node: GradNode,
    inputs: Sequence[Labels],
    output: Labels,
    broadcast: Sequence[frozenset[int]],
) -> Sequence[ir.Value | None]:
    """Emits the cotangents of the operands that are wanted.

    Args:
        node: The Einsum.
        inputs: Labels of the dims of each operand.
        output: Labels of the dims of the result.
        broadcast: For each operand the positions of its dims of size 1 that are broadcast.

    Raises:
        ModelError: The cotangent of a diagonal is wanted.
    """
    # A dim that is broadcast is not the loop of its label: it has one element for all its steps.
    own = [
        tuple(f"{label}:{i}:{p}" if p in ones else label for p, label in enumerate(labels))
        for i, (labels, ones) in enumerate(zip(inputs, broadcast, strict=True))
    ]
    return [
        _cotangent(node, index, inputs[index], own, output) if node.wants(index) else None
        for index in range(len(inputs))
    ]


def _cotangent(
    node: GradNode, index: int, labels: Labels, own: Sequence[Labels], output: Labels
) -> ir.Value:
    if len(set(labels)) != len(labels):
        raise node.fail(
            f"a diagonal has no gradient: operand {index} in the equation {node.attr('equation')!r}"
        )
    parts = [(node.cotangent(), output)]
    parts += [(node.input(i), names) for i, names in enumerate(own) if i != index]
    known = {label for _, names in parts for label in names}
    target = tuple(label for label in own[index] if label in known)
    dx = _product(node, parts, target)
    x = node.input(index)
    # Dims that were summed in this operand alone, or broadcast.
    missing = [p for p, label in enumerate(own[index]) if label not in known]
    if missing:
        dx = node.builder.unsqueeze(dx, missing)
    if node.shape(dx) != node.shape(x):
        dx = node.op("Expand", dx, node.builder.shape_value(x), shape=node.shape(x))
    return dx


def _product(node: GradNode, parts: Sequence[tuple[ir.Value, Labels]], target: Labels) -> ir.Value:
    """Emits the sum of products of `parts` over all labels but those of `target`."""
    dims = [(value, names) for value, names in parts if names]
    scalars = [value for value, names in parts if not names]
    found: ir.Value | None = None
    if dims:
        letters: dict[str, str] = {}
        for _, names in dims:
            for label in names:
                letters.setdefault(label, ascii_letters[len(letters)])
        terms = ["".join(letters[label] for label in names) for _, names in dims]
        result = "".join(letters[label] for label in target)
        found = dims[0][0]
        if terms != [result]:
            sizes = {
                label: size
                for value, names in dims
                for label, size in zip(names, node.shape(value), strict=True)
            }
            found = node.op(
                "Einsum",
                *(value for value, _ in dims),
                shape=[sizes[label] for label in target],
                equation=f"{','.join(terms)}->{result}",
            )
    for scalar in scalars:
        found = scalar if found is None else node.op("Mul", found, scalar)
    assert found is not None
    return found

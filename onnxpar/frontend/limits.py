"""Limits on what a file may ask for, so that a small file cannot take unbounded time or memory.

They are far above what exporters write. A file that exceeds one is refused with a message.
"""

import re
from collections.abc import Iterable, Set
from graphlib import CycleError, TopologicalSorter
from math import prod

import onnx
import onnx_ir as ir
from sympy import Integer

from onnxpar.core.errors import ModelError, SymbolError, short
from onnxpar.core.symbols import as_dim, dim_symbol
from onnxpar.core.symbols.formula_limits import MAX_OPERATIONS, MAX_TEXT, operations
from onnxpar.frontend.check_nodes import DEFAULT_DOMAINS
from onnxpar.graph.body_captures import bodies_of

MAX_CHOICES = 8
"""Arguments of `max` and `min` in a dim: their order is compared pair by pair."""
MAX_POWER = 8
"""The product of all exponents of sums and powers in a dim: they are multiplied out."""
MAX_DIGITS = 18
"""Digits of a number in a dim: sizes are 64-bit integers."""
MAX_NESTING = 8
"""Bodies inside one another: some work doubles with each level."""
MAX_BODIES = 10_000
"""Bodies, of which one inside k others counts 2**k: each takes some milliseconds."""
MAX_NODES = 1_000_000
"""Nodes that all functions of a model make."""
MAX_MADE, MAX_GROWTH = 10_000, 200
"""Nodes that functions may make: a fixed number, and a number for each node of the file.

A node costs `shard` about 1 ms. A network of 100 layers that are one function needs 100 for each.
PyTorch's exporter inlines its functions.
"""
MAX_CALLS = 64
"""Functions inside one another: names get longer with each of them."""

_LARGEST = 2**63 - 1
_CHOICE = re.compile(r"\b(?:max|min)\s*\(", re.IGNORECASE)
_POWER_OF_MORE = re.compile(r"\)\s*\*\*\s*(\d+)")


def check_dim(owner: str, text: str) -> None:
    """Raises ModelError unless a dim is a name, or an expression that can be computed quickly.

    Args:
        owner: The value that has the dim, for the message.
        text: The dim.
    """

    def refuse(reason: str) -> ModelError:
        return ModelError(f"{owner} has the dim {short(text)}, {reason}")

    if len(text) > MAX_TEXT:
        raise refuse(f"which has {len(text)} characters; expected at most {MAX_TEXT}")
    if operations(text) > MAX_OPERATIONS:
        raise refuse(f"which has more than {MAX_OPERATIONS} operations")
    check_numbers(owner, text)
    if _CHOICE.search(text) and text.count(",") >= MAX_CHOICES:
        raise refuse(f"which chooses between more than {MAX_CHOICES} sizes")
    try:
        size = as_dim(text)
    except SymbolError as error:
        raise refuse(f"which is not a size: {error}") from None
    if isinstance(size, int) and not 0 <= size <= _LARGEST:
        raise refuse(f"which is {short(size)}; expected a size from 0 to 2**63 - 1")
    # `as_dim` reads any other text as a name. For shape inference, `9**9**9` would be a number that
    # takes long to compute, `max()` a number, and `b;c` an error.
    is_name = size == dim_symbol(text)
    if is_name and "**" in text:
        raise refuse("which is not a size")
    numbers = [] if isinstance(size, int) else size.atoms(Integer)
    for number in numbers:
        if abs(number) > _LARGEST:
            raise refuse(f"which has the number {short(number)}; expected at most 2**63 - 1")
    names = _names_in(text)
    if names is None or (is_name and names != {text}):
        raise refuse(
            "expected a name or an expression of integers, names, + - * / // % **, parentheses, "
            "max, min, floor and mod"
        )


def _names_in(text: str) -> Set[str] | None:
    """Returns the names in a dim as shape inference reads it; None if it cannot."""
    try:
        return ir.SymbolicDim(text).free_symbols()
    except Exception:  # Its reader and sympy raise exceptions of several kinds.
        return None


def check_numbers(owner: str, text: str) -> None:
    """Raises ModelError if a dim has numbers or powers that take long to compute.

    Args:
        owner: The value that has the dim, for the message.
        text: The dim.
    """
    reason = None
    if any(len(digits) > MAX_DIGITS for digits in re.findall(r"\d+", text)):
        reason = f"which has a number of more than {MAX_DIGITS} digits"
    elif prod(int(exponent) for exponent in _POWER_OF_MORE.findall(text)) > MAX_POWER:
        reason = f"in which a sum or a power has an exponent above {MAX_POWER}"
    if reason is not None:
        raise ModelError(f"{owner} has the dim {short(text)}, {reason}")


def check_nesting(nodes: Iterable[ir.Node]) -> None:
    """Raises ModelError if bodies are nested too deeply, or too many of them are nested."""
    for node in nodes:
        count = _bodies_in(node, node, 0)
        if count > MAX_BODIES:
            raise ModelError(
                f"node {node.name!r} ({node.op_type}): expected at most {MAX_BODIES} bodies, where "
                f"one inside k others counts 2**k, got {count}"
            )


def _bodies_in(node: ir.Node, outermost: ir.Node, depth: int) -> int:
    """Returns the number of bodies of a node, as `MAX_BODIES` counts them."""
    count = 0
    for body in bodies_of(node).values():
        if depth == MAX_NESTING:
            raise ModelError(
                f"node {outermost.name!r} ({outermost.op_type}): it has a body inside "
                f"{MAX_NESTING} others; expected at most {MAX_NESTING - 1}"
            )
        count += 2**depth + sum(_bodies_in(inner, outermost, depth + 1) for inner in body)
    return count


def check_calls(model: ir.Model) -> None:
    """Raises ModelError if the functions of a model make too many nodes, or never end.

    Also if one has the name of a standard operator, which runtimes then understand differently, or
    is called with more operands or results than it has.
    """
    functions, file = model.functions, 0
    calls = {}
    own = {}
    for name, function in functions.items():
        if name[0] in DEFAULT_DOMAINS and onnx.defs.has(name[1]):
            raise ModelError(
                f"function {_title(name)}: expected another name than that of an operator of ONNX"
            )
        nodes = [n.op_identifier() for n in ir.traversal.RecursiveGraphIterator(function.graph)]
        calls[name] = [called for called in nodes if called in functions]
        own[name] = len(nodes) - len(calls[name])
        file += len(nodes)
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        cycle = " -> ".join(_title(name) for name in reversed(error.args[1]))
        raise ModelError(
            f"the functions of the model call each other without end: {cycle}"
        ) from None
    sizes: dict[ir.OperatorIdentifier, int] = {}
    depths: dict[ir.OperatorIdentifier, int] = {}
    for name in order:  # Called functions come first. Each call in a chain may double the size.
        sizes[name] = min(own[name] + sum(sizes[called] for called in calls[name]), MAX_NODES)
        depths[name] = 1 + max((depths[called] for called in calls[name]), default=0)
    made = dict.fromkeys(functions, 0)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        file += 1
        name = node.op_identifier()
        if name not in functions:
            continue
        for what, got, most in (
            ("operands", len(node.inputs), len(functions[name].inputs)),
            ("results", len(node.outputs), len(functions[name].outputs)),
        ):
            if got > most:
                raise ModelError(
                    f"node {node.name!r}: expected at most {most} {what}, as the function "
                    f"{_title(name)} has, got {got}"
                )
        if depths[name] > MAX_CALLS:
            raise ModelError(
                f"node {node.name!r}: function {_title(name)}: expected calls of at most "
                f"{MAX_CALLS} functions inside one another, got {depths[name]}"
            )
        made[name] += sizes[name]
    most = min(MAX_MADE + MAX_GROWTH * file, MAX_NODES)
    total = sum(made.values())
    if total > most:
        largest = max(made, key=made.__getitem__)
        raise ModelError(
            f"function {_title(largest)}: expected at most {most} nodes from functions in a model "
            f"of {file} nodes, got {min(total, MAX_NODES)}{' or more' * (total >= MAX_NODES)} once "
            f"they are inlined, {made[largest]} of them from this one"
        )


def _title(name: ir.OperatorIdentifier) -> str:
    domain, kind, overload = name
    return short("::".join([domain, kind] + [overload] * bool(overload)))

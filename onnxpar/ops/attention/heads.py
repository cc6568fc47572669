"""Attention heads as factors: how the dims of queries, keys and values are named in a rule.

A hidden dim of an operand with three dims is `(h g d)`: h heads of keys and values, g queries to
each of them (grouped-query attention, Ainslie et al., 2023), d numbers in a head. A split of h
splits queries, keys and values alike; a split of g splits the queries and repeats keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.sharding import local_size
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.padding_masks import valid_count
from onnxpar.ops.local_helpers import BOOL, iota
from onnxpar.ops.local_node import LocalNode


@dataclass(frozen=True)
class Heads:
    """The heads of an attention node.

    Attributes:
        kv: Heads of keys and values.
        groups: Query heads for each of them.
        size: Elements of a head of queries and keys.
        value_size: Elements of a head of values.
    """

    kv: int
    groups: int
    size: Dim
    value_size: Dim

    @property
    def names(self) -> str:
        """Factors of the query heads."""
        return "h g" if self.groups > 1 else "h"

    @property
    def sizes(self) -> dict[str, Dim]:
        """Sizes of the factors."""
        return {"h": self.kv, "g": self.groups, "d": self.size, "e": self.value_size}


def heads_of(view: NodeView, queries: object, keys: object) -> tuple[int, int]:
    """Returns heads of keys and values, and query heads for each.

    Raises:
        ModelError: The numbers are unknown, or one does not divide the other.
    """
    if not isinstance(queries, int) or not isinstance(keys, int) or keys < 1 or queries % keys:
        raise view.fail(
            "expected a number of query heads that is a multiple of the key heads, got "
            f"{queries} and {keys}"
        )
    return keys, queries // keys


def head_size(view: NodeView, hidden: Dim, heads: int) -> int:
    """Returns the elements of a head; ModelError where the hidden size has no such heads."""
    if not isinstance(hidden, int) or hidden % heads:
        raise view.fail(f"expected a hidden size that is a multiple of {heads} heads, got {hidden}")
    return hidden // heads


def broadcast(shape: Sequence[Dim], words: Sequence[str]) -> str:
    """Returns the text of an operand that broadcasts against dims named `words`, right-aligned."""
    kept = words[len(words) - len(shape) :]
    return " ".join("1" if size == 1 else word for size, word in zip(shape, kept, strict=True))


def local_heads(node: LocalNode) -> tuple[int, int]:
    """Returns the local heads of keys and values, and of queries."""
    keys = int(node.local_size("h"))
    groups = int(node.local_size("g")) if "g" in node.plan.rule.kinds else 1
    return keys, keys * groups


@dataclass
class Operands:
    """Collects the text of a rule's operands, those that are absent included.

    Attributes:
        view: The node.
        texts: One for each operand so far.
    """

    view: NodeView
    texts: list[str] = field(default_factory=list)

    def add(self, text: str | None = None) -> None:
        """Adds the next operand; without a text it must be replicated."""
        index = len(self.texts)
        self.texts.append((text or ".") if self.view.has(index) else "-")

    def add_broadcast(self, words: Sequence[str]) -> None:
        """Adds an operand that broadcasts against dims named `words`."""
        index = len(self.texts)
        self.add(broadcast(self.view.shape(index), words) if self.view.has(index) else None)

    def rest(self) -> str:
        """The text of all operands; those not added must be replicated."""
        while len(self.texts) < self.view.arity:
            self.add()
        return ", ".join(self.texts[: self.view.arity])


def valid_along(node: LocalNode, factor: str) -> ir.Value:
    """Returns which local places along a factor are no padding, booleans [local size]."""
    found: ir.Value | None = None
    length: Dim = 1
    for component in node.components(factor):
        size = local_size(component, node.mesh, node.table)
        count = valid_count(node.builder, component)
        here = node.op("Less", iota(node, size), count, dtype=BOOL, shape=[size])
        if found is None:
            found, length = here, size
            continue
        major = node.builder.reshape(found, [length, 1])
        both = node.op("And", major, here, shape=[length, size])
        length = length * size
        found = node.builder.reshape(both, [length])
    assert found is not None
    return found


def in_range(node: LocalNode, index: int, factors: Sequence[str], fill: int = 0) -> ir.Value:
    """Returns an operand of positions whose padding is `fill`: garbage would be looked up."""
    value = node.input(index)
    for factor in factors:
        value = node.masked(value, index, factor, fill, known_zero=node.zero[index])
    return value

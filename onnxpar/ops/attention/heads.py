"""Attention heads as factors: how the dims of queries, keys and values are named in a rule.

The hidden dim of an operand with three dims is `(h g d)`: h heads of keys and values, g query heads
for each of them (grouped-query attention, Ainslie et al., 2023), d elements in a head. Sharding h
shards queries, keys and values alike. Sharding g shards the queries and replicates keys and values.
"""

import re
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.sharding import Component
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.padding_masks import valid_count
from onnxpar.ops.local_helpers import BOOL, iota, over_components
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
    """Returns the number of key and value heads, and of query heads for each of them.

    Raises:
        ModelError: A number is missing, or the query heads are no multiple of the key heads.
    """
    if not isinstance(queries, int) or not isinstance(keys, int) or keys < 1 or queries % keys:
        raise view.fail(
            "expected a number of query heads that is a multiple of the key heads, got "
            f"{queries} and {keys}"
        )
    return keys, queries // keys


def head_size(view: NodeView, hidden: Dim, heads: int) -> int:
    """Returns the number of elements in a head.

    Raises:
        ModelError: The hidden size is unknown, or no multiple of the number of heads.
    """
    if not isinstance(hidden, int) or hidden % heads:
        raise view.fail(f"expected a hidden size that is a multiple of {heads} heads, got {hidden}")
    return hidden // heads


def present(text: str, factors: str) -> str:
    """Returns those of `factors`, names separated by spaces, that occur in the text of a rule."""
    return " ".join(f for f in factors.split() if f in re.findall(r"\w+", text))


def local_heads(node: LocalNode) -> tuple[int, int]:
    """Returns the local number of key and value heads, and of query heads."""
    keys = int(node.local_size("h"))
    groups = int(node.local_size("g")) if "g" in node.plan.rule.kinds else 1
    return keys, keys * groups


@dataclass
class Operands:
    """Collects the texts of a rule's operands; absent ones become `-`.

    Attributes:
        view: The node.
        texts: The texts of the operands so far.
    """

    view: NodeView
    texts: list[str] = field(default_factory=list)

    def add(self, *texts: str | None) -> None:
        """Adds the next operands; one without a text must be replicated."""
        for text in texts:
            self.texts.append((text or ".") if self.view.has(len(self.texts)) else "-")

    def add_broadcast(self, *words: str) -> None:
        """Adds the next operand, which broadcasts against dims named `words`."""
        index = len(self.texts)
        shape = self.view.shape(index) if self.view.has(index) else ()
        kept = words[len(words) - len(shape) :]
        self.add(
            " ".join("1" if size == 1 else word for size, word in zip(shape, kept, strict=True))
        )

    def rule(self, *results: str) -> str:
        """Returns the text of a rule without clauses.

        Args:
            *results: Texts of all results; those that the node does not have are left out.
        """
        # Operands that were not added must be replicated.
        self.add(*[None] * (self.view.arity - len(self.texts)))
        operands = self.texts[: self.view.arity]
        return f"{', '.join(operands)} -> {', '.join(results[: len(self.view.node.outputs)])}"


def valid_along(node: LocalNode, factor: str) -> ir.Value:
    """Returns whether each local element along a factor is no padding, booleans [local size]."""

    def block(component: Component, size: Dim) -> ir.Value:
        count = valid_count(node.builder, component)
        return node.op("Less", iota(node, size), count, dtype=BOOL, shape=[size])

    return over_components(node, factor, "And", block)

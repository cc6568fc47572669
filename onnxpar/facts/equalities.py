"""Sizes that a plan assumes to be equal without a proof, for the runtime to compare.

A rule gives one factor to dims of several operands, as `k` in "m k, k n -> m n", because the
operator requires that they are equal. If the model does not show it (the batches of scores and of
labels have two names), every rank shards both by one size, so they must be equal in a run.
"""

from dataclasses import dataclass

from onnxpar.core.symbols import Dim, symbols_of
from onnxpar.facts.program import Program


@dataclass(frozen=True)
class Side:
    """One dim of an operand: name of the global value, position of the dim, and its size."""

    value: str
    dim: int
    size: Dim


@dataclass(frozen=True)
class Equality:
    """Two dims that a node requires to have the same size.

    Attributes:
        node: Name of the node, the first in the model's order that needs this equality.
        op_type: Its operator.
        left: The dim of the earlier operand.
        right: The dim of the later operand.
    """

    node: str
    op_type: str
    left: Side
    right: Side


def assumed_equalities(program: Program) -> tuple[Equality, ...]:
    """Returns the equalities between operands that rules assume and that are not proved.

    Each pair of sizes is listed once. Pairs of integers are left out (shape inference has compared
    them), and so are sizes that depend on data, which are unknown before a run.
    """
    rules, table = program.rules, program.env.table
    found: dict[frozenset[Dim], Equality] = {}
    for node in program.graph:
        name = node.name or ""
        rule, view = rules.by_node[name], rules.views[name]
        first: dict[str, Side] = {}
        for index, (value, operand) in enumerate(zip(node.inputs, rule.inputs, strict=False)):
            if value is None or operand.mode:
                continue
            for dim, (size, factors) in enumerate(
                zip(view.shape(index), operand.dims, strict=True)
            ):
                if (
                    len(factors) != 1
                    or factors[0] in rule.scaled
                    or any(s not in table for s in symbols_of(size))
                ):
                    continue
                side = Side(value.name or "", dim, size)
                other = first.setdefault(factors[0], side)
                both_known = isinstance(size, int) and isinstance(other.size, int)
                if not both_known and not table.equal(size, other.size):
                    pair = frozenset((size, other.size))
                    found.setdefault(pair, Equality(name, node.op_type, other, side))
    return tuple(found.values())

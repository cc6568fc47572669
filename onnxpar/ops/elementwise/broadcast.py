"""Rules of operators that broadcast their operands against one another (numpy's rules)."""

from collections.abc import Iterable, Sequence

from onnxpar.core.errors import ModelError
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def axis_names(rank: int) -> list[str]:
    """Returns factor names for the dims of a tensor, `a b c` and so on.

    Raises:
        ModelError: The rank is above 26.
    """
    if rank > len(LETTERS):
        raise ModelError(f"expected tensors of at most {len(LETTERS)} dims, got {rank}")
    return list(LETTERS[:rank])


def broadcast_dims(left: Sequence[Dim], right: Sequence[Dim]) -> list[Dim]:
    """Returns the shape to which two shapes broadcast, as numpy does."""
    rank = max(len(left), len(right))
    one, other = ([1] * (rank - len(shape)) + list(shape) for shape in (left, right))
    return [b if a == 1 else a for a, b in zip(one, other, strict=True)]


def aligned(shape: Sequence[Dim], out: Sequence[Dim], names: Sequence[str]) -> tuple[str, set[str]]:
    """Returns the rule text of an operand broadcast to `out`, and the replicated factors.

    It may be unknown before a run whether a dim is 1 or as large as that of the output. Its factor
    must then be replicated, which is right in both cases.
    """
    words, replicated = [], set()
    offset = len(out) - len(shape)
    for size, target, name in zip(shape, out[offset:], names[offset:], strict=True):
        sharded = size == target and size != 1
        words.append(name if sharded else "1")
        if not sharded and size != 1:
            replicated.add(name)
    return " ".join(words), replicated


def aligned_operands(
    view: NodeView, indices: Iterable[int], out: Sequence[Dim], names: Sequence[str]
) -> tuple[list[str], set[str]]:
    """Returns `aligned` of several operands: the rule text of each, and all replicated factors."""
    texts, replicated = [], set[str]()
    for index in indices:
        text, fixed = aligned(view.shape(index), out, names) if view.has(index) else ("-", set())
        texts.append(text)
        replicated |= fixed
    return texts, replicated


def broadcast_rule(view: NodeView, linear: str = "") -> OpRule:
    """Returns the rule of an elementwise node.

    Args:
        view: The node.
        linear: Text of the rule's linear clause; "" for none.
    """
    out = view.out_shape()
    names = axis_names(len(out))
    texts, replicated = aligned_operands(view, range(view.arity), out, names)
    result = " ".join("1" if size == 1 else n for n, size in zip(names, out, strict=True))
    rule = f"{', '.join(texts)} -> {result}; replicated: {' '.join(sorted(replicated))}"
    return parse_rule(rule + (f"; linear: {linear}" if linear else ""))

"""Rules of operators that broadcast their operands against one another (numpy's rules)."""

from collections.abc import Sequence

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


def aligned(shape: Sequence[Dim], out: Sequence[Dim], names: Sequence[str]) -> tuple[str, set[str]]:
    """Returns the rule text of an operand broadcast to `out`, and the replicated factors.

    A dim of unknown relation to the output's (it may be 1 when the model runs) makes its factor
    whole, since only then is a copy on every device right in both cases.
    """
    words, whole = [], set()
    offset = len(out) - len(shape)
    for position, size in enumerate(shape):
        target = out[offset + position]
        name = names[offset + position]
        if size == target and size != 1:
            words.append(name)
        elif size == 1:
            words.append("1")
        else:
            words.append("1")
            whole.add(name)
    return " ".join(words), whole


def broadcast_rule(view: NodeView, linear: str = "", operands: int | None = None) -> OpRule:
    """Returns the rule of an elementwise node, `linear` being the text of its linear clause."""
    out = view.out_shape()
    names = axis_names(len(out))
    texts, whole = [], set[str]()
    for index in range(view.arity if operands is None else operands):
        if not view.has(index):
            texts.append("-")
            continue
        text, fixed = aligned(view.shape(index), out, names)
        texts.append(text)
        whole |= fixed
    result = " ".join("1" if size == 1 else n for n, size in zip(names, out, strict=True))
    rule = f"{', '.join(texts)} -> {result}"
    if whole:
        rule += f"; replicated: {' '.join(sorted(whole))}"
    if linear:
        rule += f"; linear: {linear}"
    return parse_rule(rule)

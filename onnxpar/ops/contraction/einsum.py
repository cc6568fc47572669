"""Einsum: the equation is the rule."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.core.errors import OnnxparError
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contraction.einsum_gradient import einsum_gradient
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.operator import OpDef
from onnxpar.ops.slots import HALF, Roles

_TERM = re.compile(r"([A-Za-z]*)(\.\.\.)?([A-Za-z]*)")


@dataclass(frozen=True)
class Equation:
    """An equation with a label for each dim, dims of an ellipsis included.

    Attributes:
        inputs: Labels of the dims of each operand.
        output: Labels of the dims of the result.
        sizes: Size of each label, from an operand that is not broadcast along it.
        broadcast: For each operand the positions of its dims of size 1 that are broadcast.
        unknown: Labels along which it is unknown whether an operand is broadcast.
    """

    inputs: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]
    sizes: dict[str, Dim]
    broadcast: tuple[frozenset[int], ...]
    unknown: frozenset[str]


def read_equation(view: NodeView) -> Equation:
    """Reads the equation of an Einsum node.

    Raises:
        ModelError: It does not fit the operands, or the shape of one is unknown.
    """
    text = str(view.attr("equation")).replace(" ", "")
    shapes = [view.shape(i) for i in range(view.arity)]
    left, arrow, right = text.partition("->")
    terms = [_term(view, term) for term in left.split(",")]
    if len(terms) != len(shapes):
        raise _wrong(view, f"expected {len(shapes)} terms")
    spans = [len(s) - len(a + b) for (a, _, b), s in zip(terms, shapes, strict=True)]
    if any(n < 0 or (n > 0 and not dots) for n, (_, dots, _) in zip(spans, terms, strict=True)):
        raise _wrong(view, f"expected terms for operands of {', '.join(map(str, shapes))}")
    free = max(spans)
    inputs = [
        (*before, *_free(free, span), *after)
        for (before, _, after), span in zip(terms, spans, strict=True)
    ]
    if arrow:
        before, dots, after = _term(view, right)
        output = (*before, *_free(free, free if dots else 0), *after)
    else:
        counts = Counter(label for term in terms for label in term[0] + term[2])
        output = (*_free(free, free), *sorted(n for n, count in counts.items() if count == 1))
    known = {label for labels in inputs for label in labels}
    if len(set(output)) != len(output) or not known.issuperset(output):
        raise _wrong(
            view, "expected distinct labels on the right, all of which are labels of operands"
        )
    sizes: dict[str, Dim] = {}
    for labels, shape in zip(inputs, shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
    broadcast, unknown = [], set[str]()
    for labels, shape in zip(inputs, shapes, strict=True):
        ones = set()
        for position, (label, size) in enumerate(zip(labels, shape, strict=True)):
            if size == 1 and sizes[label] != 1:
                ones.add(position)
            elif len(label) > 1 and not view.table.equal(size, sizes[label]):
                unknown.add(label)
        broadcast.append(frozenset(ones))
    return Equation(tuple(inputs), output, sizes, tuple(broadcast), frozenset(unknown))


def _term(view: NodeView, text: str) -> tuple[str, bool, str]:
    match = _TERM.fullmatch(text)
    if match is None:
        raise _wrong(view, "expected letters and at most one ellipsis in each term")
    return match[1], bool(match[2]), match[3]


def _free(count: int, span: int) -> tuple[str, ...]:
    """Labels of the last `span` dims of an ellipsis that has `count` dims in all."""
    return tuple(f"e{i}" for i in range(count - span, count))


def _wrong(view: NodeView, expected: str) -> OnnxparError:
    return view.fail(f"{expected}, got the equation {view.attr('equation')!r}")


def einsum_rule(view: NodeView) -> OpRule:
    """Einsum: labels are factors, reduced if the result lacks them; linear in each operand."""
    equation = read_equation(view)
    replicated, texts = set(equation.unknown), []
    for labels, ones in zip(equation.inputs, equation.broadcast, strict=True):
        words = list[str]()
        for position, label in enumerate(labels):
            word = label
            if position in ones or equation.sizes[label] == 1:
                word = "1"
            elif label in words:
                # A diagonal: one device alone would hold an element's row and column.
                word = f"{label}_{position}"
                replicated |= {label, word}
            words.append(word)
        texts.append(" ".join(words))
    result = ["1" if equation.sizes[label] == 1 else label for label in equation.output]
    summed = {
        label
        for label, size in equation.sizes.items()
        if size != 1 and label not in equation.output
    }
    text = f"{', '.join(texts)} -> {' '.join(result)}"
    for kind, names in (("sum", summed - replicated), ("replicated", replicated)):
        text += f"; {kind}: {' '.join(sorted(names))}"
    moves = view.arity == 1 and set(equation.inputs[0]) == set(equation.output)
    linear = ["any 0"] if moves else [f"sum {i}" for i in range(view.arity)]
    if not moves and not summed:
        linear.append(f"prod {'+'.join(map(str, range(view.arity)))}")
    return parse_rule(f"{text}; linear: {', '.join(linear)}")


def equation_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """For each operand, the equation with the cotangent in its place.

    Raises:
        ModelError: It is unknown whether a dim is broadcast, or the cotangent of a diagonal is
            wanted.
    """
    equation = read_equation(node.view)
    if equation.unknown:
        raise node.fail("a gradient needs to know whether dims of the ellipsis are broadcast")
    return einsum_gradient(node, equation.inputs, equation.output, equation.broadcast)


DEFS = (
    OpDef(
        "",
        "Einsum",
        12,
        einsum_rule,
        gradient=equation_gradient,
        keeps_zero=True,
        roles=Roles(weights=(0, 1)),
        precision=HALF,
    ),
)

"""The sharding-rule language: text <-> `OpRule`.

A rule names the loop indices (*factors*) of an operator, dim by dim, as einsum and Shardy's
`sdy.op_sharding_rule` do:

    "b m k, b k n -> b m n; sum: k; linear: sum 0, sum 1"

Operands are separated by commas. A dim is a factor (`m`), several factors that a reshape merged,
major first (`(b s)`), or `1`: a dim that is never sharded, such as one that broadcasts. An operand
may also be one sign: `.` must be replicated, `*` is taken in its current layout (the local form
does not read its elements), `-` is an optional operand that is absent.

Clauses after `;`:

    sum: k  (max:, min:, prod:)   the factor is reduced; sharding it makes the outputs without it
                                  partial, and shards the outputs that have it
    replicated: c                 the factor must not be sharded
    special: v                    sharding it needs the operator's own local form
    scaled: h                     special, with another size in each operand, such as the height of
                                  an image and of the result of a convolution: the same atoms shard
                                  each of these dims, by its own size; after `sum: h` it is reduced
    linear: sum 0+1, max 0        operands 0 and 1 together, or 0 alone, may stay partial

A factor without a clause is parallel: local results are shards of the global result.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import MappingProxyType

from onnxpar.core.errors import RuleError
from onnxpar.core.sharding import REDUCTIONS
from onnxpar.core.symbols import Dim

PARALLEL, REPLICATED, SPECIAL, SCALED = "parallel", "replicated", "special", "scaled"
ABSENT, REPLICATED_OPERAND, ANY = "-", ".", "*"
IDENTITY: Mapping[str, float | str] = {"sum": 0, "max": "lowest", "min": "highest", "prod": 1}
"""For each kind of reduction factor, the value of padding that does not change the result."""
_DIM = re.compile(r"\(([^()]*)\)|([A-Za-z_][\w]*|1)")


@dataclass(frozen=True)
class Operand:
    """The factors of one operand.

    Attributes:
        dims: For each dim the names of its factors, major first; empty for a dim that is never
            sharded.
        mode: "" for an operand with dims, else `.`, `*` or `-` (see the module's docstring).
    """

    dims: tuple[tuple[str, ...], ...] = ()
    mode: str = ""


@dataclass(frozen=True)
class OpRule:
    """The sharding rule of one node.

    Attributes:
        inputs: One operand for each input of the node.
        outputs: One operand for each output.
        kinds: Kind of each factor, in order of first appearance: parallel, replicated, special, or
            a reduction (sum, max, min, prod). Sharding a reduction factor makes the outputs that do
            not have it partial.
        linear: `(reduction, operands)`: these operands may be partial together while all others are
            replicated over the partial atoms; the outputs are then partial in the same way.
        sizes: Sizes of the factors that occur only in merged dims.
        scaled: The special or reduction factors that have another size in each operand, and are a
            dim of their own there. Where one size is needed, it is that of the first output.
        inner: For some reduction factors, the elements (of the undivided node) that the local form
            all-reduces if the factor is sharded: statistics that every device needs for its shard
            of the result.
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    kinds: Mapping[str, str]
    linear: tuple[tuple[str, frozenset[int]], ...] = ()
    sizes: Mapping[str, Dim] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()
    inner: Mapping[str, Dim] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Hashes once: rules are keys of the tables of plans."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.outputs, tuple(self.kinds.items()), self.linear))

    @property
    def factors(self) -> tuple[str, ...]:
        """Names of all factors, in order of first appearance."""
        return tuple(self.kinds)

    @property
    def splittable(self) -> tuple[str, ...]:
        """Names of the factors that may be sharded."""
        return tuple(f for f, kind in self.kinds.items() if kind != REPLICATED)


def parse_rule(text: str, sizes: Mapping[str, Dim] | None = None) -> OpRule:
    """Parses a rule.

    Args:
        text: The rule, see the module's docstring. Clauses of kinds may be empty.
        sizes: Sizes (elements) of the factors that occur only in merged dims.

    Raises:
        RuleError: The text is malformed, a clause names an unknown factor or operand, or a factor
            of the inputs is in no output and no clause.
    """
    rule = _parse(text)
    return replace(rule, sizes=MappingProxyType(dict(sizes))) if sizes else rule


@lru_cache(maxsize=4096)
def _parse(text: str) -> OpRule:
    body, *clauses = [part.strip() for part in text.split(";")]
    if body.count("->") != 1:
        raise RuleError(f"rule {text!r}: expected one '->'")
    left, right = body.split("->")
    inputs = tuple(_operand(t, text) for t in left.split(","))
    outputs = tuple(_operand(t, text) for t in right.split(","))
    kinds: dict[str, str] = {}
    for operand in (*inputs, *outputs):
        for dim in operand.dims:
            for factor in dim:
                kinds.setdefault(factor, PARALLEL)
    linear: list[tuple[str, frozenset[int]]] = []
    scaled: set[str] = set()
    for clause in clauses:
        head, colon, rest = clause.partition(":")
        head = head.strip()
        if not colon:
            raise RuleError(f"rule {text!r}: clause {clause!r} has no ':'")
        if head == "linear":
            for item in rest.split(","):
                linear.extend(_linear(item.split(), len(inputs), text))
            continue
        if head not in (REPLICATED, SPECIAL, SCALED, *REDUCTIONS):
            raise RuleError(f"rule {text!r}: unknown clause {head!r}")
        for factor in rest.split():
            if factor not in kinds:
                raise RuleError(
                    f"rule {text!r}: clause {clause!r} does not name a factor of the rule"
                )
            if head == SCALED:
                scaled.add(factor)
                if kinds[factor] in REDUCTIONS:
                    continue
            if kinds[factor] != PARALLEL:
                raise RuleError(f"rule {text!r}: factor {factor!r} has two kinds")
            kinds[factor] = SPECIAL if head == SCALED else head
    produced = [o for o in outputs if not o.mode]
    # An operand has a factor once, so this counts outputs.
    held = Counter(factor for o in produced for dim in o.dims for factor in dim)
    for factor, kind in kinds.items():
        if kind == PARALLEL and not held[factor]:
            raise RuleError(f"rule {text!r}: factor {factor!r} is in no output and no clause")
        if kind in REDUCTIONS and produced and held[factor] == len(produced):
            raise RuleError(f"rule {text!r}: reduction factor {factor!r} is in every output")
    for operand in (*inputs, *outputs):
        for names in operand.dims:
            if len(names) > 1 and scaled.intersection(names):
                raise RuleError(f"rule {text!r}: a scaled factor is in a merged dim")
    return OpRule(inputs, outputs, MappingProxyType(kinds), tuple(linear), scaled=frozenset(scaled))


def _operand(text: str, rule: str) -> Operand:
    text = text.strip()
    if text in (ABSENT, REPLICATED_OPERAND, ANY):
        return Operand(mode=text)
    dims: list[tuple[str, ...]] = []
    end = 0
    for match in _DIM.finditer(text):
        if text[end : match.start()].strip():
            raise RuleError(f"rule {rule!r}: cannot read {text!r}")
        end = match.end()
        names = match[1].split() if match[1] is not None else [match[2]]
        dims.append(tuple(n for n in names if n != "1"))
    if text[end:].strip():
        raise RuleError(f"rule {rule!r}: cannot read {text!r}")
    flat = [f for dim in dims for f in dim]
    if len(set(flat)) != len(flat):
        raise RuleError(f"rule {rule!r}: a factor appears twice in operand {text!r}")
    return Operand(tuple(dims))


def _linear(words: Sequence[str], count: int, rule: str) -> list[tuple[str, frozenset[int]]]:
    if len(words) != 2 or words[0] not in (*REDUCTIONS, "any"):
        raise RuleError(f"rule {rule!r}: expected 'linear: sum 0+1', got {' '.join(words)!r}")
    try:
        operands = frozenset(int(w) for w in words[1].split("+"))
    except ValueError:
        raise RuleError(f"rule {rule!r}: operands of 'linear' are numbers") from None
    if not all(0 <= o < count for o in operands):
        raise RuleError(
            f"rule {rule!r}: 'linear' names operand {words[1]}, but the rule has {count}"
        )
    reductions = REDUCTIONS if words[0] == "any" else (words[0],)
    return [(reduction, operands) for reduction in reductions]


def format_rule(rule: OpRule) -> str:
    """Returns text that `parse_rule` reads back as an equal rule."""

    def show(operand: Operand) -> str:
        if operand.mode:
            return operand.mode
        return " ".join(
            "1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})"
            for dim in operand.dims
        )

    text = f"{', '.join(map(show, rule.inputs))} -> {', '.join(map(show, rule.outputs))}"
    for kind in (*REDUCTIONS, REPLICATED, SPECIAL):
        names = [f for f, k in rule.kinds.items() if k == kind]
        if kind == SPECIAL:
            names = [f for f in names if f not in rule.scaled]
        if names:
            text += f"; {kind}: {' '.join(names)}"
    if rule.scaled:
        text += f"; {SCALED}: {' '.join(f for f in rule.kinds if f in rule.scaled)}"
    if rule.linear:
        parts = (f"{r} {'+'.join(map(str, sorted(ops)))}" for r, ops in rule.linear)
        text += f"; linear: {', '.join(parts)}"
    return text

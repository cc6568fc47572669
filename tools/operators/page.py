"""`docs/operators.md`: what each operator supports, and the results of its ONNX node tests."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import fill

from onnxpar.ops.operator import OpDef, written_only
from onnxpar.report.operator_table import OperatorRow, operator_table, slot_words

from .backend import CRASHED, FAILED, PASSED, WRONG, Outcome

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operators.md"
RESULTS = Path(__file__).resolve().parent / "node_tests.json"
_NODE = re.compile(r"^node '[^']*' \([^)]*\): ")
_NAMES = re.compile(r"\b_d\d+(, _d\d+)*")
_RULE = re.compile(r": \S.* -> .*$")


@dataclass(frozen=True)
class Results:
    """The results of all node tests, summed.

    Attributes:
        total: Number of tests.
        runtime: Version of onnxruntime.
        passed: Number of tests that onnxruntime passes undivided.
        shardable: Number of these that have a dim larger than 1.
        sharded: Number of these in which a node was sharded.
        plans: Number of plans that were run.
        bad: Name, status and message of every test that gave a wrong result, crashed or failed.
        sharded_by_operator: For each operator, the number of its own tests that were sharded.
        replicated_by_operator: For each operator, the number of its own tests that were not.
        reasons: `operator: reason` of tests that were not sharded, with their number.
    """

    total: int
    runtime: str
    passed: int
    shardable: int
    sharded: int
    plans: int
    bad: Sequence[Sequence[str]]
    sharded_by_operator: Mapping[str, int]
    replicated_by_operator: Mapping[str, int]
    reasons: Mapping[str, int] = field(default_factory=dict)


def summary(outcomes: Sequence[Outcome], total: int, runtime: str) -> Results:
    """Sums outcomes."""
    fine = [o for o in outcomes if o.status == PASSED]
    shardable = [o for o in fine if o.divisible]
    sharded: Counter[str] = Counter()
    replicated: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for outcome in shardable:
        alone = outcome.operators[0].split(" ")[0] if len(outcome.operators) == 1 else ""
        if alone:
            (sharded if outcome.splits else replicated)[alone] += 1
        if not outcome.splits:
            texts = [f"{op}: {_plain(why)}" for op, why in outcome.reasons]
            reasons[" / ".join(dict.fromkeys(texts[: 1 if alone else 3]))] += 1
    bad = [(o.name, o.status, o.detail) for o in outcomes if o.status != PASSED]
    return Results(
        total,
        runtime,
        len(outcomes),
        len(shardable) + sum(o.divisible for o in outcomes if o.status != PASSED),
        sum(o.splits > 0 for o in shardable),
        sum(o.plans for o in outcomes),
        bad,
        dict(sorted(sharded.items())),
        dict(sorted(replicated.items())),
        dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    )


def again(results: Results, outcomes: Sequence[Outcome]) -> Results:
    """Replaces the outcomes of tests that did not pass by new ones."""
    named = {o.name: o for o in outcomes}
    new = summary(outcomes, results.total, results.runtime)
    kept = [bad for bad in results.bad if bad[0] not in named]

    def both(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
        return dict(sorted((Counter(first) + Counter(second)).items()))

    return replace(
        results,
        sharded=results.sharded + new.sharded,
        plans=results.plans + new.plans,
        bad=[*kept, *new.bad],
        sharded_by_operator=both(results.sharded_by_operator, new.sharded_by_operator),
        replicated_by_operator=both(results.replicated_by_operator, new.replicated_by_operator),
        reasons=dict((Counter(results.reasons) + Counter(new.reasons)).most_common()),
    )


def _plain(reason: str) -> str:
    """Returns a reason without names of nodes and sizes, so that equal reasons are one."""
    return _NAMES.sub("sizes that depend on data", _RULE.sub("", _NODE.sub("", reason)))


def save(results: Results) -> None:
    """Writes the results, from which the page is made besides the table of operators."""
    RESULTS.write_text(json.dumps(asdict(results), indent=1, ensure_ascii=False) + "\n", "utf-8")


def load() -> Results:
    """Reads the results."""
    return Results(**json.loads(RESULTS.read_text("utf-8")))


def render(results: Results, rows: Sequence[OperatorRow] | None = None) -> str:
    """Returns the page."""
    rows = operator_table() if rows is None else rows
    kinds = Counter(status for _, status, _ in results.bad)
    share = 100 * results.sharded / max(results.shardable, 1)
    parts = [
        "# Operators\n",
        "<!-- Made by tools/operator_table.py; edit the operators' modules instead. -->\n",
        _INTRODUCTION,
        "## ONNX's node tests\n",
        fill(
            f"ONNX has {results.total:,} node tests. onnxruntime {results.runtime} passes "
            f"{results.passed:,} of them undivided. Each of these was sharded over 2 and over 4 "
            "ranks along the factors of its nodes (one factor over all ranks or, on 4 ranks, two "
            "factors over 2 ranks each), written as a directory, and run by all ranks: "
            f"{results.plans:,} different plans.",
            120,
        )
        + "\n",
        f"- wrong results: {kinds[WRONG]}; crashes: {kinds[CRASHED]}; refused with a message: "
        f"{kinds[FAILED]}",
        f"- sharded: {results.sharded:,} of the {results.shardable:,} tests with a dim larger "
        f"than 1 ({share:.1f} %)\n",
        "## What each operator supports\n",
        "| operator | since | rule | local form | gradient | other slots | tests sharded "
        "| not sharded |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *_operators(rows, results),
        "\n## What was not sharded, and why\n",
        "Tests with a dim larger than 1 in which no node was sharded, by reason.\n",
        "| tests | operator and reason |",
        "| --- | --- |",
        *(f"| {n} | {_cell(why)} |" for why, n in results.reasons.items()),
    ]
    if results.bad:
        parts += [
            "\n## What did not run\n",
            "| test | outcome | message |",
            "| --- | --- | --- |",
            *(
                f"| {name} | {_WORDS[status]} | {_cell(text)} |"
                for name, status, text in results.bad
            ),
        ]
    return "\n".join(parts) + "\n"


_WORDS = {FAILED: "refused", WRONG: "wrong", CRASHED: "crashed"}

_INTRODUCTION = """\
For each operator, this page gives

- the rule: which dims can be sharded, and how ([Adding an operator](add_an_operator.md) explains
  the language of rules);
- the local form: what a device computes on its shards, if this is not just the same operator;
- the gradient: whether training can differentiate the operator;
- what else its record says (`OpDef` in `onnxpar/ops/operator.py` explains each slot).

`onnxpar ops --json` prints the same for the installed version. An operator that is not listed, or
has no rule, is replaced by its ONNX function body. If ONNX has no body for it, it is replicated,
and `onnxpar inspect` names it with the reason.
"""


def _operators(rows: Sequence[OperatorRow], results: Results) -> list[str]:
    newest = {(r.domain, r.op_type): r.since_version for r in rows}
    lines = []
    for row in rows:
        name = f"{row.domain}::{row.op_type}" if row.domain else row.op_type
        key = f"{row.domain or 'ai.onnx'}::{row.op_type}"
        # The tests of an operator are listed with its newest definition.
        here = newest[row.domain, row.op_type] == row.since_version
        found = [
            by.get(key) for by in (results.sharded_by_operator, results.replicated_by_operator)
        ]
        known = here and found != [None, None]
        counts = [n or 0 for n in found] if known else ["", ""]
        cells = (name, row.since_version, row.rule, row.local, row.gradient, _further(row), *counts)
        lines.append(f"| {' | '.join(_cell(str(c)) for c in cells)} |")
    return lines


def _further(row: OperatorRow) -> str:
    """Returns the slots of a record that do not have their usual content."""
    texts = (f"{name}: {words}" for name, words in row.slots.items() if words != _USUAL[name])
    return "; ".join(texts).replace("_", " ")


_USUAL = slot_words(OpDef("", "", 1, written_only))


def _cell(text: str) -> str:
    """Returns text that does not end a cell or a line of a table."""
    return " ".join(text.split()).replace("|", "\\|")

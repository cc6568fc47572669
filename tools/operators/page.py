"""`docs/operators.md`: what each operator has, and what became of ONNX's node tests of it."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

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
    """What became of all node tests, added up.

    Attributes:
        total: How many there are.
        runtime: Version of onnxruntime.
        passed: How many onnxruntime passes undivided.
        divisible: How many of these have a dim larger than 1.
        split: How many of these were truly split.
        plans: How many plans were run.
        bad: Name, status and message of every test that gave a wrong result, crashed or failed.
        cut: For each operator how many tests of it alone were split.
        left: For each operator how many tests of it alone were not.
        reasons: `operator: reason` of what was left whole, and how many tests.
    """

    total: int
    runtime: str
    passed: int
    divisible: int
    split: int
    plans: int
    bad: Sequence[Sequence[str]]
    cut: Mapping[str, int]
    left: Mapping[str, int]
    reasons: Mapping[str, int] = field(default_factory=dict)


def summary(outcomes: Sequence[Outcome], total: int, runtime: str) -> Results:
    """Adds up outcomes."""
    fine = [o for o in outcomes if o.status == PASSED]
    divisible = [o for o in fine if o.divisible]
    cut: Counter[str] = Counter()
    left: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for outcome in divisible:
        alone = outcome.operators[0].split(" ")[0] if len(outcome.operators) == 1 else ""
        if alone:
            (cut if outcome.splits else left)[alone] += 1
        if not outcome.splits:
            told = [f"{op}: {_plain(why)}" for op, why in outcome.reasons]
            reasons[" / ".join(dict.fromkeys(told[:1] if alone else told[:3]))] += 1
    bad = [(o.name, o.status, o.detail) for o in outcomes if o.status != PASSED]
    return Results(
        total,
        runtime,
        len(outcomes),
        len(divisible) + sum(o.divisible for o in outcomes if o.status != PASSED),
        sum(o.splits > 0 for o in divisible),
        sum(o.plans for o in outcomes),
        bad,
        dict(sorted(cut.items())),
        dict(sorted(left.items())),
        dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    )


def again(results: Results, outcomes: Sequence[Outcome]) -> Results:
    """Puts new outcomes of tests that did not pass in the place of the old ones."""
    named = {o.name: o for o in outcomes}
    new = summary(outcomes, results.total, results.runtime)
    kept = [bad for bad in results.bad if bad[0] not in named]
    return replace(
        results,
        split=results.split + new.split,
        plans=results.plans + new.plans,
        bad=[*kept, *new.bad],
        cut=dict(sorted((Counter(results.cut) + Counter(new.cut)).items())),
        left=dict(sorted((Counter(results.left) + Counter(new.left)).items())),
        reasons=dict((Counter(results.reasons) + Counter(new.reasons)).most_common()),
    )


def _plain(reason: str) -> str:
    """A reason without the names of nodes and sizes, so that equal ones are told once."""
    return _NAMES.sub("sizes that depend on data", _RULE.sub("", _NODE.sub("", reason)))


def save(results: Results) -> None:
    """Writes what the page is made of besides the table of operators."""
    RESULTS.write_text(json.dumps(asdict(results), indent=1, ensure_ascii=False) + "\n", "utf-8")


def load() -> Results:
    """Reads it back."""
    return Results(**json.loads(RESULTS.read_text("utf-8")))


def render(results: Results, rows: Sequence[OperatorRow] | None = None) -> str:
    """Returns the page."""
    rows = operator_table() if rows is None else rows
    kinds = Counter(status for _, status, _ in results.bad)
    share = 100 * results.split / max(results.divisible, 1)
    parts = [
        "# Operators\n",
        "<!-- Made by tools/operator_table.py; edit the operators' modules instead. -->\n",
        _INTRODUCTION,
        "## ONNX's node tests\n",
        f"ONNX has {results.total:,} node tests, of which onnxruntime {results.runtime} passes "
        f"{results.passed:,} undivided. Each of these was cut over 2 and over 4 ranks along the "
        "factors of its nodes (one factor over all ranks, or two over some each), written as an "
        f"artifact directory and run by all ranks: {results.plans:,} different plans.\n",
        f"- wrong results: {kinds[WRONG]}; crashes: {kinds[CRASHED]}; refused with a message: "
        f"{kinds[FAILED]}",
        f"- truly split, of the {results.divisible:,} with a dim larger than 1: "
        f"{results.split:,} ({share:.1f} %)\n",
        "## What each operator has\n",
        "| operator | since | rule | local form | gradient | further slots | tests cut "
        "| left whole |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *_operators(rows, results),
        "\n## What was left whole, and why\n",
        "The tests with a dim larger than 1 in which no node was split, by reason.\n",
        "| tests | operator and reason |",
        "| --- | --- |",
        *(f"| {n} | {_cell(why)} |" for why, n in results.reasons.items()),
    ]
    if results.bad:
        parts += [
            "\n## What did not run\n",
            "| test | what | message |",
            "| --- | --- | --- |",
            *(
                f"| {name} | {_WORDS[status]} | {_cell(text)} |"
                for name, status, text in results.bad
            ),
        ]
    return "\n".join(parts) + "\n"


_WORDS = {FAILED: "refused", WRONG: "wrong", CRASHED: "crashed"}

_INTRODUCTION = """\
What onnxpar knows of each operator: which of its dims may be split (the rule; its language is in
[Adding an operator](add_an_operator.md)), what a device computes where that is more than the
same operator on its part (the local form), whether training goes through it (the gradient), and
what else its record says (`OpDef` in `onnxpar/ops/operator.py` explains each slot).
`onnxpar ops --json` prints the same of the version that is installed. An operator that stands here
with no rule, or not at all, is expanded into the function body that ONNX gives it; without one it
is replicated, and `onnxpar inspect` names it with the reason.
"""


def _operators(rows: Sequence[OperatorRow], results: Results) -> list[str]:
    newest = {(r.domain, r.op_type): r.since_version for r in rows}
    lines = []
    for row in rows:
        name = f"{row.domain}::{row.op_type}" if row.domain else row.op_type
        key = f"{row.domain or 'ai.onnx'}::{row.op_type}"
        # The tests of an operator stand beside its newest definition.
        here = newest[row.domain, row.op_type] == row.since_version
        known = here and (key in results.cut or key in results.left)
        counts = (results.cut.get(key, 0), results.left.get(key, 0)) if known else ("", "")
        cells = (name, row.since_version, row.rule, row.local, row.gradient, _further(row), *counts)
        lines.append(f"| {' | '.join(_cell(str(c)) for c in cells)} |")
    return lines


def _further(row: OperatorRow) -> str:
    """What its record says in slots that most operators leave as they are."""
    told = (f"{name}: {words}" for name, words in row.slots.items() if words != _USUAL[name])
    return "; ".join(told).replace("_", " ")


_USUAL = slot_words(OpDef("", "", 1, written_only))


def _cell(text: str) -> str:
    """Text that does not end a cell or a line of a table."""
    return " ".join(text.split()).replace("|", "\\|")

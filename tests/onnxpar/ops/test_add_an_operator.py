"""The worked example of docs/add_an_operator.md does what the page says."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxpar.core.mesh import Mesh
from onnxpar.core.rule import format_rule, parse_rule
from onnxpar.ops.operator import BY_BODY
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from onnxpar.report.operator_table import operator_table
from tests.onnxpar.ops.gradient_harness import GradCase
from tests.onnxpar.ops.op_harness import Case

PAGE = (Path(__file__).parents[3] / "docs" / "add_an_operator.md").read_text(encoding="utf-8")
MESH = Mesh((), (2, 2))


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec("\n".join(blocks("python")), namespace)
    return namespace


@pytest.fixture(scope="module")
def registry(example: dict[str, Any]) -> Registry:
    others = [d for d in REGISTRY.defs if d.op_type != "LpNormalization"]
    return Registry((*others, *example["DEFS"]))


@pytest.mark.parametrize("text", blocks("python case")[0].splitlines())
def test_the_example_shards_the_operator(text: str, registry: Registry) -> None:
    case: Case = eval(text, {"Case": Case})
    case = Case(case.node, case.inputs, sizes=case.sizes, registry=registry)
    splits = list(case.assignments(MESH))
    assert any("b" in s or "a" in s for s in splits)
    for factors in splits:
        case.check(MESH, factors)


@pytest.mark.parametrize("by_body", [False, True])
@pytest.mark.parametrize("text", blocks("python gradient")[0].splitlines())
def test_the_example_is_differentiated(
    text: str,
    by_body: bool,
    registry: Registry,
    example: dict[str, Any],
) -> None:
    if by_body:
        (definition,) = example["DEFS"]
        changed = replace(definition, gradient=BY_BODY, body=example["lp_norm_body"])
        others = [d for d in registry.defs if d is not definition]
        registry = Registry((*others, changed))
    (formula,) = re.findall(r"`(lambda torch, x: .*?)`", PAGE)
    case: GradCase = eval(text, {"GradCase": GradCase, "normalized": eval(formula)})
    replace(case, registry=registry).check()


def test_the_rule_shown_is_the_rule_made(registry: Registry) -> None:
    case = Case("y = LpNormalization<axis=1>(x)", {"x": "float[5,6,7]"}, registry=registry)
    shown = PAGE.split("```\n")[1].splitlines()[0]
    assert format_rule(case.rule) == format_rule(parse_rule(shown))


def test_the_table_shows_it(registry: Registry) -> None:
    (row,) = (r for r in operator_table(registry) if r.op_type == "LpNormalization")
    assert row.rule == "Every dim may be sharded; along the normalised dim, devices exchange norms."
    assert row.local == "The norm of the local part, all-reduced."
    assert row.gradient == "yes"

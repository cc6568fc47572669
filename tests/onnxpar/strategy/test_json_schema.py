"""The JSON Schema for editors: it is up to date, takes every strategy here, and marks mistakes."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnxpar.core.errors import OnnxparError
from onnxpar.strategy import Strategy

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "onnxpar/strategy/strategy.schema.json").read_text(encoding="utf-8"))
# A place for a number, as V, with what makes the rest of the file complete.
NUMBERS = (
    "mesh: {dp: V}", "mesh: {dp: 1, tp: V}", "mesh: V", "devices: V",
    "{devices: 1, symbols: {b: {divisor: V}}}",
    "{devices: 1, symbols: {b: {divisor: 65538, remainder: V}}}",
    "{devices: 1, symbols: {b: {min: V}}}", "{devices: 1, symbols: {b: {max: V}}}",
    "{devices: 1, parameters: {w: [V]}}", "{devices: 1, dataset: {x: [V]}}",
    "{devices: 1, nodes: {a: {in: [[V]]}}}", "{devices: 1, nodes: {a: {out: [[V]]}}}",
    "{devices: 1, nodes: {a: {in: [V]}}}", "{devices: 1, nodes: {a: {in: [[2]], split: {k: V}}}}",
    "{mesh: {dp: 1}, nodes: {a: {partial: {operands: [V], axes: [dp]}, in: [[~]]}}}",
    "{devices: 1, search: {memory: V}}", "{devices: 1, target: {memory: V}}",
    "{devices: 1, search: {sizes: {b: V}}}", "{devices: 1, search: {level: V}}",
    "{devices: 1, optimizer_parallel: {level: V}}",
    "{devices: 1, optimizer_parallel: {level: 1, threshold: V}}",
    "{devices: 1, optimizer_parallel: {level: 1, group: V}}",
    "{devices: 1, pipeline: {stages: V}}", "{devices: 1, pipeline: {stages: 1, micro_batches: V}}",
    "{devices: 1, pipeline: {stages: 1, chunks: V}}",
    "{devices: 1, pipeline: {stages: 1, assign: {a: V}}}", "{devices: 1, atoms: [V]}",
    "{devices: 1, recompute: V}", "{devices: 1, recompute: [V]}",
    "{devices: 1, recompute: {layers: V}}", "{devices: 1, recompute: {memory: V}}",
    "{devices: 1, recompute: {memory: 1, sizes: {b: V}}}", "{devices: 1, micro_batches: V}",
    "{devices: 1, pair_micro_batches: V}",
)  # fmt: skip
VALUES = (
    "-1",
    "0",
    "1",
    "65536",
    "65537",
    "1.5",
    "true",
    "[]",
    "{}",
    "8GiB",
    "0.5 KiB",
    "-1B",
    "~",
)
# What only a view of two places can refuse; and the mesh may come from elsewhere.
NEEDS_ANOTHER_PLACE = re.compile(
    r"expected a mesh axis|that divides|prime factors|expected 'chunks' of|"
    r"numbers from 0 to|expected a mesh, 'devices' or"
)
FILES = [
    *ROOT.glob("models/*.strategy.yaml"),
    *ROOT.glob("tests/experts/**/*.yaml"),
    *ROOT.glob("tests/twins/*.yaml"),
    *ROOT.glob("tools/bench/published/*.yaml"),
]
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def problem(value: Any, schema: dict[str, Any], at: str = "") -> str | None:
    """The first place where a value does not fit, for the keywords that the schema has."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        found = [problem(value, one, at) for one in schema["anyOf"]]
        return None if None in found else found[0]
    if "enum" in schema and value not in schema["enum"]:
        return at
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (kind != "boolean" and value is True)):
        return at
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return at
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get(
        "maximum", value
    ):
        return at
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            return at
        parts = [problem(v, schema.get("items", {}), f"{at}[{i}]") for i, v in enumerate(value)]
        return next((p for p in parts if p is not None), None)
    if isinstance(value, dict):
        if len(value) < schema.get("minProperties", 0):
            return at
        names = schema.get("propertyNames", {})
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, item in value.items():
            if (key not in known and rest is False) or problem(key, names) is not None:
                return f"{at}.{key}"
            wrong = problem(item, known.get(key, rest), f"{at}.{key}")
            if wrong is not None:
                return wrong
        missing = [key for key in schema.get("required", []) if key not in value]
        return f"{at}.{missing[0]}" if missing else None
    return None


def test_the_file_is_what_the_tool_writes() -> None:
    path = ROOT / "tools" / "strategy_schema.py"
    spec = importlib.util.spec_from_file_location("strategy_schema", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.strategy_schema() == SCHEMA


def test_it_takes_every_strategy_here() -> None:
    page = (ROOT / "docs/reference/strategy_file.md").read_text(encoding="utf-8")
    texts = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(FILES) > 20 and len(texts) > 5
    for text in [*texts, *(file.read_text(encoding="utf-8") for file in FILES)]:
        assert problem(yaml.safe_load(text), SCHEMA) is None, text


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("mesh: {dp: 2}\nnods: {}", ".nods"),
        ("nodes: {a: {in: [[2, 0]]}}", ".nodes.a.in"),
        ("nodes: {a: {inn: [[2]]}}", ".nodes.a.inn"),
        ("rest: nothing", ".rest"),
        ("search: {level: 3}", ".search"),
        ("symbols: {batch: {div: 2}}", ".symbols.batch.div"),
        ("pipeline: {schedule: 1f1b}", ".pipeline"),
        ("dataset: all", ".dataset"),
    ],
)
def test_it_marks_mistakes(text: str, place: str) -> None:
    found = problem(yaml.safe_load(text), SCHEMA)
    assert found is not None and found.startswith(place)


@pytest.mark.parametrize("place", NUMBERS)
def test_it_refuses_what_the_reader_refuses(place: str) -> None:
    differing = {}
    for value in VALUES:
        text = place.replace("V", value)
        said = None
        try:
            Strategy.from_text(text)
        except OnnxparError as error:
            said = str(error)
        if said is None or not NEEDS_ANOTHER_PLACE.search(said):
            marked = problem(yaml.safe_load(text), SCHEMA)
            if (said is None) != (marked is None):
                differing[text] = (said, marked)
    assert differing == {}

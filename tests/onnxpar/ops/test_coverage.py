"""No operator of ONNX is forgotten: each has a definition, or a body that is sharded instead.

Said of all opsets from the oldest that is read to the newest that onnxruntime runs.
"""

import json
from collections.abc import Iterator
from typing import Any

import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from onnxpar.cli import main
from onnxpar.frontend.load import MIN_OPSET
from onnxpar.ops.operator import BY_BODY, Missing, expanded
from onnxpar.ops.table import REGISTRY
from onnxpar.report.operator_table import operator_table, schema_bodies

NEWEST = 26
"""Newest opset of the default domain that onnxruntime 1.31 runs."""


def runs(opset: int) -> bool:
    """Whether onnxruntime loads a model of an opset."""
    text = f'<ir_version: 10, opset_import: ["": {opset}]> g (float[1] x) => (float[1] y) {{'
    model = onnx.parser.parse_model(f"{text} y = Relu(x) }}")
    try:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Fail:
        return False
    return True


def versions() -> Iterator[tuple[Any, int]]:
    """Each version of each operator that some opset that is read has, and the first such opset."""
    found: dict[str, list[Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            found.setdefault(schema.name, []).append(schema)
    for schemas in found.values():
        schemas.sort(key=lambda schema: schema.since_version)
        ends = [*(s.since_version - 1 for s in schemas[1:]), NEWEST]
        for schema, end in zip(schemas, ends, strict=True):
            first = max(MIN_OPSET, schema.since_version)
            if first <= min(end, NEWEST) and not schema.deprecated:
                yield schema, first


def test_the_newest_opset_is_the_one_that_onnxruntime_runs() -> None:
    minor = int(ort.__version__.split(".")[1])
    assert runs(NEWEST)
    assert minor != 31 or not runs(NEWEST + 1)


def test_every_operator_has_a_definition_or_a_body() -> None:
    forgotten = []
    for schema, opset in versions():
        body = schema.has_function or schema.has_context_dependent_function
        known = REGISTRY.find("", schema.name, opset) or REGISTRY.upgrades(schema.name)
        if not known and not body:
            forgotten.append(f"{schema.name} of opset {opset}")
    assert not forgotten


def test_what_is_expanded_is_listed_once() -> None:
    listed = dict(schema_bodies())
    assert "SwiGLU" in listed
    assert not {d.op_type for d in REGISTRY.defs if d.domain == ""} & set(listed)
    rows = [(row.domain, row.op_type, row.since_version) for row in operator_table()]
    assert len(rows) == len(set(rows)) == len(REGISTRY.defs) + len(listed)


@pytest.mark.parametrize("name", ["SwiGLU", "CenterCropPad", "Mean", "StringSplit", "SequenceAt"])
def test_the_command_line_lists_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--json"]) == 0
    (row,) = (r for r in json.loads(capsys.readouterr().out) if r["op_type"] == name)
    definition = REGISTRY.find("", name, onnx.defs.onnx_opset_version())
    rule, gradient = (
        (expanded, BY_BODY) if definition is None else (definition.rule, definition.gradient)
    )
    assert row["rule"] == (rule.__doc__ or "").splitlines()[0]
    assert row["gradient"] == (
        gradient.reason if isinstance(gradient, Missing) else "from its body"
    )

"""`onnxpar ops`: every definition of the registry, as a table and as JSON."""

import json

import pytest

from onnxpar.cli import main
from onnxpar.ops.table import REGISTRY
from onnxpar.report.operator_table import schema_bodies


def test_json_has_a_row_for_every_definition(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    found = [(row["domain"], row["op_type"], row["since_version"]) for row in rows]
    defined = [(d.domain, d.op_type, d.since_version) for d in REGISTRY.defs]
    bodies = [("", name, version) for name, version in schema_bodies(REGISTRY)]
    assert sorted(found) == sorted(defined + bodies)
    assert all(row[key] for row in rows for key in ("rule", "local", "gradient", "cost"))


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in lines[1:-1] if not line.startswith(" ")}
    bodies = {name for name, _ in schema_bodies(REGISTRY)}
    defined = {f"{d.domain}::{d.op_type}" if d.domain else d.op_type for d in REGISTRY.defs}
    assert names == defined | bodies
    assert lines[-1].startswith(
        f"definitions   {len(REGISTRY.defs) + len(schema_bodies(REGISTRY))}. "
    )

"""What each operator has, as plain data for `onnxpar ops`."""

from dataclasses import dataclass
from typing import Any

import onnx

from onnxpar.ops.local_node import copy_node
from onnxpar.ops.operator import FROM_RULE, ByBody, Missing, OpDef, expanded
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY

_BODY = "of its body"


@dataclass(frozen=True)
class OperatorRow:
    """One operator definition, for people and for JSON (`dataclasses.asdict`).

    Attributes:
        domain: "" for ONNX's default domain.
        op_type: Name of the operator.
        since_version: First opset version for which the definition holds.
        rule: What its sharding rule says, in one line.
        local: "copied as it is", "of its body", or what its local form does.
        gradient: "yes", "of its body", or why there is none.
        cost: "yes", or where the cost comes from.
        keeps_zero: Whether zero padding stays zero.
    """

    domain: str
    op_type: str
    since_version: int
    rule: str
    local: str
    gradient: str
    cost: str
    keeps_zero: bool


def operator_table(registry: Registry = REGISTRY) -> list[OperatorRow]:
    """Returns a row for each operator definition, by domain, name and version.

    Operators of ONNX that have no definition, and need none since ONNX gives them a body, have a
    row too.
    """
    rows = [_row(definition) for definition in registry.defs]
    rows += [_expanded_row(name, version) for name, version in schema_bodies(registry)]
    return sorted(rows, key=lambda row: (row.domain, row.op_type, row.since_version))


def schema_bodies(registry: Registry = REGISTRY) -> list[tuple[str, int]]:
    """Returns the operators that ONNX's body alone divides, each with its first such version."""
    first: dict[str, int] = {}
    for schema in _schemas():
        if not (schema.has_function or schema.has_context_dependent_function):
            continue
        if registry.find(schema.domain, schema.name, schema.since_version) is None:
            known = first.get(schema.name, schema.since_version)
            first[schema.name] = min(known, schema.since_version)
    return sorted(first.items())


def _schemas() -> list[Any]:
    """All versions of ONNX's operators, as onnx's stubs do not know them: with their bodies."""
    return [s for s in onnx.defs.get_all_schemas_with_history() if not s.domain]


def _expanded_row(name: str, version: int) -> OperatorRow:
    return OperatorRow(
        "", name, version, _first_line(expanded), _BODY, _BODY, FROM_RULE.reason, keeps_zero=False
    )


def _row(definition: OpDef) -> OperatorRow:
    return OperatorRow(
        definition.domain,
        definition.op_type,
        definition.since_version,
        _first_line(definition.rule),
        _local(definition),
        _slot(definition.gradient),
        _slot(definition.cost),
        definition.keeps_zero,
    )


def _local(definition: OpDef) -> str:
    if definition.rule is expanded:
        return _BODY
    if definition.local is copy_node:
        return "copied as it is"
    return _first_line(definition.local)


def _slot(slot: object) -> str:
    if isinstance(slot, ByBody):
        return _BODY
    return slot.reason if isinstance(slot, Missing) else "yes"


def _first_line(function: object) -> str:
    return (function.__doc__ or "").strip().split("\n")[0]

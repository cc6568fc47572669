"""What each operator has, as plain data for `onnxpar ops`."""

from dataclasses import dataclass

from onnxpar.ops.local import copy_node
from onnxpar.ops.registry import ByBody, Missing, OpDef, Registry
from onnxpar.ops.table import REGISTRY


@dataclass(frozen=True)
class OperatorRow:
    """One operator definition, for people and for JSON (`dataclasses.asdict`).

    Attributes:
        domain: "" for ONNX's default domain.
        op_type: Name of the operator.
        since_version: First opset version for which the definition holds.
        rule: What its sharding rule says, in one line.
        local: "copied as it is", or what its local form does.
        gradient: "yes", or why there is none.
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
    """Returns a row for each operator definition, by domain, name and version."""
    order = sorted(registry.defs, key=lambda d: (d.domain, d.op_type, d.since_version))
    return [_row(definition) for definition in order]


def _row(definition: OpDef) -> OperatorRow:
    return OperatorRow(
        definition.domain,
        definition.op_type,
        definition.since_version,
        _first_line(definition.rule),
        "copied as it is" if definition.local is copy_node else _first_line(definition.local),
        _slot(definition.gradient),
        _slot(definition.cost),
        definition.keeps_zero,
    )


def _slot(slot: object) -> str:
    if isinstance(slot, ByBody):
        return "of its body"
    return slot.reason if isinstance(slot, Missing) else "yes"


def _first_line(function: object) -> str:
    return (function.__doc__ or "").strip().split("\n")[0]

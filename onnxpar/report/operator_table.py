"""What each operator supports, as plain data for `onnxpar ops`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx

from onnxpar.ops.local_node import copy_node
from onnxpar.ops.operator import FROM_RULE, ByBody, Missing, OpDef, expanded
from onnxpar.ops.registry import Registry
from onnxpar.ops.slots import Kernel, Precision, Roles, no_workspace
from onnxpar.ops.table import REGISTRY

_BODY = "from its body"


@dataclass(frozen=True)
class OperatorRow:
    """One operator definition, for people and for JSON (`dataclasses.asdict`).

    Attributes:
        domain: "" for ONNX's default domain.
        op_type: Name of the operator.
        since_version: First opset version for which the definition holds.
        rule: What its sharding rule says, in one line.
        local: "copied unchanged", "from its body", or what its local form does.
        gradient: "yes", "from its body", or why there is none.
        cost: "yes", or where the cost comes from.
        keeps_zero: Whether zero padding stays zero.
        slots: The contents of the other slots, by the slot's name (`slot_words`).
    """

    domain: str
    op_type: str
    since_version: int
    rule: str
    local: str
    gradient: str
    cost: str
    keeps_zero: bool
    slots: Mapping[str, str]


def operator_table(registry: Registry = REGISTRY) -> list[OperatorRow]:
    """Returns a row for each operator definition, ordered by domain, name and version.

    ONNX operators without a definition also have a row if ONNX gives them a body.
    """
    rows = [_row(definition) for definition in registry.defs]
    rows += [_expanded_row(name, version) for name, version in schema_bodies(registry)]
    return sorted(rows, key=lambda row: (row.domain, row.op_type, row.since_version))


def schema_bodies(registry: Registry = REGISTRY) -> list[tuple[str, int]]:
    """Returns the operators that are sharded only through ONNX's body, with their first version."""
    first: dict[str, int] = {}
    for schema in _schemas():
        if not (schema.has_function or schema.has_context_dependent_function):
            continue
        if registry.find(schema.domain, schema.name, schema.since_version) is None:
            known = first.get(schema.name, schema.since_version)
            first[schema.name] = min(known, schema.since_version)
    return sorted(first.items())


def _schemas() -> list[Any]:
    """Returns all versions of ONNX's operators; onnx's type stubs lack the flags for bodies."""
    return [s for s in onnx.defs.get_all_schemas_with_history() if not s.domain]


def _expanded_row(name: str, version: int) -> OperatorRow:
    return OperatorRow(
        "",
        name,
        version,
        _first_line(expanded),
        _BODY,
        _BODY,
        FROM_RULE.reason,
        keeps_zero=False,
        slots=slot_words(OpDef("", name, version, expanded)),
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
        slot_words(definition),
    )


def _local(definition: OpDef) -> str:
    if definition.rule is expanded:
        return _BODY
    if definition.local is copy_node:
        return "copied unchanged"
    return _first_line(definition.local)


def _slot(slot: object) -> str:
    if isinstance(slot, ByBody):
        return _BODY
    return slot.reason if isinstance(slot, Missing) else "yes"


def _first_line(function: object) -> str:
    return (function.__doc__ or "").strip().split("\n")[0]


def slot_words(definition: OpDef) -> dict[str, str]:
    """Describes the slots of a record that have no field of their own in `OperatorRow`."""
    return {name: words(getattr(definition, name)) for name, words in SLOT_WORDS.items()}


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _function(value: object) -> str:
    return "none" if value is None else _first_line(value)


def _operands(indices: tuple[int, ...]) -> str:
    return ", ".join(map(str, indices)) or "none"


def _roles(roles: Roles) -> str:
    named = {
        "weight": roles.weights,
        "scale or bias": roles.vectors,
        "scale or bias, where it is a vector": roles.row_vectors,
        "running statistic": roles.statistics,
    }
    found = [f"{what}: {_operands(indices)}" for what, indices in named.items() if indices]
    found += [f"expresses a {roles.expresses}"] if roles.expresses else []
    found += ["adds a bias"] if roles.adds else []
    found += ["the operand in another layout"] if roles.rearranges else []
    return "; ".join(found) or "none"


def _memory(kernel: Kernel) -> str:
    found = ["a view of its first operand"] if kernel.view else []
    found += [f"result {output} over operand {operand}" for operand, output in kernel.over]
    found += ["a workspace"] if kernel.work is not no_workspace else []
    return ", ".join(found) or "separate memory for each result"


def _precision(precision: Precision) -> str:
    if precision.half:
        return "16 bits"
    return "as its operands" if precision.follows else "float32"


SLOT_WORDS: Mapping[str, Callable[[Any], str]] = {
    "indices": _function,
    "body": _function,
    "infer": _function,
    "values": lambda values: _yes(values is not None),
    "folding": lambda folding: "none" if folding is None else folding.exact,
    "pattern": _function,
    "reads_bodies": _yes,
    "carries_integers": _yes,
    "draws": _first_line,
    "host_operands": _operands,
    "reads_shape_only": _yes,
    "roles": _roles,
    "memory": _memory,
    "precision": _precision,
    "broadcasts": _yes,
    "windowed": _yes,
    "counts_rows": lambda pairs: ", ".join(f"{n} those of {table}" for n, table in pairs) or "none",
    "takes": lambda takes: _yes(takes is not None),
    "on_part": lambda on_part: _yes(on_part is not None),
    "branches": lambda branches: "none" if branches is None else " or ".join(branches),
    "sequence": lambda sequence: "none" if sequence is None else _first_line(sequence),
    "function": lambda function: "none" if function is None else function.name,
    "device_function": lambda function: "none" if function is None else function.name,
    "refused": _function,
    "upgrades": lambda upgrades: _operands(tuple(upgrades)),
}
"""How each of the other slots is described."""

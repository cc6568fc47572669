"""Every operator fills every slot of its record, or gives the reason for an empty one."""

import ast
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import onnx
import pytest

from onnxpar.ops.local_node import copy_node
from onnxpar.ops.operator import UNWRITTEN, ByBody, Missing, OpDef, expanded, written_only
from onnxpar.ops.slots import FLOAT32, VIEW, Precision, Roles, always
from onnxpar.ops.table import REGISTRY
from onnxpar.report.operator_table import OperatorRow, operator_table, slot_words

PACKAGE = Path(__file__).parents[3] / "onnxpar"


def faults(definition: OpDef) -> list[str]:
    """The faults of a record's slots, alone and together."""
    gradient, cost, precision = definition.gradient, definition.cost, definition.precision
    memory, roles = definition.memory, definition.roles
    in_models = definition.rule is not written_only
    places = (*definition.host_operands, *roles.weights, *roles.vectors, *roles.statistics)
    wrong = {
        "no gradient, and no reason why": gradient is UNWRITTEN,
        "missing for no reason": any(
            isinstance(slot, Missing) and not slot.reason for slot in (gradient, cost)
        ),
        "the rule has no docstring": not (definition.rule.__doc__ or "").strip(),
        "the local form has no docstring": not (definition.local.__doc__ or "").strip(),
        "what draws random numbers is copied": definition.draws is always
        and definition.local is copy_node,
        "a body is required, but there is none": (
            isinstance(gradient, ByBody) or definition.rule is expanded
        )
        and not (definition.body or definition.upgrades or has_body(definition)),
        "it is made 16 bits and follows its operands": precision.half and precision.follows,
        "16 bits for what ONNX does not define": precision != FLOAT32
        and not has_schema(definition),
        "a view is written over an operand": memory.view and memory.over,
        "operands are named twice": len(set(places)) != len(places),
        "an operand that ONNX's schema lacks": has_schema(definition)
        and any(place >= arity(definition) for place in places),
        "a slot that says nothing": not all(slot_words(definition).values()),
        "it occurs only in rank graphs, but has a cost": not in_models
        and not isinstance(cost, Missing),
        "it reads shapes and elements": definition.reads_shape_only and definition.host_operands,
    }
    return [what for what, holds in wrong.items() if holds]


def has_schema(definition: OpDef) -> bool:
    return not definition.domain and onnx.defs.has(definition.op_type)


def has_body(definition: OpDef) -> bool:
    if not has_schema(definition):
        return False
    schema = onnx.defs.get_schema(definition.op_type)
    return schema.has_function or schema.has_context_dependent_function


def arity(definition: OpDef) -> int:
    return int(onnx.defs.get_schema(definition.op_type).max_input)


@pytest.mark.parametrize(
    "definition", REGISTRY.defs, ids=lambda d: f"{d.domain}:{d.op_type}:{d.since_version}"
)
def test_every_slot_is_filled(definition: OpDef) -> None:
    assert faults(definition) == []


def test_each_fault_is_seen() -> None:
    def changed(op_type: str, **slots: object) -> list[str]:
        (definition,) = (d for d in REGISTRY.defs if (d.domain, d.op_type) == ("", op_type))
        return faults(replace(definition, **slots))  # type: ignore[arg-type]

    assert changed("Add", gradient=UNWRITTEN) == ["no gradient, and no reason why"]
    assert changed("Add", gradient=Missing("")) == ["missing for no reason"]
    assert changed("Add", cost=Missing("")) == ["missing for no reason"]
    assert changed("Add", draws=always) == ["what draws random numbers is copied"]
    assert changed("Reshape", host_operands=(2,)) == ["an operand that ONNX's schema lacks"]
    assert changed("Conv", roles=Roles(weights=(1,), vectors=(1,))) == ["operands are named twice"]
    assert changed("Reshape", memory=replace(VIEW, over=((0, 0),))) == [
        "a view is written over an operand"
    ]
    assert changed("Shape", host_operands=(0,)) == ["it reads shapes and elements"]
    half = Precision(half=frozenset({"T"}), follows=True)
    assert changed("MatMul", precision=half) == ["it is made 16 bits and follows its operands"]


def test_every_slot_is_shown() -> None:
    """`onnxpar ops --json` shows all slots, including new ones."""
    slots = {field.name for field in fields(OpDef)}
    row = next(r for r in operator_table() if r.op_type == "Conv")
    assert slots == ({field.name for field in fields(OperatorRow)} - {"slots"}) | set(row.slots)
    assert row.slots["roles"] == "weight: 1; scale or bias: 2"
    assert row.slots["precision"] == "16 bits"


def named_operators(tree: ast.AST) -> list[tuple[int, list[str]]]:
    """The literals that hold several names of operators, and their lines."""
    names = {d.op_type for d in REGISTRY.defs}
    found = []
    for node in ast.walk(tree):
        keys: Sequence[ast.expr | None] = ()
        if isinstance(node, ast.Dict):
            keys = node.keys
        elif isinstance(node, ast.Set | ast.List | ast.Tuple):
            keys = node.elts
        held = [k.value for k in keys if isinstance(k, ast.Constant) and k.value in names]
        if len(held) > 1:
            found.append((node.lineno, held))
    return found


def test_no_pass_has_a_table_of_operators() -> None:
    """Passes take facts about operators from slots of their records; families are in `ops`."""
    # The names of SymPy's functions, which two operators share.
    sympys = ["Max", "Min", "Mod"]
    found = {}
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        if place.parts[0] == "ops" and len(place.parts) > 2:
            continue
        tables = named_operators(ast.parse(path.read_text(encoding="utf-8")))
        found |= {f"{place}:{line}": names for line, names in tables if names != sympys}
    assert found == {}


def test_a_table_of_operators_is_seen() -> None:
    assert named_operators(ast.parse("x = {'Add': 1, 'Mul': 2}")) == [(1, ["Add", "Mul"])]
    assert named_operators(ast.parse("x = op in ('Add', 'Mul')")) == [(1, ["Add", "Mul"])]
    assert named_operators(ast.parse("x = op == 'Add'")) == []

"""Every placement that a rule admits holds numerically, on every device."""

import onnx_ir as ir
import pytest
from op_cases import ALL
from op_harness import Case, chosen, merged_assignments

from onnxpar.errors import ShardingError
from onnxpar.mesh import Mesh
from onnxpar.sharding import REDUCTIONS

MESHES = (Mesh((), (2, 2)), Mesh((), (2, 3)))


def partial_cases(case: Case) -> bool:
    """Whether some operand may be partial; booleans have no sums."""
    dtypes = {v.dtype for v in case.view.node.inputs if v is not None}
    return bool(case.rule.linear) and dtypes != {ir.DataType.BOOL, ir.DataType.INT64}


def floating(case: Case) -> bool:
    """Whether the first operand is of floats."""
    value = case.view.node.inputs[0]
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


ids = [f"{i}-{c.view.node.op_type}" for i, c in enumerate(ALL)]


def partial_cases(case: Case) -> bool:
    """Whether some operand may be partial; booleans have no sums."""
    dtypes = {v.dtype for v in case.view.node.inputs if v is not None}
    return bool(case.rule.linear) and dtypes != {ir.DataType.BOOL, ir.DataType.INT64}


def floating(case: Case) -> bool:
    """Whether the first operand is of floats."""
    value = case.view.node.inputs[0]
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


ids = [f"{i}-{c.view.node.op_type}" for i, c in enumerate(ALL)]


def chosen(items: list, count: int = SAMPLES) -> list:
    """All of them in the full tier, else a sample; its seed is ONNXPAR_SEED."""
    if FULL or len(items) <= count:
        return items
    return random.Random(SEED).sample(items, count)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.atoms)))
@pytest.mark.parametrize("case", ALL, ids=ids)
def test_every_split_of_the_factors_holds(case: Case, mesh: Mesh) -> None:
    for factors in chosen(list(case.assignments(mesh))):
        case.check(mesh, factors)
        case.check(mesh, factors, dirty=False)


@pytest.mark.parametrize("case", ALL, ids=ids)
def test_splits_of_merged_dims_hold(case: Case) -> None:
    for factors in chosen(list(merged_assignments(case, MESHES[0])), 4):
        case.check(MESHES[0], factors)


@pytest.mark.parametrize("case", [c for c in ALL if partial_cases(c)], ids=lambda c: c.node)
def test_operands_that_may_stay_partial_do(case: Case) -> None:
    mesh = MESHES[1]
    for reduction, operands in case.rule.linear:
        if reduction == "prod" and not floating(case):
            continue  # no two integers multiply to a prime
        splits = [f for f in case.assignments(Mesh((), (2,))) if f]
        for split in [{}, *chosen(splits, 2)]:
            carried = {o: ((1,), reduction) for o in operands}
            if {case.rule.kinds[f] for f in split} & set(REDUCTIONS) - {reduction}:
                with pytest.raises(ShardingError, match="two reductions"):
                    case.check(mesh, split, carried)
            else:
                case.check(mesh, split, carried)

"""Every placement that a rule admits holds numerically on every device, and no other does."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Mesh
from onnxpar.core.rule import PARALLEL, REPLICATED, SPECIAL
from onnxpar.core.sharding import REDUCTIONS, Component
from onnxpar.graph.plan import factor_sizes
from tests.onnxpar.ops.op_cases import ALL
from tests.onnxpar.ops.op_harness import Case, chosen, merged_assignments
from tests.tiers import FULL

MESHES = (Mesh((), (2, 2)), Mesh((), (2, 3)))


# How onnxruntime refuses local shapes and indices that do not fit.
REFUSED = (state.Fail, state.InvalidArgument, state.RuntimeException, state.InvalidGraph)


def floating_operands(case: Case) -> list[int]:
    """Operands of floats that are no constants and have dims in the rule."""
    operands = zip(case.view.node.inputs, case.rule.inputs, strict=True)
    return [
        i
        for i, (value, operand) in enumerate(operands)
        if value is not None
        and not operand.mode
        and value.name in case.arrays
        and value.dtype is not None
        and value.dtype.is_floating_point()
    ]


def partial_cases(case: Case) -> bool:
    """Whether some operand of floats may be partial."""
    return bool(case.rule.linear) and floating(case)


def floating(case: Case) -> bool:
    """Whether the first operand is of floats."""
    value = case.view.node.inputs[0]
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def operator_of(case: Case) -> str:
    return case.view.node.op_type


def some(cases: Sequence[Case], first: int) -> Sequence[Case]:
    """All of them in the full tier, else at most two of each operator, from the `first` on."""
    if FULL:
        return cases
    found = defaultdict(list)
    for case in cases:
        found[operator_of(case)].append(case)
    return [of[(first + i) % len(of)] for of in found.values() for i in range(min(2, len(of)))]


# Axes of 2 and of 3 split most dims unevenly, too. Two axes of 2 are in the full tier, and below.
@pytest.mark.parametrize(
    "mesh", MESHES if FULL else MESHES[1:], ids=lambda m: "x".join(map(str, m.atoms))
)
@pytest.mark.parametrize("case", ALL, ids=operator_of)
def test_every_split_of_the_factors_holds(case: Case, mesh: Mesh) -> None:
    """In the full tier each with garbage in the padding and with zeros, else one with each."""
    splits = list(case.assignments(mesh))
    if not FULL:
        splits = [factors for factors in splits if factors] or splits
    for number, factors in enumerate(chosen(splits)):
        if FULL or not number:
            case.check(mesh, factors)
        if FULL or number:
            case.check(mesh, factors, dirty=False)


@pytest.mark.parametrize("case", some(ALL, 0), ids=operator_of)
def test_splits_of_merged_dims_hold(case: Case) -> None:
    for factors in chosen(list(merged_assignments(case, MESHES[0]))):
        case.check(MESHES[0], factors)


@pytest.mark.parametrize("case", some(list(filter(partial_cases, ALL)), 0), ids=operator_of)
def test_operands_that_may_stay_partial_do(case: Case) -> None:
    mesh = MESHES[1]
    for reduction, operands in case.rule.linear:
        splits = [f for f in case.assignments(Mesh((), (2,))) if f]
        for split in [{}, *chosen(splits, 2)]:
            carried = {o: ((1,), reduction) for o in operands}
            if {case.rule.kinds[f] for f in split} & set(REDUCTIONS) - {reduction}:
                with pytest.raises(ShardingError, match="two reductions"):
                    case.check(mesh, split, carried)
            else:
                case.check(mesh, split, carried)


# Placements that hold although no rule admits them: what they need cannot be seen from the node, or
# nothing gains by them.
_ALPHA = "keeps the order for some values of alpha only"
_DOMAIN = "keeps the order where it is defined; what a max or min makes of NaN is nobody's promise"
_AFFINE = "scale or bias could wait; nothing makes them so"
EXCUSED = {
    **dict.fromkeys(("Celu", "Elu", "LeakyRelu", "Selu", "ThresholdedRelu"), _ALPHA),
    **dict.fromkeys(("Log", "Sqrt", "Acosh"), _DOMAIN),
    "Cast": "a cast to integers keeps the order only in their range",
    "Pow": "a product passes for integer exponents only, and they are an operand",
    "Dropout": "a scale above zero; with the mask as output, that would be partial too",
    "Gemm": "the bias may wait for a max where beta is above zero",
    "FusedGemm": "as Gemm, where its activation keeps the order",
    "GroupQueryAttention": "values of a single new token could wait for a max",
    "LinearAttention": "some update rules are linear in keys and in values; nothing makes them so",
    "LayerNormalization": "the bias and, with no bias, the scale could wait; nothing makes them so",
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), _AFFINE),
    **dict.fromkeys(("GroupNormalization", "RMSNormalization"), _AFFINE),
    "SimplifiedLayerNormalization": _AFFINE,
    "SkipLayerNormalization": _AFFINE,
    "SkipSimplifiedLayerNormalization": _AFFINE,
    "SoftmaxCrossEntropyLoss": "the class weights could wait; nothing makes them so",
    "NegativeLogLikelihoodLoss": "the class weights could wait; nothing makes them so",
}
# Products whose parts do not vanish or overflow where they themselves do.
NO_PRODUCTS = ("Sign", "Reciprocal", "Div")


@pytest.mark.parametrize("case", some(ALL, 2), ids=operator_of)
def test_pending_operands_that_no_rule_admits_give_wrong_results(case: Case) -> None:
    operands = floating_operands(case)
    op_type = case.view.node.op_type
    if op_type in EXCUSED or not all(o.dtype.is_floating_point() for o in case.view.node.outputs):
        return
    if any(np.isinf(case.arrays[case.view.node.inputs[i].name]).any() for i in operands):
        return  # infinities swallow the parts
    groups = {frozenset((i,)) for i in operands} | ({frozenset(operands)} if operands else set())
    for reduction, group in product(REDUCTIONS, sorted(groups, key=sorted)):
        if (reduction, group) in case.rule.linear:
            continue
        if reduction == "prod" and op_type in NO_PRODUCTS:
            continue
        try:
            run = case.run(Mesh((), (2,)), {}, {o: ((0,), reduction) for o in group})
        except ShardingError as error:
            assert "a control-flow body must not communicate" in str(error)
            continue
        assert run.wrong(case), f"{case}: {reduction} of {sorted(group)} is right too"


@pytest.mark.parametrize("case", some(ALL, 4), ids=operator_of)
def test_factors_that_need_care_cannot_be_split_without(case: Case) -> None:
    """Sharding a replicated factor, or a special one without a local form, gives wrong results."""
    sizes = factor_sizes(case.rule, case.view)
    for factor, kind in case.rule.kinds.items():
        size = case.env.table.evaluate(sizes[factor], case.sizes)
        if kind not in (REPLICATED, SPECIAL) or size == 1:
            continue
        loose = replace(case.rule, kinds={**case.rule.kinds, factor: PARALLEL})
        split = {factor: (Component(sizes[factor], (0,)),)}
        try:
            run = case.run(Mesh((), (2,)), split, {}, rule=loose, copy=True)
        except REFUSED:
            continue
        assert run.wrong(case), f"{case}: {factor} may be split as it is"


def test_products_that_may_vanish_are_not_left_pending() -> None:
    """Parts of 1e-32 whose product is 0 in float32: its sign is 0, its reciprocal infinite."""
    parts = np.full((2, 2), 1e-32, np.float32)
    product = np.prod(parts, axis=0)
    assert (np.prod(np.sign(parts), axis=0) != np.sign(product)).all()
    for case in ALL:
        if case.view.node.op_type in NO_PRODUCTS:
            assert "prod" not in {reduction for reduction, _ in case.rule.linear}, case


def test_excuses_are_needed() -> None:
    assert set(EXCUSED) <= {c.view.node.op_type for c in ALL}

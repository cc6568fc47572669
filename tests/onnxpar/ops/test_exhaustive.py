"""All placements on one mesh axis of two devices: those that a rule admits hold, no others do.

In a placement, each operand and result is replicated, sharded in halves along a dim, or partial.
Each device runs the node itself on its operands, and the results are compared with those of the
undivided node, so no knowledge of rules enters. The placements that hold must be those that the
rule admits (after DTensor's exhaustive validation of its sharding rules). If a rule does not admit
a placement that holds, it is needlessly strict.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state

from onnxpar.core.rule import PARALLEL, Operand
from onnxpar.core.sharding import REDUCTIONS
from onnxpar.graph.plan import factor_sizes
from onnxpar.ops.local_node import copy_node
from onnxpar.ops.table import REGISTRY
from tests.lockstep import COMBINE, Array, evaluator
from tests.onnxpar.ops.op_cases import ALL
from tests.onnxpar.ops.op_harness import Case
from tests.onnxpar.ops.test_placements import EXCUSED, NO_PRODUCTS

REPLICATED = "replicated"
REFUSED = (state.Fail, state.InvalidArgument, state.RuntimeException, state.InvalidGraph)
Placement = tuple[str, ...]
Sizes = Mapping[str, int]
EVEN: Sizes = {"N": 6, "S": 4, "K": 8, "V": 8, "batch": 4}


def plain(case: Case) -> bool:
    """Whether a device always runs the node itself, in any sharding."""
    rule = case.rule
    return case.definition.local is copy_node and not getattr(rule, "scaled", ())


@cache
def even(case_index: int) -> Case:
    """The case with even sizes, if its data allow it."""
    case = ALL[case_index]
    if case.feeds or case.proto is not None:
        return case
    sizes = {name: EVEN.get(name, size + size % 2) for name, size in case.sizes.items()}
    return replace(case, sizes=sizes)


def spread(operand: int, placement: str, array: Array) -> list[Array] | None:
    """The values of both devices; None if there is no such placement."""
    if placement == REPLICATED:
        return [array, array]
    if placement.isdigit():
        return np.split(array, 2, int(placement))
    rng = np.random.default_rng(operand)
    # Terms have both signs and are never neutral.
    part = np.asarray(rng.uniform(0.5, 3, array.shape) * rng.choice([-1, 1], array.shape))
    part = part.astype(array.dtype)
    if placement == "sum":
        return [np.asarray(array - part), np.asarray(part)]
    if placement == "prod":
        return [np.asarray(array / part), np.asarray(part)]
    first = rng.random(array.shape) < 0.5
    other = array + (np.abs(part) if placement == "min" else -np.abs(part))
    return [np.where(first, array, other), np.where(first, other, array)]


def choices(array: Array) -> Iterator[str]:
    yield REPLICATED
    yield from (str(d) for d, size in enumerate(array.shape) if size > 1 and size % 2 == 0)
    if array.dtype.kind == "f":
        yield from REDUCTIONS


def holding(parts: list[Array], want: Array, rtol: float) -> Iterator[str]:
    """The placements in which two results are the undivided result."""
    candidates = {REPLICATED: parts[0]} if same(parts[0], parts[1], rtol) else {}
    for dim in range(want.ndim):
        if parts[0].shape == parts[1].shape and parts[0].shape[dim] * 2 == want.shape[dim]:
            candidates[str(dim)] = np.concatenate(parts, dim)
    if want.dtype.kind in "fiu" and parts[0].shape == parts[1].shape == want.shape:
        with np.errstate(all="ignore"):
            candidates |= {r: np.asarray(COMBINE[r](*parts)) for r in REDUCTIONS}
    yield from (name for name, made in candidates.items() if same(made, want, rtol))


def same(made: Array, want: Array, rtol: float) -> bool:
    if made.shape != want.shape or made.dtype != want.dtype:
        return False
    if want.dtype.kind != "f":
        return bool(np.array_equal(made, want))
    scale = float(np.max(np.abs(want[np.isfinite(want)]), initial=1e-30))
    return bool(np.allclose(made, want, 0, 10 * rtol * scale, equal_nan=True))


def free(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with operands of any size."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for value in (*copy.graph.input, *copy.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}{axis}"
    return copy


def admitted(case: Case, names: list[str]) -> set[tuple[Placement, Placement]]:
    """The placements by the rule: each factor sharded, each group of operands partial."""
    rule = case.rule
    sizes = factor_sizes(rule, case.view)
    operands = {v.name: o for v, o in zip(case.view.node.inputs, rule.inputs, strict=True) if v}

    def split(operand: Operand, factor: str, absent: str) -> str | None:
        """The placement, `absent` without the factor; None if no dim is sharded in halves."""
        for axis, dim in enumerate(operand.dims):
            if factor in dim:
                return str(axis) if dim[0] == factor else None
        return absent

    found: set[tuple[Placement, Placement]] = set()
    for factor, kind in rule.kinds.items():
        size = case.env.table.evaluate(sizes[factor], case.sizes)
        if (kind != PARALLEL and kind not in REDUCTIONS) or size % 2:
            continue
        absent = REPLICATED if kind == PARALLEL else kind
        enter = [split(operands[n], factor, REPLICATED) for n in names]
        leave = [split(o, factor, absent) for o in rule.outputs]
        if None not in enter and None not in leave:
            found.add((tuple(filter(None, enter)), tuple(filter(None, leave))))
    positions = {v.name: i for i, v in enumerate(case.view.node.inputs) if v is not None}
    for reduction, group in rule.linear:
        if group - {positions[n] for n in names}:
            continue  # a constant cannot be partial here
        enter_all = tuple(reduction if positions[n] in group else REPLICATED for n in names)
        found.add((enter_all, (reduction,) * len(rule.outputs)))
    return found


def may_be(case: Case, names: list[str], enter: Placement) -> bool:
    """Whether the operands can have these placements."""
    return all(p in choices(case.arrays[n]) for n, p in zip(names, enter, strict=True))


def reductions(placements: Placement) -> set[str]:
    return set(placements) & set(REDUCTIONS)


# Partial operands that hold although no rule says so, besides those of the test of placements.
_SOME = "any of three operands may be partial together, and the rule names one or all"
NEEDLESS = {
    **EXCUSED,
    **dict.fromkeys(NO_PRODUCTS, "products that vanish are not among the data"),
    **dict.fromkeys(("Max", "Min", "Concat"), _SOME),
    "Pad": "the fill value could be partial like the data; no operator makes it so",
}

PLAIN = [i for i, case in enumerate(ALL) if case.proto is None]
ids = [f"{i}-{ALL[i].view.node.op_type}" for i in PLAIN]


@pytest.mark.parametrize("index", PLAIN, ids=ids)
def test_what_holds_is_what_the_rule_admits(index: int) -> None:
    case = even(index)
    names = [v.name or "" for v in case.view.node.inputs if v is not None]
    names = [n for n in dict.fromkeys(names) if n in case.arrays]
    if not plain(case) or len(names) > 3 or not case.view.node.outputs:
        pytest.skip("its local form is not the node itself")
    run = evaluator(free(case.model), case.reference)
    want = case.expected
    held: set[tuple[Placement, Placement]] = set()
    for enter in product(*(choices(case.arrays[n]) for n in names)):
        if set(enter) == {REPLICATED}:
            continue
        shards = [
            spread(i, p, case.arrays[n]) for i, (n, p) in enumerate(zip(names, enter, strict=True))
        ]
        try:
            made = [
                list(run({n: s[rank] for n, s in zip(names, shards, strict=True)}).values())
                for rank in (0, 1)
            ]
        except REFUSED:
            continue
        leave = [set(holding([a, b], w, case.rtol)) for a, b, w in zip(*made, want, strict=True)]
        held |= {(enter, out) for out in product(*leave)}
    allowed = admitted(case, names)
    expressible = {(e, o) for e, o in allowed if may_be(case, names, e)}
    missing = expressible - held
    needless = {
        (e, o)
        for e, o in held
        # No rule can say that one reduction becomes another (Neg of a max is a min).
        if reductions(e) == reductions(o) or not reductions(e)
        if not any(e == a for a, _ in allowed)
    }
    if case.view.node.op_type in NEEDLESS:
        needless = {(e, o) for e, o in needless if not reductions(e)}
    assert not missing, f"{case}: admitted, and wrong: {missing}"
    assert not needless, f"{case}: right, and not admitted: {needless}"


# Operators without a case here, with the reason.
_DATA = "it is replicated: the size of its result depends on data"
_DEFAULT = "the operator of the default domain has the same rule"
NO_CASE = {
    **dict.fromkeys(
        [("", n) for n in ("Compress", "NonMaxSuppression", "NonZero", "Unique")], _DATA
    ),
    ("", "Constant"): "loading turns it into an initializer",
    ("", "LinearAttention"): "onnxruntime has no kernel; it has tests of its own",
    ("", "MelWeightMatrix"): "it is replicated, from five numbers",
    ("", "Multinomial"): "it draws other numbers than onnxruntime; tests of random check it",
    ("", "Scatter"): "ScatterElements of an older opset",
    ("com.microsoft", "FusedMatMul"): "MatMul's rule; tests of gradients shard it",
    ("com.microsoft", "QLinearReduceMean"): "the rule of QLinearGlobalAveragePool",
    **dict.fromkeys(
        [("com.microsoft", n) for n in ("QuantizeLinear", "DequantizeLinear", "GridSample")],
        _DEFAULT,
    ),
}
# Modules of operators that are always replicated, or always replaced by their bodies.
UNDIVIDED = (
    "onnxpar.ops.replicated_operators",
    "onnxpar.ops.sequence.sequence",
    "onnxpar.ops.operator",
)


def test_every_operator_has_a_case() -> None:
    have = {(n.domain, n.op_type) for case in ALL for n in case.model.graph.node}
    left = {
        (d.domain, d.op_type)
        for d in REGISTRY.defs
        if d.domain != "onnxpar" and d.rule.__module__ not in UNDIVIDED
    }
    assert not left - have - set(NO_CASE), left - have - set(NO_CASE)
